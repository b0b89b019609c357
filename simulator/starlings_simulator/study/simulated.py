"""Hours of a job on a fleet, in virtual time: JSON-ready in, JSON-ready out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlings_job.errors import JobError
from starlings_job.exchange_settings import GROUPS
from starlings_protos.messages import WorkerId
from starlings_simulator.flow.run import FlowSimulation
from starlings_simulator.study.answer import News, setting_of
from starlings_simulator.study.setting import Setting
from starlings_simulator.timed.churn import by_lifetimes, by_trace, load_trace
from starlings_simulator.timed.machines import Stay
from starlings_simulator.timed.of_fleet import swarm_of
from starlings_simulator.timed.report import Report
from starlings_simulator.timed.run import TimedSimulation

# Up to so many workers every microbatch is played.
EXACT_MOST = 256
# Points of the answer's timeline.
_POINTS_MOST = 480
_EVENTS_MOST = 400


def simulate_answer(arguments: Mapping[str, Any], news: News) -> dict[str, Any]:
    """As `setting_of`, and `hours`; `churn`: a trace file, "lifetimes" of the fleet file, or "none"; `notice_s`.

    `mode`: "exact", "flow", or "" for the one that suits the number of workers.

    Raises:
        JobError: a file cannot be used.
    """
    setting = setting_of(arguments)
    preset = setting.job.exchange.preset
    if preset in GROUPS:
        raise JobError(
            f'[exchange] preset = "{preset}" is not simulated yet: rounds of groups are not modelled; write "pairs" '
            "to see what the same fleet does with exchanges in pairs"
        )
    seconds = 3600.0 * float(arguments["hours"])
    stays = _stays(setting, str(arguments["churn"]), seconds, float(arguments["notice_s"]))
    swarm = swarm_of(setting.swarm, setting.profile, setting.job.train.microbatch, stays=stays)
    exact = arguments["mode"] == "exact" or (not arguments["mode"] and len(swarm.machines) <= EXACT_MOST)

    def progress(now_s: float) -> None:
        news({"phase": "simulating", "fraction": min(1.0, now_s / seconds)})

    if not exact:
        report = FlowSimulation(setting.job, setting.profile, swarm, setting.seed).run(seconds, progress)
        return describe(setting, report, mode="flow")
    simulation = TimedSimulation(setting.job, setting.profile, swarm, setting.seed)
    report = simulation.run(seconds, progress)
    return describe(setting, report, mode="exact", waiting_for=simulation.owner.core.waiting_words())


def _stays(setting: Setting, churn: str, seconds: float, notice_s: float) -> tuple[Stay, ...]:
    workers = setting.swarm.workers
    if churn == "none":
        return tuple(Stay(worker.worker_id) for worker in workers)
    if churn == "lifetimes":
        return by_lifetimes({w.worker_id: w.lifetime_s for w in workers}, seconds, setting.seed)
    ids: list[WorkerId] = [worker.worker_id for worker in workers]
    return by_trace(load_trace(churn), ids, seconds, notice_s=notice_s)


def describe(setting: Setting, report: Report, *, mode: str, waiting_for: str = "") -> dict[str, Any]:
    """`seconds` and `sent_bytes` are over all workers; of `timeline` and `events` at most a few hundred are left."""
    present_s = sum(report.seconds.values())
    every = max(1, -(-len(report.points) // _POINTS_MOST))
    return {
        "job": setting.job.job.name,
        "fleet": setting.swarm.spec.fleet.name,
        "mode": mode,
        "phase": report.phase,
        "waiting_for": waiting_for,
        "virtual_s": report.virtual_s,
        "tokens": report.tokens,
        "tokens_per_s": report.tokens_per_s,
        "tokens_per_s_training": report.tokens_per_s_training,
        "utilisation": report.utilisation,
        "workers_on_average": present_s / report.virtual_s if report.virtual_s > 0 else 0.0,
        "seconds": dict(report.seconds),
        "sent_bytes": dict(report.sent_bytes),
        "samples_repeated": report.samples_repeated,
        "samples_unmerged": report.samples_unmerged,
        "plans": report.plans,
        "timeline": [
            {"at_s": p.at_s, "tokens": p.tokens, "workers": p.workers, "holders": p.holders}
            for p in report.points[::every]
        ],
        "events": [
            {"at_s": at_s, "kind": kind, "text": text} for at_s, kind, text in report.events[-_EVENTS_MOST:]
        ],
        "workers": [
            {
                "worker": worker.worker_id,
                "stages": worker.stages,
                "present_s": worker.present_s,
                "tokens": worker.tokens,
                "seconds": dict(worker.seconds),
            }
            for worker in report.workers
        ],
    }
