"""What low-communication training costs in loss and saves in bytes, preset by preset and part by part, paired by seed.

`micro` on the standard library's sources, in one process: the worker's own exchange, outer rules and codecs over
memory (`inprocess`). All rows of a seed begin with the same weights and train on the same samples in the same order.
Every preset is given its own best inner learning rate first, by runs of another seed. `loss` is of the replicas' exact
average on held-out text, as a job ends; `gap`: against the group's synchronous training of the same seed, with its 95 %
interval over the seeds (Student's t). Bytes are what a worker sends in exchanges, the average at the end included;
those of synchronous training are its parts in float32 to their owners and back, 2 (n - 1) / n x 4 bytes a parameter and
step, which is what a ring sends too.

| group | what |
| --- | --- |
| long | `pairs`, and `diloco` that exchanges as often, against `allreduce`: 4 replicas, 3,000 steps |
| warm | `pairs` and `allreduce` from the same weights and moments, after 1,000 synchronous steps |
| presets | all of them, 1,000 steps |
| large | 8 replicas of 3 stages, whose gradients are as old as the pipeline is long |
| parts | `pairs` without, or with more of, each of its parts |

Finished runs are kept in DIR, and the program goes on where it was broken off; curves are drawn there too.

    python benchmarks/convergence.py [--quick] [--json FILE] [--dir DIR] [--jobs N] [--only GROUP] [--report]
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
sys.path.insert(0, str(Path(__file__).parent))

import torch
from convergence_rows import (
    MICROBATCH,
    PRESETS,
    RATE_SEED,
    RATES,
    SEEDS,
    WARM_STEPS,
    Row,
    all_rows,
    row,
)
from curves import Curve, draw_curves
from inprocess.local import train_locally
from inprocess.rounds import Course, rounds_of
from inprocess.stacked import Stacked
from inprocess.swarm import Setup, Swarm
from inprocess.text import Text
from inprocess.training import train_synchronously
from paired import Results, interval
from report import Claim, environment, show, write_json
from safetensors.torch import load_file, save_file

from starlings_job.model import initial_state
from starlings_job.sections import TrainSection
from starlings_worker.optimizers.adam import AdamW

HELD_OUT, EVALUATE_TOGETHER = 256, 32
# Steps that become one point of a curve.
SMOOTHED_STEPS = 25
SEQUENCE_TOKENS = 64
# Passes of a training that is as long are compiled.
COMPILED_STEPS = 500

GAPS = {
    ("long pairs", "long allreduce"): (0.03, "pairs above allreduce at equal tokens"),
    ("warm pairs", "warm allreduce"): (0.02, "pairs above allreduce from a common warm start"),
    ("long pairs", "long diloco"): (0.015, "pairs above diloco at the same H"),
}
FEWER_BYTES = 80.0

# By what they are the best for (`Row.rate_of`).
Rates = dict[Row, float]


def run(one: Row, folder: Path, prepared: Path, seed: int, rate: float, held_out: int) -> dict[str, Any]:
    """One training from its start to its end."""
    torch.set_num_threads(1)
    text = Text.opened(prepared)
    setup = Setup(
        AdamW(),
        replicas=one.replicas,
        stages=one.stages,
        gradient_codec=one.rules.codec if one.rules.topology == "all" and not _sparse(one) else "exact",
        recompute=one.delayed,
    )
    swarm = Swarm(text.description, dict(initial_state(text.description, seed)), setup)
    first_step = WARM_STEPS if one.warm else 0
    if one.warm:
        _restore(swarm, _warm_file(folder, seed), WARM_STEPS)
    train = TrainSection(batch=MICROBATCH * one.replicas, microbatch=MICROBATCH, lr=rate)
    until = {
        "seed": seed,
        "steps": one.steps,
        "first_step": first_step,
        "steps_total": first_step + one.steps,
    }
    begin = time.process_time()
    batches = text.held_out(held_out, EVALUATE_TOGETHER)
    refused = rounds_done = 0
    compiled = one.steps >= COMPILED_STEPS
    if one.synchronous:
        losses = train_synchronously(
            swarm, text, train, compute=Stacked(swarm, compiled=compiled).train, **until
        )
        sent_bytes, alone = swarm.exchange_bytes, math.nan
    else:
        rounds = rounds_of(swarm, one.rules, Course(one.steps, seed, one.lag))
        losses = train_locally(swarm, text, train, rounds, delayed=one.delayed, compiled=compiled, **until)
        alone = swarm.evaluate(0, batches, through_codec=False)
        rounds.finish()
        sent_bytes, refused, rounds_done = rounds.sent_bytes, rounds.refused, rounds.rounds
    found = {
        "loss": swarm.evaluate(0, batches, through_codec=False),
        "loss_of_one": alone,
        "losses": [round(statistics.fmean(part), 5) for part in _cut(losses, SMOOTHED_STEPS)],
        "bytes_per_worker": sent_bytes / len(swarm.workers),
        "rounds": rounds_done,
        "refused": refused,
        "rate": rate,
        "cpu_s": time.process_time() - begin,
    }
    text.close()
    return found


def make_warm_start(folder: Path, prepared: Path, seed: int, rate: float) -> dict[str, Any]:
    """Weights and moments after WARM_STEPS synchronous steps, in a file."""
    torch.set_num_threads(1)
    text = Text.opened(prepared)
    swarm = Swarm(text.description, dict(initial_state(text.description, seed)), Setup(AdamW(), replicas=4))
    train = TrainSection(batch=4 * MICROBATCH, microbatch=MICROBATCH, lr=rate)
    losses = train_synchronously(
        swarm,
        text,
        train,
        seed=seed,
        steps=WARM_STEPS,
        steps_total=WARM_STEPS + row("warm", "allreduce").steps,
        compute=Stacked(swarm, compiled=True).train,
    )
    (vector,) = swarm.workers[0].held.vectors.values()
    part = _warm_file(folder, seed).with_suffix(".part")
    save_file({"parameters": vector.parameters, **vector.state}, part)
    part.replace(_warm_file(folder, seed))
    text.close()
    return {"loss": statistics.fmean(losses[-SMOOTHED_STEPS:])}


def _warm_file(folder: Path, seed: int) -> Path:
    return folder / f"warm-{seed}.safetensors"


def _restore(swarm: Swarm, file: Path, version: int) -> None:
    tensors = load_file(file)
    for worker in swarm.workers:
        (vector,) = worker.held.vectors.values()
        vector.parameters.copy_(tensors["parameters"])
        for kind, values in vector.state.items():
            values.copy_(tensors[kind])
        worker.held.version = version


def _sparse(one: Row) -> bool:
    return one.rules.preset == "sparseloco"


def _cut(values: Sequence[float], count: int) -> Iterator[Sequence[float]]:
    return (values[begin : begin + count] for begin in range(0, len(values), count))


# ---------------------------------------------------------------- what is to be done, in processes


@dataclass(frozen=True, slots=True)
class Task:
    """One training, in a process of its own. `key`: under which its result is kept."""

    key: str
    name: str
    function: Callable[..., dict[str, Any]]
    arguments: tuple[Any, ...]


class Desk:
    """Runs that are kept, and those that are not yet."""

    def __init__(self, folder: Path, prepared: Path, results: Results, jobs: int, held_out: int) -> None:
        self.folder, self.results, self._prepared = folder, results, prepared
        self._jobs, self._held_out = jobs, held_out

    def wave(self, wanted: Sequence[Task]) -> None:
        """Does those without a result, several at a time; without jobs none."""
        missing = list({task.key: task for task in wanted if self.results.get(task.key) is None}.values())
        if not missing or not self._jobs:
            return
        context = multiprocessing.get_context("forkserver")
        begin, done = time.monotonic(), 0
        failed: BaseException | None = None
        with ProcessPoolExecutor(self._jobs, mp_context=context) as pool:
            futures = {pool.submit(task.function, *task.arguments): task for task in missing}
            for future in as_completed(futures):
                if future.cancelled():
                    continue
                if future.exception() is not None:
                    # What is under way is still kept; nothing new begins.
                    failed = failed or future.exception()
                    pool.shutdown(wait=False, cancel_futures=True)
                    continue
                task, found = futures[future], future.result()
                self.results.add(task.key, found)
                done += 1
                left = (time.monotonic() - begin) / done * (len(missing) - done)
                print(
                    f"{task.name}: {found['loss']:.4f}; {done} of {len(missing)}, about {left / 60:.0f} min left",
                    file=sys.stderr,
                    flush=True,
                )
        if failed is not None:
            raise failed

    def runs(self, rows: Sequence[Row], seeds: range, rates: Rates) -> None:
        """One seed after the other: what is broken off has whole pairs."""
        known = [one for one in rows if one.rate_of in rates]
        self.wave([self._task(one, seed, rates[one.rate_of]) for seed in seeds for one in known])

    def warm_starts(self, seeds: range, rate: float) -> None:
        folder, prepared = self.folder, self._prepared
        self.wave(
            [
                Task(
                    f"warm start at {rate:g} {seed}",
                    f"warm start, seed {seed}",
                    make_warm_start,
                    (folder, prepared, seed, rate),
                )
                for seed in seeds
            ]
        )

    def _task(self, one: Row, seed: int, rate: float) -> Task:
        arguments = (one, self.folder, self._prepared, seed, rate, self._held_out)
        return Task(run_key(one, seed, rate), f"{one.key}, seed {seed}", run, arguments)

    def find_rates(self, wanted: Sequence[Row], tried: Sequence[float]) -> Rates:
        """The best inner learning rate of each, by held-out loss: of `tried` two in the middle first, then on towards
        the better one while that helps.
        """
        losses: dict[Row, dict[float, float]] = {one: {} for one in wanted}
        middle = (len(tried) - 1) // 2
        waiting = {one: list(tried[middle : middle + 2]) for one in wanted}
        while any(waiting.values()):
            self.wave([self._task(one, RATE_SEED, rate) for one in wanted for rate in waiting[one]])
            for one in wanted:
                found = {rate: self.results.get(run_key(one, RATE_SEED, rate)) for rate in waiting[one]}
                losses[one] |= {rate: run["loss"] for rate, run in found.items() if run is not None}
                waiting[one] = beside_best(losses[one], tried) if all(found.values()) else []
        return {one: min(found, key=found.__getitem__) for one, found in losses.items() if found}


def beside_best(losses: Mapping[float, float], tried: Sequence[float]) -> list[float]:
    """The neighbours of the best rate so far, if nobody has tried them yet."""
    best = tried.index(min(losses, key=losses.__getitem__))
    return [rate for rate in tried[max(0, best - 1) : best + 2] if rate not in losses]


def run_key(one: Row, seed: int, rate: float) -> str:
    return f"{one.settings} {rate:g} {seed}"


# ---------------------------------------------------------------- what came of it


def table(
    rows: Sequence[Row], results: Results, seeds: range, rates: Rates
) -> tuple[list[dict[str, Any]], list[Claim]]:
    runs = {one.key: _by_seed(one, results, seeds, rates) for one in rows}
    entries: list[dict[str, Any]] = []
    for one in rows:
        found = list(runs[one.key].values())
        if not found:
            continue
        base = runs.get(f"{one.group} allreduce", {})
        entry: dict[str, Any] = {"group": one.group, "row": one.name, "seeds": len(found), "steps": one.steps}
        entry["lr"] = rates[one.rate_of]
        entry["loss"] = f"{statistics.fmean(r['loss'] for r in found):.4f}"
        entry["gap, %"] = _gap_text(runs[one.key], base) if not one.synchronous else ""
        entry["of one"] = (
            "" if one.synchronous else f"{statistics.fmean(r['loss_of_one'] for r in found):.4f}"
        )
        entry["MB/worker"] = statistics.fmean(r["bytes_per_worker"] for r in found) / 1e6
        entry["fewer bytes"] = _fewer(runs[one.key], base) if base and not one.synchronous else ""
        entry["rounds"], entry["refused"] = found[0]["rounds"], sum(r["refused"] for r in found)
        entry["losses"] = {seed: r["losses"] for seed, r in runs[one.key].items()}
        entry["gaps"] = _gaps(runs[one.key], base)
        entry["cpu_s"] = statistics.fmean(r["cpu_s"] for r in found)
        entries.append(entry)
    return entries, _claims(runs)


def _by_seed(one: Row, results: Results, seeds: range, rates: Rates) -> dict[int, dict[str, Any]]:
    rate = rates.get(one.rate_of, math.nan)
    return {seed: found for seed in seeds if (found := results.get(run_key(one, seed, rate))) is not None}


def _gaps(runs: dict[int, dict[str, Any]], base: dict[int, dict[str, Any]]) -> list[float]:
    return [found["loss"] / base[seed]["loss"] - 1.0 for seed, found in runs.items() if seed in base]


def _gap_text(runs: dict[int, dict[str, Any]], base: dict[int, dict[str, Any]]) -> str:
    gaps = _gaps(runs, base)
    if not gaps:
        return ""
    found = interval(gaps)
    if found.count < 2:
        return f"{found.mean:+.2%}"
    return f"{found.mean:+.2%} [{found.low:+.2%}, {found.high:+.2%}]"


def _fewer(runs: dict[int, dict[str, Any]], base: dict[int, dict[str, Any]]) -> float:
    mean = [statistics.fmean(r["bytes_per_worker"] for r in part.values()) for part in (base, runs)]
    return mean[0] / mean[1] if mean[1] else math.inf


def _claims(runs: dict[str, dict[int, dict[str, Any]]]) -> list[Claim]:
    claims = []
    for (one, other), (bound, name) in GAPS.items():
        gaps = _gaps(runs.get(one, {}), runs.get(other, {}))
        if gaps:
            mean = statistics.fmean(gaps)
            claims.append(Claim(f"{name}: mean gap, % of the loss", 100 * mean, 100 * bound, mean <= bound))
    pairs, base = runs.get("long pairs", {}), runs.get("long allreduce", {})
    if pairs and base:
        fewer = _fewer(pairs, base)
        claims.append(
            Claim("pairs: times fewer bytes than fp32 sync", fewer, FEWER_BYTES, fewer >= FEWER_BYTES)
        )
    return claims


def draw(rows: Sequence[Row], results: Results, seeds: range, rates: Rates, folder: Path) -> list[Path]:
    """Per group: the gap of the training loss over the tokens, and the training loss over the bytes sent per worker."""
    files = []
    for group in dict.fromkeys(one.group for one in rows):
        gaps, by_bytes = [], []
        members = [one for one in rows if one.group == group]
        base = next((_by_seed(one, results, seeds, rates) for one in members if one.synchronous), {})
        for one in members:
            runs = _by_seed(one, results, seeds, rates)
            if not runs:
                continue
            tokens = SMOOTHED_STEPS * MICROBATCH * one.replicas * SEQUENCE_TOKENS
            mean = [
                statistics.fmean(points) for points in zip(*(r["losses"] for r in runs.values()), strict=True)
            ]
            total = statistics.fmean(r["bytes_per_worker"] for r in runs.values())
            steps = len(mean)
            by_bytes.append(
                Curve(
                    one.name,
                    [(math.log10(max(1.0, total * (k + 1) / steps)), loss) for k, loss in enumerate(mean)],
                )
            )
            common = [seed for seed in runs if seed in base]
            if common and not one.synchronous:
                gaps.append(
                    Curve(
                        one.name,
                        [
                            (
                                (k + 0.5) * tokens,
                                100
                                * statistics.fmean(
                                    runs[s]["losses"][k] / base[s]["losses"][k] - 1 for s in common
                                ),
                            )
                            for k in range(min(steps, *(len(base[s]["losses"]) for s in common)))
                        ],
                    )
                )
        for curves, what, x_name, y_name in (
            (gaps, "gap", "tokens", "training loss above allreduce, %"),
            (by_bytes, "bytes", "bytes sent per worker, log10", "training loss"),
        ):
            if curves:
                files.append(folder / f"convergence_{group}_{what}.svg")
                draw_curves(files[-1], f"{group}: {y_name}", x_name, y_name, curves)
    return files


def rates_given(text: str) -> dict[str, float]:
    """Of `preset=rate,preset=rate`."""
    found = {}
    for part in text.split(","):
        preset, _, rate = part.partition("=")
        if preset not in PRESETS:
            raise argparse.ArgumentTypeError(f"{preset!r} is no preset; write one of {', '.join(PRESETS)}")
        found[preset] = float(rate)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a seed of a few steps; its claims mean nothing")
    parser.add_argument("--json", type=Path, help="write rows, curves and claims there")
    parser.add_argument("--dir", type=Path, help="where text, finished runs and pictures are kept")
    parser.add_argument("--seeds", type=int, help=f"runs of each row (default {SEEDS})")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="trainings at a time (default: one per core)"
    )
    parser.add_argument("--only", default="", help="only rows with this in group or name, such as 'long'")
    parser.add_argument(
        "--rates",
        type=rates_given,
        default={},
        help="known best rates, not looked for again: pairs=0.002,...",
    )
    parser.add_argument("--report", action="store_true", help="show what is kept so far, and train nothing")
    arguments = parser.parse_args()
    known = dict.fromkeys(PRESETS, RATES[1]) if arguments.quick else arguments.rates
    folder = arguments.dir or Path(tempfile.gettempdir()) / "starlings-convergence"
    jobs = 0 if arguments.report else arguments.jobs
    seeds = range(arguments.seeds or (1 if arguments.quick else SEEDS))
    held_out = 32 if arguments.quick else HELD_OUT
    environ = environment()
    text = Text(folder / "text", held_out=HELD_OUT)
    settings = {"held_out": held_out, "text": text.meta.source_sha256, "torch": torch.__version__}
    text.close()
    rows = [one for one in all_rows() if arguments.only in one.key]
    if arguments.quick:
        rows = [one.quick for one in rows if not one.warm and one.group in ("presets", "large")]
    desk = Desk(folder, text.prepared, Results(folder / "runs.jsonl", settings), jobs, held_out)
    print(f"{len(rows)} rows, {len(seeds)} seeds; kept in {folder}", file=sys.stderr)
    rates: Rates = {}
    for group in dict.fromkeys(one.group for one in rows):
        members = [one for one in rows if one.group == group]
        needed = [one for one in dict.fromkeys(one.rate_of for one in members) if one not in rates]
        rates |= {one: known[one.rules.preset] for one in needed if one.rules.preset in known}
        rates |= desk.find_rates([one for one in needed if one not in rates], RATES)
        if any(one.warm for one in members):
            for rate in {rates[one.rate_of] for one in members if one.synchronous and one.rate_of in rates}:
                desk.warm_starts(seeds, rate)
        desk.runs(members, seeds, rates)
    entries, claims = table(rows, desk.results, seeds, rates)
    if arguments.quick:
        claims = []
    show("convergence", entries, claims, hidden={"losses", "gaps", "cpu_s"})
    for file in draw(rows, desk.results, seeds, rates, folder):
        print(f"drawn: {file}")
    write_json(arguments.json, "convergence", environ, entries, claims)
    return 0 if all(claim.holds for claim in claims) else 1


if __name__ == "__main__":
    raise SystemExit(main())
