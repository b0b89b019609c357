"""`make_plan(request, profile) -> PlanReply`: cut, spans, slots, and the reason when there is no plan. Pure, by seed.

Memory is a hard limit; throughput is the node form of the linear programme of the design's section 5 (links are not
priced yet). Of cuts that are nearly as fast, the one with fewest stages wins: every boundary costs transfers.
Workers that hold a span of the given cut already keep it; the others are placed around them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from starlings_coordinator.planner.cuts import candidate_cuts
from starlings_coordinator.planner.fleet import Fleet
from starlings_coordinator.planner.search import (
    CHOICES_BESIDE_MOST,
    CHOICES_MOST,
    Found,
    Options,
    improve,
    secure,
    seed_choices,
)
from starlings_coordinator.planner.throughput import Choice, solve_flow
from starlings_coordinator.planner.words import binding_words, idle_words, shortage_words
from starlings_job.profile import Profile
from starlings_protos.messages import PlannedWorker, PlanReply, PlanRequest, PlanWorker, Stage

# A further stage must make the plan this much faster.
GAIN_PER_STAGE = 0.005
# A plan in which every worker that can hold anything holds something is taken when it is this near the fastest.
INCLUSIVE_WITHIN = 0.9
# Cuts whose best choice is improved by local search, and linear programmes for each; fewer for big fleets.
IMPROVED_CUTS = 4
SOLVES = 25
# A choice that reaches this part of the bound is not improved.
NEAR_ENOUGH = 0.995
# Bigger fleets even out what a cut does badly, and their plans take long enough.
THOROUGH_WORKERS_MOST = 100
# Linear programmes get slow beyond this many (worker, stage) pairs: a second each at 20,000.
PAIRS_CHEAP = 1_000


@dataclass(frozen=True, slots=True)
class Candidate:
    stages: tuple[Stage, ...]
    options: Options
    # Spans that stay as they are.
    held: Choice
    found: Found

    @property
    def score(self) -> float:
        return self.found.score * max(0.5, 1 - GAIN_PER_STAGE * (len(self.stages) - 1))

    @property
    def pairs(self) -> int:
        return sum(len(option.span.stages) for option in self.found.choice.values())


def make_plan(request: PlanRequest, profile: Profile) -> PlanReply:
    """The plan for these workers, or a reply whose `impossible` says with figures what is missing.

    Equal arguments give equal plans, in whatever order the workers are listed.
    """
    fleet = Fleet(request, profile)
    for worker in fleet.workers:
        if worker.held is not None and not 0 <= worker.held.first_stage <= worker.held.last_stage < len(
            request.stages
        ):
            return PlanReply(
                request.request_id, impossible=f"{worker.worker_id} holds stages that the given cut has not"
            )
    if not fleet.workers:
        flaws = "; ".join(f"{w}: {flaw}" for w, flaw in sorted(fleet.unmeasured.items()))
        return PlanReply(
            request.request_id, impossible=f"no measured worker is there{': ' * bool(flaws)}{flaws}"
        )
    candidates = _candidates(fleet)
    best = _choose(fleet, candidates)
    if best is None:
        why = shortage_words(fleet, [(c.stages, c.found.choice) for c in candidates])
        if request.stages_most and not request.stages:
            why += f"; [pipeline] codec bears {request.stages_most} stages at most: int8:128 bears any number"
        if request.stages_wanted and request.stages_wanted < len(profile.blocks):
            why += f"; [pipeline] stages fixes {request.stages_wanted}: more of them need less memory each"
        return PlanReply(request.request_id, impossible=why)
    planned = [_planned(fleet, best, worker) for worker in fleet.workers]
    planned += [PlannedWorker(w, reason=flaw) for w, flaw in fleet.unmeasured.items()]
    return PlanReply(
        request.request_id,
        best.stages,
        tuple(sorted(planned, key=lambda p: p.worker_id)),
        best.found.flow.microbatches_per_s,
        fleet.bound,
        binding_words(best.found, fleet.bound),
    )


def _candidates(fleet: Fleet) -> list[Candidate]:
    """One per cut; the most promising improved."""
    request = fleet.request
    cuts = (
        [request.stages]
        if request.stages
        else candidate_cuts(
            fleet.typical_block_seconds(),
            fleet.block_bytes(),
            thorough=len(fleet.workers) <= THOROUGH_WORKERS_MOST,
            wanted=request.stages_wanted,
        )
    )
    if request.stages_most and not request.stages:
        cuts = [cut for cut in cuts if len(cut) <= request.stages_most]
    candidates = []
    for stages in cuts:
        options = {w.worker_id: fleet.options(w, stages) for w in fleet.workers}
        held = {w.worker_id: options[w.worker_id][0] for w in fleet.workers if w.held is not None}
        seeds = [
            Found(choice, solve_flow(choice, len(stages)), len(stages))
            for choice in seed_choices(options, len(stages), request.seed, held)
        ]
        # `max` keeps the first of equals.
        found = max(seeds, key=lambda seed: seed.score)
        candidates.append(Candidate(stages, options, held, found))
    ranked = sorted(
        range(len(candidates)), key=lambda i: (-candidates[i].score, len(candidates[i].stages), i)
    )
    for index in ranked[:IMPROVED_CUTS]:
        candidate = candidates[index]
        flow = candidate.found.flow
        if flow.microbatches_per_s <= 0:
            continue
        solves = max(2, SOLVES * PAIRS_CHEAP // max(PAIRS_CHEAP, candidate.pairs))
        # Few newcomers beside many holders: few choices, each of them a big programme.
        most = CHOICES_BESIDE_MOST * solves // SOLVES if candidate.held else CHOICES_MOST
        if flow.microbatches_per_s < NEAR_ENOUGH * fleet.bound:
            candidate = replace(candidate, found=improve(candidate.found, candidate.options, solves, most))
        if candidate.held:
            candidate = replace(
                candidate, found=secure(candidate.found, candidate.options, candidate.held, solves, most)
            )
        candidates[index] = candidate
    return candidates


def _choose(fleet: Fleet, candidates: list[Candidate]) -> Candidate | None:
    possible = [c for c in candidates if c.found.flow.microbatches_per_s > 0]
    if not possible:
        return None
    # `max` keeps the first of equals: the one with fewest stages.
    best = max(possible, key=lambda c: c.score)
    most = max(len(c.found.choice) for c in possible)
    inclusive = [
        c for c in possible if len(c.found.choice) == most and c.score >= INCLUSIVE_WITHIN * best.score
    ]
    return max(inclusive, key=lambda c: c.score, default=best)


def _planned(fleet: Fleet, plan: Candidate, worker: PlanWorker) -> PlannedWorker:
    option = plan.found.choice.get(worker.worker_id)
    if option is None:
        return PlannedWorker(worker.worker_id, reason=idle_words(fleet, worker, plan.stages))
    holding = option.holding
    return PlannedWorker(
        worker.worker_id, option.span, holding.slots, holding.recompute, holding.memory_bytes
    )
