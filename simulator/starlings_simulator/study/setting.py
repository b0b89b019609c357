"""A job on a fleet, as the planner is asked about it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from starlings_coordinator.planner.fleet import Fleet
from starlings_coordinator.planner.linear.planning import LinkPlan, plan_with_links
from starlings_job.cut import fixed_cut, stage_count
from starlings_job.errors import JobError
from starlings_job.profile import Profile
from starlings_job.spec import JobSpec
from starlings_protos.messages import PlanRequest, PlanWorker, Stage
from starlings_simulator.fleets.swarm import Swarm

# Linear programmes for a search by the number of workers: what a second or a few allow (benchmarks/planner_swarm.py).
_BUDGETS = ((16, 40), (64, 12), (256, 8))
_BUDGET_OF_MANY = 4


class CannotPlan(JobError):
    """No way was found to hold the model on that fleet; the text says what is missing."""

    exit_code = 13


def default_budget(workers: int) -> int:
    """Linear programmes for one plan."""
    return next((budget for most, budget in _BUDGETS if workers <= most), _BUDGET_OF_MANY)


@dataclass(frozen=True, eq=False)
class Setting:
    """Equal settings give equal answers. `budget`: linear programmes for each plan."""

    job: JobSpec
    profile: Profile
    swarm: Swarm
    seed: int
    budget: int

    @property
    def tokens_per_microbatch(self) -> int:
        return self.job.train.microbatch * self.job.tokens_per_sample

    def workers(self) -> tuple[PlanWorker, ...]:
        return self.swarm.plan_workers(self.profile, self.job.train.microbatch)

    def fleet(self, workers: Sequence[PlanWorker], stages: tuple[Stage, ...] = ()) -> Fleet:
        """Those workers, as the planner sees them.

        Args:
            stages: a cut that stays; the job's own, or the planner's choice, when left out.
        """
        job = self.job
        cut = job.pipeline.stages
        request = PlanRequest(
            1,
            tuple(workers),
            self.seed,
            job.train.microbatch,
            job.microbatches_per_step,
            job.bytes_per_parameter,
            stages or fixed_cut(cut),
            stages_most=job.stages_most,
            stages_wanted=stage_count(cut),
        )
        return Fleet(request, self.profile)

    def plans(self, fleet: Fleet, budget: int | None = None) -> Iterator[LinkPlan]:
        """Better and better ones."""
        yield from plan_with_links(
            fleet, codec=self.job.pipeline.codec, seed=self.seed, programmes=budget or self.budget
        )

    def best(self, fleet: Fleet, budget: int | None = None) -> LinkPlan | None:
        """The last of `plans`."""
        found = None
        for plan in self.plans(fleet, budget):
            found = plan
        return found
