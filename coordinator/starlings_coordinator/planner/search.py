"""Spans for a given cut: greedy covering, the fastest worker first, then moves that the prices of the LP point to."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from starlings_coordinator.planner.fleet import Option
from starlings_coordinator.planner.throughput import Choice, Flow, pour, solve_flow
from starlings_protos.messages import WorkerId

Options = Mapping[WorkerId, Sequence[Option]]

# A boundary that a microbatch passes costs this part of the throughput in the comparison, so that of equally fast plans
# the one with long spans wins; a replica costs this part for its exchange.
HOP_COST = 0.002
REPLICA_COST = 0.0002
# Orders of covering drawn by seed when the obvious ones leave a stage bare.
RANDOM_ORDERS = 64
# A cut with so few choices is searched completely.
CHOICES_MOST = 81
# ... and where a few newcomers are placed beside holders, so many: moving one of them at a time can end several percent
# below the best. Of bigger programmes fewer.
CHOICES_BESIDE_MOST = 512
# What newcomers may cost in throughput if a stage gets a second holder by it.
SECURITY_COST = 0.05
# Up to so many workers, every set of them is looked at before a cut is called impossible.
EXACT_WORKERS_MOST = 12


@dataclass(frozen=True, slots=True)
class Found:
    choice: Choice
    flow: Flow
    stage_count: int

    @property
    def score(self) -> float:
        """Microbatches per second, less the small prices of boundaries and replicas."""
        replicas = sum(len(option.span.stages) for option in self.choice.values()) - self.stage_count
        cost = HOP_COST * max(0.0, self.flow.hops - 1) + REPLICA_COST * replicas / self.stage_count
        return self.flow.microbatches_per_s * max(0.5, 1 - cost)


def seed_choices(options: Options, stage_count: int, seed: int, held: Choice) -> list[Choice]:
    """First choices for every worker that has an option, by several orders of greedy covering around what is held
    already. They cover all stages if a way to do so is found.
    """
    able = [w for w in sorted(options) if options[w] and w not in held]
    fast_first = sorted(able, key=lambda w: (min(min(o.seconds) for o in options[w]), w))
    few_first = sorted(able, key=lambda w: (len(options[w]), w))
    roomy_first = sorted(able, key=lambda w: (-max(len(o.span.stages) for o in options[w]), w))
    choices: list[Choice] = []
    for order in (fast_first, few_first, roomy_first):
        choice = _spread(order, options, held, stage_count)
        if choice not in choices and not _bare(choice, stage_count):
            choices.append(choice)
    if not choices:
        cover = find_cover(options, stage_count, seed)
        rest = [w for w in fast_first if cover is None or w not in cover]
        choices.append(_spread(rest, options, {**(cover or {}), **held}, stage_count))
    return choices


def _spread(order: Sequence[WorkerId], options: Options, fixed: Choice, stage_count: int) -> Choice:
    """Each worker in turn takes the option that lifts the lowest stages most; the longest of equals."""
    levels = [0.0] * stage_count
    choice = dict(fixed)
    for worker_id in sorted(fixed):
        levels = pour(levels, fixed[worker_id])
    for worker_id in order:
        poured = [(pour(levels, option), option) for option in options[worker_id]]
        # The earliest of equals, so that the answer does not depend on the order of a dictionary.
        best = max(poured, key=lambda p: (sorted(p[0]), len(p[1].span.stages), -p[1].span.first_stage))
        levels, choice[worker_id] = best
    return choice


def _bare(choice: Choice, stage_count: int) -> list[int]:
    covered = {s for option in choice.values() for s in option.span.stages}
    return [s for s in range(stage_count) if s not in covered]


def find_cover(options: Options, stage_count: int, seed: int) -> Choice | None:
    """Some workers whose spans together hold every stage, or None when no way was found.

    Up to EXACT_WORKERS_MOST workers the answer is exact (every set of workers, the furthest stage that it reaches);
    beyond that, workers are laid from the left by several orders, a few of them drawn by `seed`.
    """
    able = [w for w in sorted(options) if options[w]]
    if len(able) <= EXACT_WORKERS_MOST:
        return _exact_cover(able, options, stage_count)
    roomy = sorted(able, key=lambda w: (-max(len(o.span.stages) for o in options[w]), w))
    rng = random.Random(seed)
    orders = [roomy[::-1], roomy]
    for _ in range(RANDOM_ORDERS):
        orders.append(rng.sample(able, len(able)))
    for order in orders:
        cover = _lay(order, options, stage_count)
        if cover is not None:
            return cover
    return None


def _furthest(options: Sequence[Option], stage: int) -> Option | None:
    holding = [option for option in options if stage in option.span]
    return max(holding, key=lambda o: (o.span.last_stage, -o.span.first_stage), default=None)


def _lay(order: Sequence[WorkerId], options: Options, stage_count: int) -> Choice | None:
    """From the left: the first worker of `order` that holds the next bare stage takes it, as far as it reaches."""
    cover: dict[WorkerId, Option] = {}
    stage = 0
    left = list(order)
    while stage < stage_count:
        for worker_id in left:
            option = _furthest(options[worker_id], stage)
            if option is not None:
                break
        else:
            return None
        cover[worker_id] = option
        left.remove(worker_id)
        stage = option.span.last_stage + 1
    return cover


def _exact_cover(able: Sequence[WorkerId], options: Options, stage_count: int) -> Choice | None:
    """reach[set] = stages 0..reach-1 that the set of workers can hold; every set extends a smaller one by a worker."""
    reach = [0] * (1 << len(able))
    came: list[tuple[int, Option] | None] = [None] * len(reach)
    goal = None
    for members in range(len(reach)):
        if reach[members] >= stage_count:
            goal = members
            break
        for position, worker_id in enumerate(able):
            if members >> position & 1:
                continue
            option = _furthest(options[worker_id], reach[members])
            grown = members | 1 << position
            if option is not None and option.span.last_stage + 1 > reach[grown]:
                reach[grown], came[grown] = option.span.last_stage + 1, (position, option)
    cover: dict[WorkerId, Option] = {}
    while goal:
        step = came[goal]
        assert step is not None
        position, option = step
        cover[able[position]] = option
        goal ^= 1 << position
    return cover or None


def all_choices(found: Found, options: Options, most: int) -> list[Found] | None:
    """Every choice that covers all stages, where there are few; None where there are more than `most`."""
    able = [w for w in sorted(options) if options[w]]
    if math.prod(len(options[w]) for w in able) > most:
        return None
    every = []
    for chosen in itertools.product(*(options[w] for w in able)):
        choice = dict(zip(able, chosen, strict=True))
        if not _bare(choice, found.stage_count):
            every.append(Found(choice, solve_flow(choice, found.stage_count), found.stage_count))
    return every


def best_of_all(found: Found, options: Options, most: int = CHOICES_MOST) -> Found | None:
    """The best choice there is, where there are few; None where there are more than `most`."""
    every = all_choices(found, options, most)
    if every is None:
        return None
    best = found
    for other in every:
        if other.score > best.score * (1 + 1e-9):
            best = other
    return best


def improve(found: Found, options: Options, solves: int, choices_most: int = CHOICES_MOST) -> Found:
    """Move one worker at a time while that raises the score; at most `solves` linear programmes.

    With the present prices p, a worker on a span is worth max p[s] / seconds[w,s]. By duality a move that does not
    raise its worth cannot raise the throughput, so only the others are tried, the most promising first.
    """
    best = best_of_all(found, options, choices_most)
    if best is not None:
        return best
    while solves > 0:
        for worker_id, option in _promising(found, options):
            if solves <= 0:
                break
            solves -= 1
            choice = {**found.choice, worker_id: option}
            if _bare(choice, found.stage_count):
                continue
            moved = Found(choice, solve_flow(choice, found.stage_count), found.stage_count)
            if moved.score > found.score * (1 + 1e-9):
                found = moved
                break
        else:
            return found
    return found


def _promising(found: Found, options: Options) -> list[tuple[WorkerId, Option]]:
    prices = found.flow.prices

    def worth(option: Option) -> float:
        return max(prices[s] / option.second_of(s) for s in option.span.stages)

    moves = []
    for worker_id, present in found.choice.items():
        now = worth(present)
        for option in options[worker_id]:
            gain = worth(option) - now
            if option.span != present.span and gain > 1e-9 * max(now, 1e-12):
                moves.append((-gain, worker_id, option.span, option))
    moves.sort(key=lambda move: move[:3])
    return [(worker_id, option) for _, worker_id, _, option in moves]


def secure(found: Found, options: Options, held: Choice, solves: int, choices_most: int) -> Found:
    """Newcomers placed so that as few stages as possible have a single holder, for at most SECURITY_COST of what
    `found` reaches; of equals the fastest, then the one whose rarest stages have most replicas.

    A worker that holds a stage alone cannot leave, and its loss costs the steps since the last checkpoint.
    """
    floor = found.flow.microbatches_per_s * (1 - SECURITY_COST)

    def rank(other: Found) -> tuple[int, float, list[int]]:
        counts = _replicas(other.choice, other.stage_count)
        return -counts.count(1), float(f"{other.score:.6g}"), sorted(counts)

    every = all_choices(found, options, choices_most)
    if every is not None:
        good = [other for other in every if other.flow.microbatches_per_s >= floor]
        # `max` keeps the first of equals.
        return max([found, *good], key=rank)
    while solves > 0:
        best = found
        for choice in _safer(found, options, held):
            if solves <= 0:
                break
            solves -= 1
            moved = Found(choice, solve_flow(choice, found.stage_count), found.stage_count)
            if moved.flow.microbatches_per_s >= floor and rank(moved) > rank(best):
                best = moved
        if best is found:
            return found
        found = best
    return found


def _safer(found: Found, options: Options, held: Choice) -> list[Choice]:
    """Choices with one newcomer moved and fewer stages with a single holder, the safest first."""
    alone = _replicas(found.choice, found.stage_count).count(1)
    moves = []
    for worker_id in sorted(found.choice.keys() - held.keys()):
        for option in options[worker_id]:
            choice = {**found.choice, worker_id: option}
            counts = _replicas(choice, found.stage_count)
            if 0 not in counts and counts.count(1) < alone:
                moves.append((counts.count(1), worker_id, option.span, choice))
    moves.sort(key=lambda move: move[:3])
    return [move[3] for move in moves]


def _replicas(choice: Choice, stage_count: int) -> list[int]:
    counts = [0] * stage_count
    for option in choice.values():
        for stage in option.span.stages:
            counts[stage] += 1
    return counts
