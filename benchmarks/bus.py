"""What telemetry costs the coordinator: over gRPC, and over MQTT beside it.

The coordinator is the real process (`starlings coordinator`), the broker a real Mosquitto with the configuration that
`starlings bus config` writes; workers are simulated by other processes over real mTLS (`bus_load.py`), each with a
certificate, a control stream and a connection to the broker of its own. They heartbeat at the pace that the coordinator
names, and send telemetry every 5 s: once over gRPC, to a coordinator without a bus, once over MQTT, to one with it. CPU
and memory are those of the coordinator's process alone. They hold only while all keep their pace, which is a claim too:
a coordinator that waits for a core reads many messages at once, and gRPC then looks several times as cheap as it is.

    python benchmarks/bus.py [--quick] [--json FILE] [--workers N] [--streams N]

With fewer streams than workers each stream sends for several, so that the messages per second are those of `--workers`;
memory is that of `--streams`. `--quick` does that. The whole run, ten thousand of both, takes about 15 minutes on two
cores, and needs 12,000 file descriptors per process (ulimit -n) and 6 GB of memory.
"""

from __future__ import annotations

import argparse
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parent))

from report import Claim, environment, show, write_json

import coordinator as crowd
from starlings_coordinator.broker.configuration import BrokerSettings
from starlings_coordinator.broker.files import Access, write_broker_files
from starlings_job.prepared import JOB_FILE
from starlings_protos.authority import CertificateAuthority
from starlings_protos.telemetry import TELEMETRY_INTERVAL_S

CPU_RATIO_BOUND = 0.2
HEARD_BOUND = 0.95
PACE_BOUND = 0.95
WORKERS_PER_GENERATOR = 500
# Handshakes at once, of all generators together: a coordinator does about a hundred a second, and each may take 10 s.
CONNECTING_AT_ONCE = 64
LOAD = Path(__file__).with_name("bus_load.py")
HIDDEN = {"reasons", "late", "streams", "connect s"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def mosquitto(job: Path, directory: Path, port: int) -> Iterator[psutil.Process]:
    program = shutil.which("mosquitto") or shutil.which("/usr/sbin/mosquitto")
    if program is None:
        sys.exit("This needs Mosquitto: apt-get install mosquitto (or brew install mosquitto).")
    me = psutil.Process().username()
    settings = BrokerSettings(crowd.JOB, port, str(directory), me, "localhost")
    authority = CertificateAuthority.load_or_create(job / "ca", crowd.JOB, time.time())
    write_broker_files(
        directory, settings, authority, ["localhost", "127.0.0.1"], Access((), ()), now_s=time.time()
    )
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen([program, "-c", str(directory / "mosquitto.conf")], stderr=log)
    try:
        deadline = time.monotonic() + 10
        while True:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the broker did not start: {(directory / 'log').read_text()}")
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(10)


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def measure(
    job: Path, workers: int, streams: int, windows: int, window_s: float, broker_port: int
) -> dict[str, Any]:
    """One way of sending telemetry; over MQTT if there is a port."""
    over_mqtt = broker_port != 0
    every_s = TELEMETRY_INTERVAL_S * streams / workers
    count = -(-streams // WORKERS_PER_GENERATOR)
    shares = [streams // count + (n < streams % count) for n in range(count)]
    with ExitStack() as stack:
        broker = (
            stack.enter_context(mosquitto(job, job.parent / "broker", broker_port)) if over_mqtt else None
        )
        running = stack.enter_context(crowd.coordinator(job))
        order = {"directory": str(job), "job": crowd.JOB, "broker_port": broker_port}
        talking = {
            **order,
            "mode": "mqtt" if over_mqtt else "grpc",
            "control": running.control,
            "every_s": every_s,
            "connecting_at_once": max(1, CONNECTING_AT_ONCE // count),
        }
        loads = stack.enter_context(crowd.generators([{**talking, "workers": n} for n in shares], LOAD))
        listeners = stack.enter_context(
            crowd.generators([{**order, "mode": "listen"}] if over_mqtt else [], LOAD)
        )
        for load in loads:
            load.expect("prepared")
        for listener in listeners:
            listener.expect("listening")
        begun_s = time.monotonic()
        for load in loads:
            load.tell("go")
        interval_s = max(load.expect("connected")["interval_s"] for load in loads)
        connect_s = time.monotonic() - begun_s
        for load in loads:
            load.tell("go")
        # Joining is over when everybody has slept the pace of a smaller swarm once more and was told the present one;
        # and everybody has begun to talk.
        time.sleep(max(2 * window_s, every_s, 1.25 * interval_s))

        def counted(sources: list[crowd.Generator]) -> dict[str, float]:
            for source in sources:
                source.tell("count")
            told = [source.expect("counted") for source in sources]
            return {k: sum(t.get(k, 0) for t in told) for k in ("telemetry", "beats", "late")}

        before, heard_before, begun_s = counted(loads), counted(listeners), time.monotonic()
        cpu, broker_cpu, rss = [], [], []
        for _ in range(windows):
            own, other, at_s = running.cpu_s(), _cpu_s(broker) if broker else 0.0, time.monotonic()
            time.sleep(window_s)
            elapsed_s = time.monotonic() - at_s
            cpu.append((running.cpu_s() - own) / elapsed_s)
            broker_cpu.append(((_cpu_s(broker) if broker else 0.0) - other) / elapsed_s)
            rss.append(running.rss_mib())
        after, heard_after = counted(loads), counted(listeners)
        elapsed_s = time.monotonic() - begun_s
        broker_mib = float(broker.memory_info().rss) / (1 << 20) if broker else 0.0
        for generator in [*loads, *listeners]:
            generator.tell("stop")
        done = [load.expect("done") for load in loads]
    sent = after["telemetry"] - before["telemetry"]
    return {
        "telemetry over": "MQTT" if over_mqtt else "gRPC",
        "workers": workers,
        "streams": streams,
        "cpu share": statistics.median(cpu),
        "RSS MiB": max(rss),
        "telemetry/s": sent / elapsed_s,
        "heartbeats/s": (after["beats"] - before["beats"]) / elapsed_s,
        "heard": (heard_after["telemetry"] - heard_before["telemetry"]) / sent if over_mqtt else None,
        "broker cpu": statistics.median(broker_cpu) if over_mqtt else None,
        "broker MiB": broker_mib if over_mqtt else None,
        "interval s": interval_s,
        "connect s": connect_s,
        "late": after["late"] - before["late"],
        "lost": sum(d["lost"] for d in done),
        "reasons": "; ".join(sorted({r for d in done for r in d["reasons"]})),
    }


def run(
    workers: int, streams: int, windows: int, window_s: float
) -> tuple[list[dict[str, Any]], list[Claim]]:
    with tempfile.TemporaryDirectory(prefix="starlings-bus-") as scratch:
        without = crowd.prepare(Path(scratch) / "without")
        with_bus = Path(scratch) / "with" / "job"
        shutil.copytree(without, with_bus)
        port = free_port()
        with (with_bus / JOB_FILE).open("a") as file:
            file.write(f'\n[bus]\nurl = "mqtts://localhost:{port}"\n')
        print(f"{streams} streams, telemetry of {workers} workers over gRPC", file=sys.stderr)
        over_grpc = measure(without, workers, streams, windows, window_s, 0)
        print(f"{streams} streams, telemetry of {workers} workers over MQTT", file=sys.stderr)
        over_mqtt = measure(with_bus, workers, streams, windows, window_s, port)
    rows = [over_grpc, over_mqtt]
    ratio = over_mqtt["cpu share"] / over_grpc["cpu share"]
    lost, heard = float(sum(row["lost"] for row in rows)), over_mqtt["heard"]
    # Starved generators send too little of either, and whichever side is spared more looks the cheaper.
    pace = min(
        min(
            row["telemetry/s"] * TELEMETRY_INTERVAL_S / workers,
            row["heartbeats/s"] * row["interval s"] / streams,
        )
        for row in rows
    )
    claims = [
        Claim(
            "CPU of the coordinator with the bus / without it",
            ratio,
            CPU_RATIO_BOUND,
            ratio < CPU_RATIO_BOUND,
        ),
        Claim(
            "telemetry that an observer heard, of what was sent",
            heard,
            HEARD_BOUND,
            heard >= HEARD_BOUND,
        ),
        Claim(
            "telemetry or heartbeats that were sent, of what was meant to be",
            pace,
            PACE_BOUND,
            pace >= PACE_BOUND,
        ),
        Claim("connections lost", lost, 0.0, lost == 0),
    ]
    return rows, claims


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="10,000 workers on 500 streams, under a minute")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write rows and claims there")
    parser.add_argument("--workers", type=int, default=10_000)
    parser.add_argument("--streams", type=int, help="as many as workers when left out")
    options = parser.parse_args()
    environ = environment()
    if options.quick:
        rows, claims = run(10_000, 500, 3, 2.0)
    else:
        rows, claims = run(options.workers, options.streams or options.workers, 5, 10.0)
    show("What telemetry costs the coordinator", rows, claims, HIDDEN)
    for row in rows:
        if row["reasons"]:
            print(
                f"why connections were lost over {row['telemetry over']}: {row['reasons']}", file=sys.stderr
            )
    write_json(options.json, "bus", environ, rows, claims)
    return 0 if all(claim.holds for claim in claims) else 1


if __name__ == "__main__":
    sys.exit(main())
