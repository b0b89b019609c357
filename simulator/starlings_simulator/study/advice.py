"""`starlings advise`: which way to exchange fits a plan's uplinks, round trips and model.

Each preset's bytes per slot (`exchange_traffic`) go over the site's uplink, which its workers share, and over the
downlink of as many partners; a slot comes every H inner steps of the replica. Presets with a barrier wait for the
slowest member, so what they exchange is time lost; the others exchange beside training, and what counts is what part of
the link they take from activations and gradients.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from starlings_coordinator.planner.fleet import Fleet
from starlings_coordinator.planner.linear.planning import LinkPlan
from starlings_job.exchange_rules import PRESETS, SCHEDULE, ExchangeRules, Phase, Preset, rules_for
from starlings_job.exchange_traffic import round_bytes
from starlings_protos.messages import WorkerId
from starlings_simulator.study.setting import Setting

# A barrier that costs no more is worth it: nothing is nearer to training on one machine.
BARRIER_FINE = 0.1
# Exchanges beside training that take more of some uplink are too many.
LINK_FINE = 0.5
# Round trips of an exchange: a swap has its payloads and its agreement, a group its contributions and its aggregates.
TRIPS = 2


@dataclass(frozen=True, eq=False)
class Replica:
    """`elements` of its stage, `members` of the stage's group; `rate` in microbatches/s."""

    worker: int
    stage: int
    elements: int
    members: int
    rate: float
    rtt_s: float


def replicas(setting: Setting, plan: LinkPlan) -> list[Replica]:
    """All holders of stages that somebody else holds too and that do any work."""
    problem, entries = plan.problem, plan.found.flow.entries
    covered = problem.covered(plan.found.choice)
    trained = [
        sum(block.trainable_count for block in setting.profile.blocks[s.first_block : s.last_block + 1])
        for s in plan.stages
    ]
    holders: dict[int, list[int]] = {}
    for worker, stage in zip(entries.worker, entries.stage, strict=True):
        holders.setdefault(int(stage), []).append(int(worker))
    rtts = {stage: _typical_rtt_s(setting, plan, workers) for stage, workers in holders.items()}
    found = []
    for worker, stage, rate in zip(entries.worker, entries.stage, plan.found.flow.share, strict=True):
        if covered[stage] < 2 or rate <= 1e-9 * plan.found.rate:
            continue
        found.append(
            Replica(
                int(worker), int(stage), trained[stage], int(covered[stage]), float(rate), rtts[int(stage)]
            )
        )
    return found


def _typical_rtt_s(setting: Setting, plan: LinkPlan, workers: list[int]) -> float:
    """The median over pairs, of a few where there are many."""
    ids: list[WorkerId] = [plan.problem.worker_ids[w] for w in workers]
    step = max(1, len(ids) // 24)
    few = ids[::step]
    pairs = [setting.swarm.rtt_s(a, b) for n, a in enumerate(few) for b in few[n + 1 :]]
    return statistics.median(pairs) if pairs else 0.0


def step_s(setting: Setting, plan: LinkPlan, replica: Replica, schedule: str) -> float:
    """Seconds of an inner step: of all together in `sync`, else of the replica's own microbatches."""
    if schedule == "sync":
        return setting.job.microbatches_per_step / plan.found.rate
    return setting.job.train.microbatches_per_inner_step / replica.rate


def rules_of(setting: Setting, preset: Preset) -> ExchangeRules:
    """The job's own numbers for its own preset, else the preset's defaults."""
    job = setting.job
    if job.exchange.preset == preset and job.pair_rules is not None:
        return job.pair_rules
    if job.exchange.preset == preset == "allreduce":
        return rules_for(preset, codec=job.exchange.codec)
    return rules_for(preset)


def _phases(rules: ExchangeRules) -> list[tuple[str, Phase]]:
    return [*([("warm-up", rules.warmup)] if rules.warmup is not None else []), ("main", rules.main)]


def preset_row(
    setting: Setting, plan: LinkPlan, there: list[Replica], rules: ExchangeRules
) -> dict[str, Any]:
    """What that preset costs on this plan, for its main phase; the warm-up's share beside it."""
    shares = {name: _share(setting, plan, there, rules, phase) for name, phase in _phases(rules)}
    main = shares["main"]
    barrier = SCHEDULE[rules.preset] != "async"
    row: dict[str, Any] = {
        "preset": rules.preset,
        "schedule": "sync" if SCHEDULE[rules.preset] == "sync" else "async",
        "every": rules.main.inner_steps,
        "codec": rules.codec,
        "barrier": barrier,
        **main,
        "warmup_share": shares["warm-up"]["share"] if "warm-up" in shares else None,
        "fits": main["share"] <= (BARRIER_FINE if barrier else LINK_FINE),
    }
    # Bytes per second fall with 1 / H.
    beside = main["share"] / max(1e-12, 1 - main["share"]) if barrier else main["share"]
    wanted = BARRIER_FINE / (1 - BARRIER_FINE) if barrier else LINK_FINE
    if not row["fits"] and math.isfinite(beside) and rules.main.inner_steps > 1:
        row["every_that_fits"] = math.ceil(rules.main.inner_steps * beside / wanted)
    return row


def _share(
    setting: Setting, plan: LinkPlan, there: list[Replica], rules: ExchangeRules, phase: Phase
) -> dict[str, Any]:
    """`share`: of the time, lost at a barrier, or of the fullest uplink, taken beside training."""
    problem = plan.problem
    sent, slot_s = np.zeros(problem.sites), np.full(problem.sites, np.inf)
    payload, per_second = np.zeros(problem.workers), np.zeros(problem.sites)
    lengths: dict[int, list[float]] = {}
    for replica in there:
        length_s = step_s(setting, plan, replica, SCHEDULE[rules.preset])
        lengths.setdefault(replica.stage, []).append(length_s)
    rtt_s = 0.0
    for replica in there:
        size = round_bytes(rules, phase, replica.elements, replica.members)
        # A stage's slots last H times the median step of its replicas.
        length_s = phase.inner_steps * statistics.median(lengths[replica.stage])
        site = int(problem.site[replica.worker])
        sent[site] += size
        per_second[site] += size / length_s
        payload[replica.worker] += size
        slot_s[site] = min(slot_s[site], length_s)
        rtt_s = max(rtt_s, replica.rtt_s)
    # As much comes in as goes out.
    rate = np.minimum(problem.up, problem.down)
    takes_s = np.where(np.isfinite(rate), sent / np.where(np.isfinite(rate), rate, 1.0), 0.0)
    takes_s = np.where(sent > 0, takes_s + TRIPS * rtt_s * rules.swaps_in(phase), 0.0)
    active = sent > 0
    if not active.any():
        return {"share": 0.0, "typical_share": 0.0, "seconds": 0.0, "bytes": 0, "binding_site": None}
    if SCHEDULE[rules.preset] != "async":
        longest = float(takes_s.max())
        shares = takes_s[active] / (takes_s[active] + slot_s[active])
        share = longest / (longest + float(slot_s[active].min()))
    else:
        shares = np.where(np.isfinite(rate), per_second / np.where(np.isfinite(rate), rate, 1.0), 0.0)[active]
        share = float(shares.max())
    worst = int(np.argmax(np.where(active, takes_s / slot_s, -1.0)))
    return {
        "share": share,
        "typical_share": float(np.median(shares)),
        "seconds": float(takes_s[worst]),
        "bytes": int(payload.max()),
        "binding_site": problem.site_names[worst],
    }


def advise(setting: Setting, fleet: Fleet, plan: LinkPlan) -> dict[str, Any]:
    """A row per preset, and the one to write with the reason in words."""
    there = replicas(setting, plan)
    rows = [preset_row(setting, plan, there, rules_of(setting, preset)) for preset in PRESETS]
    by_name = {row["preset"]: row for row in rows}
    preset, reason = _recommended(there, by_name)
    return {
        "job": setting.job.job.name,
        "fleet": setting.swarm.spec.fleet.name,
        "workers": len(fleet.workers),
        "stages": len(plan.stages),
        "tokens_per_s": plan.found.rate * setting.tokens_per_microbatch,
        "replicas": len(there),
        "recommended": preset,
        "reason": reason,
        "presets": rows,
    }


def _recommended(there: list[Replica], rows: Mapping[str, dict[str, Any]]) -> tuple[str, str]:
    if not there:
        return "allreduce", "no stage has two holders, so nothing is exchanged, whatever is written"
    exact = rows["allreduce"]
    if exact["fits"]:
        return (
            "allreduce",
            f"an exchange every step costs {exact['share']:.1%} of the time, and is what one machine would compute: "
            'write schedule = "sync"',
        )
    pairs = rows["pairs"]
    why = f"allreduce would lose {exact['share']:.0%} of the time at its barrier (link of {exact['binding_site']})"
    if pairs["fits"]:
        return (
            pairs["preset"],
            f"{why}; {pairs['preset']} every {pairs['every']} steps takes {pairs['share']:.1%} of the fullest uplink, "
            'beside training: write schedule = "async"',
        )
    every = pairs.get("every_that_fits", pairs["every"])
    return (
        pairs["preset"],
        f"{why}; {pairs['preset']} every {pairs['every']} steps would take {pairs['share']:.0%} of the uplink of "
        f'{pairs["binding_site"]}: write schedule = "async" and every = {every}',
    )
