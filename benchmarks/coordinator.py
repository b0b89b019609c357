"""What the coordinator costs: a thousand connected workers that heartbeat, and two hundred that join at once.

The coordinator is the real process (`starlings coordinator`), with its own planner and keeper; the workers are
simulated by a few other processes over real mTLS (`coordinator_load.py`): real enrolments, handshakes, control streams
and messages, no engines. CPU and memory are those of the coordinator's process alone, read from the system, so that
they hold also when the generators share its cores; the times of the storm include the generator's own work.

    python benchmarks/coordinator.py [--quick] [--json FILE] [--workers N] [--storm N] [--turns N]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parent))

from report import Claim, environment, show, write_json

from starlings import template
from starlings.demo.swarm import Swarm

JOB = "crowd"
RSS_BOUND_MIB = 200.0
CPU_SHARE_BOUND = 0.25
STORM_BOUND_S = 10.0
WORKERS_PER_GENERATOR = 250
STAGE_LIMIT_S = 300.0
# For the JSON file; the table has to fit into 140 columns.
HIDDEN = {"RSS before", "planner MiB", "keeper MiB", "connect CPU s", "threads", "reasons"}
LOAD = Path(__file__).with_name("coordinator_load.py")


def prepare(directory: Path) -> Path:
    """A prepared job that never has enough workers to begin."""
    text = template.render(
        {
            "job": {"name": JOB, "tokens": 1_000_000},
            "model": {"preset": "micro"},
            "data": {"source": "stdlib", "limit": "256K", "sequence_length": 32, "held_out": 8},
            "train": {"batch": 8, "microbatch": 4},
            "swarm": {"min_workers": 100_000, "settle_s": 0.5},
            "network.ports": {"control": 0, "enrolment": 0},
        },
        comments=False,
    )
    directory.mkdir(parents=True)
    file = directory / "job.toml"
    file.write_text(text)
    subprocess.run(
        [sys.executable, "-m", "starlings", "prepare", str(file), "--dir", str(directory / "job"), "--json"],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return directory / "job"


class Generator:
    """One process of simulated workers."""

    def __init__(self, order: dict[str, Any], load: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(load)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.tell(json.dumps(order))

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def expect(self, event: str) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            said = json.loads(line)
            if said["event"] == event:
                return dict(said)
        raise RuntimeError(f"a generator ended with {self.process.wait()} before it was {event}")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def generators(orders: Sequence[dict[str, Any]], load: Path = LOAD) -> Iterator[list[Generator]]:
    running: list[Generator] = []
    try:
        for order in orders:
            running.append(Generator(order, load))
        yield running
    finally:
        for generator in running:
            generator.close()


@dataclass
class Coordinator:
    """The process under test."""

    directory: Path
    invite: str
    process: psutil.Process

    @property
    def control(self) -> str:
        return str(json.loads((self.directory / "owner" / "coordinator.json").read_text())["control"][0])

    def cpu_s(self) -> float:
        times = self.process.cpu_times()
        return float(times.user + times.system)

    def rss_mib(self) -> float:
        return float(self.process.memory_info().rss) / (1 << 20)

    def child_mib(self, name: str) -> float:
        """The memory of its planner or keeper."""
        found = [c for c in self.process.children(recursive=True) if name in " ".join(c.cmdline())]
        return sum(float(c.memory_info().rss) for c in found) / (1 << 20)


@contextmanager
def coordinator(directory: Path) -> Iterator[Coordinator]:
    with Swarm(directory.parent) as swarm:
        invite = swarm.start_coordinator([str(directory), "--listen", "127.0.0.1", "--host", "127.0.0.1"])
        assert swarm.coordinator is not None
        yield Coordinator(directory, invite, psutil.Process(swarm.coordinator.process.pid))
        swarm.check()


def crowd(job: Path, workers: int, windows: int, window_s: float) -> dict[str, Any]:
    """The steady state: medians over windows."""
    shares = _split(workers, WORKERS_PER_GENERATOR)
    with coordinator(job) as running:
        rss_before = running.rss_mib()
        orders = [
            {"mode": "beat", "directory": str(job), "job": JOB, "control": running.control, "workers": n}
            for n in shares
        ]
        with generators(orders) as loads:
            for load in loads:
                load.expect("prepared")
            cpu_before, begun_s = running.cpu_s(), time.monotonic()
            for load in loads:
                load.tell("go")
            connected = [load.expect("connected") for load in loads]
            connect_s, connect_cpu_s = time.monotonic() - begun_s, running.cpu_s() - cpu_before
            time.sleep(window_s)  # joining is over; what it left behind (probes, records) is not
            cpu, rss = [], []
            for _ in range(windows):
                cpu_at, at_s = running.cpu_s(), time.monotonic()
                time.sleep(window_s)
                cpu.append((running.cpu_s() - cpu_at) / (time.monotonic() - at_s))
                rss.append(running.rss_mib())
            planner, keeper = running.child_mib("planner"), running.child_mib("keeper")
            files, threads = running.process.num_fds(), running.process.num_threads()
            for load in loads:
                load.tell("stop")
            beaten = [load.expect("beaten") for load in loads]
    interval_s = max(c["interval_s"] for c in connected)
    share = statistics.median(cpu)
    return {
        "workers that beat": workers,
        "cpu share": share,
        "ms CPU/heartbeat": 1e3 * share * interval_s / workers,
        "RSS MiB": max(rss),
        "RSS before": rss_before,
        "planner MiB": planner,
        "keeper MiB": keeper,
        "ack ms": 1e3 * statistics.median(b["latency_median_s"] for b in beaten),
        "ack p99 ms": 1e3 * max(b["latency_p99_s"] for b in beaten),
        "interval s": interval_s,
        "connect s": connect_s,
        "connect CPU s": connect_cpu_s,
        "files": files,
        "threads": threads,
        "lost": sum(b["lost"] for b in beaten),
        "reasons": "; ".join(sorted({r for b in beaten for r in b["reasons"]})),
    }


def _split(workers: int, most: int) -> list[int]:
    count = -(-workers // most)
    return [workers // count + (n < workers % count) for n in range(count)]


def storm(job: Path, workers: int) -> dict[str, Any]:
    """One turn of everybody joining at once."""
    with coordinator(job) as running:
        order = {"mode": "storm", "invite": running.invite, "control": running.control, "workers": workers}
        with generators([order]) as (load,):
            load.expect("prepared")
            cpu_before = running.cpu_s()
            load.tell("go")
            stormed = load.expect("stormed")
            return {
                **stormed,
                "cpu_s": running.cpu_s() - cpu_before,
                "rss_mib": running.rss_mib(),
            }


def run(
    workers: int, windows: int, window_s: float, storm_workers: int, turns: int
) -> tuple[list[dict[str, Any]], list[Claim]]:
    with tempfile.TemporaryDirectory(prefix="starlings-coordinator-") as scratch:
        job = prepare(Path(scratch) / "first")
        print(f"{storm_workers} workers join at once", file=sys.stderr)
        storms = [storm(job, storm_workers) for _ in range(turns)]
        print(f"{workers} workers heartbeat", file=sys.stderr)
        steady = crowd(job, workers, windows, window_s)
    failed = sum(s["failed"] for s in storms)
    if failed:
        print("; ".join(f for s in storms for f in s["failures"]), file=sys.stderr)
    welcomed = statistics.median(s["welcomed_s"] for s in storms)
    joining = {
        "workers that join at once": storm_workers,
        "joined s": welcomed,
        "enrolled s": statistics.median(s["enrolled_s"] for s in storms),
        "CPU s": statistics.median(s["cpu_s"] for s in storms),
        "generator CPU s": statistics.median(s["generator_cpu_s"] for s in storms),
        "RSS MiB": max(s["rss_mib"] for s in storms),
        "lost": failed,
    }
    claims = [
        Claim(
            "memory of the coordinator with its workers, MiB",
            steady["RSS MiB"],
            RSS_BOUND_MIB,
            steady["RSS MiB"] <= RSS_BOUND_MIB,
        ),
        Claim(
            "CPU share of the coordinator, of one core",
            steady["cpu share"],
            CPU_SHARE_BOUND,
            steady["cpu share"] <= CPU_SHARE_BOUND,
        ),
        Claim("streams lost", float(steady["lost"]), 0.0, steady["lost"] == 0),
        Claim("join storm until the last Welcome, s", welcomed, STORM_BOUND_S, welcomed <= STORM_BOUND_S),
        Claim("joins that failed", float(failed), 0.0, failed == 0),
    ]
    return [steady, joining], claims


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="200 workers and a storm of 50, under a minute")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write rows and claims there")
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--storm", type=int, default=200)
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    environ = environment()
    if options.quick:
        rows, claims = run(200, 2, 3.0, 50, 1)
    else:
        rows, claims = run(options.workers, 5, 10.0, options.storm, options.turns)
    show("What the coordinator costs", rows, claims, HIDDEN)
    if rows[0]["reasons"]:
        print(f"why streams were lost: {rows[0]['reasons']}", file=sys.stderr)
    write_json(options.json, "coordinator", environ, rows, claims)
    return 0 if all(claim.holds for claim in claims) else 1


if __name__ == "__main__":
    sys.exit(main())
