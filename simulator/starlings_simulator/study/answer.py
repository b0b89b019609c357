"""What the planner's process is asked by commands, and its answers: JSON-ready in, JSON-ready out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from starlings_coordinator.planner.fleet import Fleet
from starlings_coordinator.planner.linear.planning import LinkPlan
from starlings_job.profile import Profile
from starlings_job.spec import load_job
from starlings_simulator.fleets.file import load_fleet
from starlings_simulator.fleets.swarm import Swarm
from starlings_simulator.study.advice import advise
from starlings_simulator.study.compare import compare
from starlings_simulator.study.islands import islands
from starlings_simulator.study.marginal import marginal
from starlings_simulator.study.planned import describe, find_plan
from starlings_simulator.study.setting import Setting, default_budget

News = Callable[[Mapping[str, Any]], None]


def setting_of(arguments: Mapping[str, Any]) -> Setting:
    """From paths `job_file`, `profile`, `fleet` and numbers `seed`, `budget`, `tokens`, the last three possibly None.

    Raises:
        JobError: a file cannot be used; the text says why.
    """
    job = load_job(arguments["job_file"])
    if arguments["tokens"] is not None:
        job = job.model_copy(update={"job": job.job.model_copy(update={"tokens": arguments["tokens"]})})
    profile = Profile.from_json(Path(arguments["profile"]).read_bytes())
    job.check_cut(profile.block_names)
    swarm = Swarm(load_fleet(arguments["fleet"]))
    seed = job.job.seed if arguments["seed"] is None else int(arguments["seed"])
    return Setting(job, profile, swarm, seed, arguments["budget"] or default_budget(len(swarm.workers)))


def plan_answer(arguments: Mapping[str, Any], news: News) -> dict[str, Any]:
    """The plan as `planned.describe` has it; with `compare` true, the layouts beside it; with `marginal`, what
    one more or one less would do.

    Raises:
        JobError: a file cannot be used, or the model does not fit on the fleet.
    """
    setting = setting_of(arguments)
    fleet, plan = _found(setting, news)
    answer = describe(setting, fleet, plan)
    if arguments.get("compare"):
        answer["layouts"] = compare(setting, plan)
    if arguments.get("islands"):
        news({"phase": "looking for islands"})
        answer["islands"] = islands(setting, plan)
    if arguments.get("marginal"):
        news({"phase": "asking what one more or one less would do"})
        answer["marginal"] = marginal(setting, plan)
    return answer


def advise_answer(arguments: Mapping[str, Any], news: News) -> dict[str, Any]:
    """What `advice.advise` says of the plan that `plan_answer` would find.

    Raises:
        JobError: as `plan_answer`.
    """
    setting = setting_of(arguments)
    return advise(setting, *_found(setting, news))


def _found(setting: Setting, news: News) -> tuple[Fleet, LinkPlan]:
    return find_plan(
        setting,
        lambda better: news(
            {
                "phase": "planning",
                "tokens_per_s": better.found.rate * setting.tokens_per_microbatch,
                "of_bound": better.part_of_bound,
            }
        ),
    )
