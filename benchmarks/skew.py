"""What quasi-global momentum brings to gossip when data are unequal (`[data] skew`).

Sixteen replicas in one process: the worker's own gossip (one peer after every step, int8) and optimizers, and each
replica with samples of a shard of its own, as `[data] skew` deals them out; `equal`: everybody draws from everything.
With local momentum a replica remembers its own gradients; quasi-global momentum remembers where gossip took the weights
(Lin et al. 2021). `shapes`: the classifier of images, with shards of the eight classes, as there; most replicas see one
or two of them. `micro`: the standard library's sources, whose folders are much less unlike, since all are Python. Each
way has its own best rate, found by runs of another seed. `loss` is of the replicas' average on held-out samples of all
sources, `of one` the mean of the replicas' own; `gain`: against local momentum, paired by seed, with its 95 % interval
(Student's t).

    python benchmarks/skew.py [--quick] [--json FILE] [--dir DIR] [--jobs N]
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
sys.path.insert(0, str(Path(__file__).parent))

import torch
from inprocess.local import Deal, train_locally
from inprocess.rounds import Course, GossipRounds
from inprocess.swarm import Setup, Swarm, Worker
from inprocess.text import Text
from paired import Results, interval
from report import Claim, environment, show, write_json

from starlings_job.exchange_rules import rules_for
from starlings_job.model import initial_state
from starlings_job.sections import TrainSection
from starlings_job.skew import SkewedOrder
from starlings_job.source_ranges import SourceRange, read_sources
from starlings_worker.optimizers.sgd import Sgd

# Of four the exponential graph has the exact mean every second step, and local momentum does no harm.
REPLICAS, STEPS, SEEDS = 16, 250, 3
# By model.
MICROBATCH = {"shapes": 16, "micro": 1}
# alpha; None: equal data.
ALPHAS = (0.1, None)
RATES = (0.1, 0.2, 0.4, 0.8, 1.6)
RATE_SEED = 1000
MOMENTUM = 0.9
HELD_OUT, EVALUATE_TOGETHER = 128, 32


class LocalMomentum(GossipRounds):
    """Gossip whose inner steps are the worker's optimizer, with the memory of its own gradients."""

    @torch.no_grad()
    def inner_step(self, worker: Worker, step: int, learning_rate: float, clip_factor: float) -> None:
        worker.held.apply_step(step, learning_rate, clip_factor)


@dataclass(frozen=True, slots=True)
class Way:
    model: str
    quasi_global: bool
    alpha: float | None

    @property
    def name(self) -> str:
        return f"{'quasi-global' if self.quasi_global else 'local'} momentum"

    @property
    def data(self) -> str:
        return "equal" if self.alpha is None else f"skew {self.alpha:g}"

    def key(self, seed: int, rate: float) -> str:
        return f"{self.model} {self.name} {self.data} {seed} {rate:g}"


WAYS = tuple(
    Way(model, quasi_global, alpha)
    for model in MICROBATCH
    for alpha in ALPHAS
    for quasi_global in (False, True)
)


def open_data(model: str, folder: Path, limit: str, held_out: int) -> Text:
    source = "shapes" if model == "shapes" else "stdlib"
    return Text(folder, preset=model, limit=limit, held_out=held_out, source=source)


def run(way: Way, prepared: Path, seed: int, rate: float, steps: int, held_out: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    text = Text.opened(prepared)
    setup = Setup(Sgd(momentum=0.0 if way.quasi_global else MOMENTUM), replicas=REPLICAS)
    swarm = Swarm(text.description, dict(initial_state(text.description, seed)), setup)
    rules = rules_for("gossip", quasi_global="sgd", quasi_global_mu=MOMENTUM, quasi_global_beta=MOMENTUM)
    kind = GossipRounds if way.quasi_global else LocalMomentum
    rounds = kind(swarm, rules, Course(steps, seed))
    microbatch = MICROBATCH[way.model]
    train = TrainSection(batch=microbatch * REPLICAS, microbatch=microbatch, lr=rate)
    deal = None if way.alpha is None else _deal(text, way, seed)
    losses = train_locally(swarm, text, train, rounds, seed=seed, steps=steps, deal=deal)
    batches = text.held_out(held_out, EVALUATE_TOGETHER)
    alone = [swarm.evaluate(replica, batches, through_codec=False) for replica in range(REPLICAS)]
    rounds.finish()
    loss = swarm.evaluate(0, batches, through_codec=False)
    text.close()
    return {"loss": loss, "alone": statistics.fmean(alone), "trained": losses[-1], "refused": rounds.refused}


def _deal(text: Text, way: Way, seed: int) -> Deal:
    """As the coordinator deals: the r-th worker goes through the r-th shard, then through it again in another order."""
    assert way.alpha is not None
    samples, sources = _by_source(text, way.model)
    order = SkewedOrder(sources, way.alpha, REPLICAS, seed)
    microbatch = MICROBATCH[way.model]

    def own(step: int, replica: int) -> tuple[int, ...]:
        first, end = order.bounds(replica)
        found = []
        for number in range(step * microbatch, (step + 1) * microbatch):
            epoch, place = divmod(number, end - first)
            found += order.samples_at(epoch, first + place, first + place + 1)
        return tuple(samples[place] for place in found)

    return own


def _by_source(text: Text, model: str) -> tuple[Sequence[int], Sequence[SourceRange]]:
    """Samples in an order in which each source's follow each other, and which those are: of images, their classes."""
    if model != "shapes":
        return range(text.population), read_sources(text.prepared, text.population)
    labels = text.batch(range(text.population)).targets.tolist()
    samples = sorted(range(text.population), key=labels.__getitem__)
    counts = Counter(labels)
    firsts = itertools.accumulate([0, *(counts[label] for label in sorted(counts))])
    return samples, [
        SourceRange(str(label), first, counts[label])
        for label, first in zip(sorted(counts), firsts, strict=False)
    ]


@dataclass(frozen=True, slots=True)
class Task:
    way: Way
    seed: int
    rate: float

    @property
    def key(self) -> str:
        return self.way.key(self.seed, self.rate)


def wave(
    tasks: list[Task],
    results: Results,
    prepared: Mapping[str, Path],
    jobs: int,
    steps: int,
    held_out: int,
) -> None:
    """Does those that are not kept from before."""
    missing = [task for task in tasks if results.get(task.key) is None]
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("forkserver")) as pool:
        futures = {
            pool.submit(run, task.way, prepared[task.way.model], task.seed, task.rate, steps, held_out): task
            for task in missing
        }
        for future in as_completed(futures):
            found, task = future.result(), futures[future]
            results.add(task.key, found)
            print(f"{task.key}: {found['loss']:.4f}", file=sys.stderr)


def best_rate(way: Way, results: Results, rates: tuple[float, ...]) -> float:
    """Of those that ended with a number."""
    losses = {rate: (results.get(way.key(RATE_SEED, rate)) or {}).get("loss", float("nan")) for rate in rates}
    return min((rate for rate in rates if losses[rate] == losses[rate]), key=losses.__getitem__)


def rows_of(
    results: Results, rates: dict[Way, float], seeds: int
) -> tuple[list[dict[str, Any]], list[Claim]]:
    rows: list[dict[str, Any]] = []
    claims: list[Claim] = []
    for model, alpha in itertools.product(MICROBATCH, ALPHAS):
        local, quasi = Way(model, False, alpha), Way(model, True, alpha)
        found = {
            way: [results.get(way.key(seed, rates[way])) or {} for seed in range(seeds)]
            for way in (local, quasi)
        }
        gains = [a["loss"] - b["loss"] for a, b in zip(found[local], found[quasi], strict=True)]
        gain = interval(gains)
        for way in (local, quasi):
            rows.append(
                {
                    "model": way.model,
                    "data": way.data,
                    "inner steps": way.name,
                    "rate": rates[way],
                    "loss": statistics.fmean(one["loss"] for one in found[way]),
                    "of one": statistics.fmean(one["alone"] for one in found[way]),
                    "gain": gain.mean if way.quasi_global else "",
                    "at least": gain.low if way.quasi_global else "",
                    "seeds": seeds,
                }
            )
        if alpha is not None and model == "shapes" and seeds > 1:
            name = f"{model}, {quasi.data}: nats that quasi-global momentum brings, lower end of the interval"
            claims.append(Claim(name, gain.low, 0.0, gain.low > 0))
    return rows, claims


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few steps of each way; says little")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write rows and claims there")
    parser.add_argument("--dir", type=Path, metavar="DIR", help="keeps finished runs, to go on later")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at a time")
    options = parser.parse_args()
    environ = environment()
    steps, seeds, rates = (4, 1, RATES[1:2]) if options.quick else (STEPS, SEEDS, RATES)
    held_out, limit = (8, "200K") if options.quick else (HELD_OUT, "8M")
    with tempfile.TemporaryDirectory(prefix="starlings-skew-") as scratch:
        folder = options.dir or Path(scratch)
        prepared = {}
        for model in MICROBATCH:
            text = open_data(model, folder, limit, held_out)
            prepared[model] = text.prepared
            text.close()
        settings = {"steps": steps, "replicas": REPLICAS, "microbatch": MICROBATCH, "limit": limit}
        results = Results(folder / "runs.jsonl", settings)
        wave(
            [Task(way, RATE_SEED, rate) for way in WAYS for rate in rates],
            results,
            prepared,
            options.jobs,
            steps,
            held_out,
        )
        chosen = {way: best_rate(way, results, rates) for way in WAYS}
        tasks = [Task(way, seed, chosen[way]) for way in WAYS for seed in range(seeds)]
        wave(tasks, results, prepared, options.jobs, steps, held_out)
        rows, claims = rows_of(results, chosen, seeds)
    show("Gossip with unequal data", rows, claims)
    write_json(options.json, "skew", environ, rows, claims)
    return 0 if all(claim.holds for claim in claims) else 1


if __name__ == "__main__":
    raise SystemExit(main())
