"""A late joiner while it catches up: committed steps wait in a queue and are replayed one after the other.

An observer has loaded some committed version from donors. From its assignment on it hears of every commit; what was
exchanged in that step is fetched from a donor and applied with the commit's own numbers. So its weights pass through
the same versions as everybody's, and the queue is empty when it has caught up. Only the commits' numbers are kept
here: the updates stay with the donors until they are wanted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

from starlings_protos.messages import Assignment, CatchUpFailed, Ready, StepCommitted, ToCoordinator
from starlings_worker.core.device import DeviceQueue
from starlings_worker.core.effects import ReplayStep

# Donors keep the updates of at most so many steps: who is further behind can never catch up from there.
STEPS_BEHIND_AT_MOST = 64


class Observing:
    """`version` is that of the weights on the device once the base is loaded."""

    def __init__(self, device: DeviceQueue, say: Callable[[ToCoordinator], None]) -> None:
        self._device = device
        self._say = say
        self._assignment: Assignment | None = None
        self.base_loaded = False
        self.version = 0
        # Commits that were not replayed yet, without a gap; the first may be on the device now.
        self.queue: deque[StepCommitted] = deque()
        self._replaying = False
        # A base version that could not be caught up from: it is not tried again.
        self._failed_version = -1

    @property
    def active(self) -> bool:
        """From the assignment until the worker is a holder that has replayed everything, or has given up."""
        return self._assignment is not None

    @property
    def version_ahead(self) -> int:
        """The version that this worker will have when everything that it heard of is replayed."""
        return self.version + len(self.queue)

    def begin(self, assignment: Assignment) -> None:
        """The span is going to be loaded at the assignment's version."""
        self.end()
        self._assignment = assignment
        self.version = assignment.version

    def end(self) -> None:
        self._assignment = None
        self.base_loaded = False
        self._replaying = False
        self.queue.clear()

    def same_base(self, new: Assignment) -> bool:
        """Whether `new` only names other donors, or another plan, for what is under way."""
        old = self._assignment
        return old is not None and (new.stages, new.span, new.version) == (old.stages, old.span, old.version)

    def same_place(self, new: Assignment, *, any_version: bool = False) -> bool:
        """Whether `new` makes this observer a holder of what it has: nothing needs to be loaded. `any_version`: weights
        have none that could be compared.
        """
        old = self._assignment
        return (
            old is not None
            and self.base_loaded
            and (new.stages, new.span) == (old.stages, old.span)
            and (any_version or new.version == self.version_ahead)
        )

    def hopeless(self, new: Assignment) -> bool:
        """Whether this was tried, and failed, already: the coordinator had not heard of it."""
        return new.version == self._failed_version

    def forget_failure(self) -> None:
        self._failed_version = -1

    # ------------------------------------------------------------------ what happens

    def committed(self, message: StepCommitted) -> str:
        """Queues a commit. Returns why this worker cannot catch up any more, or ""."""
        if message.step < self.version_ahead:
            return ""
        if message.step > self.version_ahead:
            return f"steps {self.version_ahead} to {message.step - 1} were committed unheard"
        self.queue.append(message)
        if len(self.queue) > STEPS_BEHIND_AT_MOST:
            return f"{len(self.queue)} steps behind; donors keep {STEPS_BEHIND_AT_MOST}"
        return ""

    def loaded(self, plan_version: int) -> None:
        """The base is on the device."""
        self.base_loaded = True
        self.report({}, plan_version)

    def replays(self, step: int) -> bool:
        """Whether that step's replay runs; one of an earlier life does not count."""
        return self._replaying and bool(self.queue) and self.queue[0].step == step

    def replayed(self, step: int) -> bool:
        """The device has replayed `step`. False when that was for an earlier life."""
        if not self.replays(step):
            return False
        self._replaying = False
        self.queue.popleft()
        self.version = step + 1
        return True

    def report(self, digests: Mapping[str, int], plan_version: int) -> None:
        """Says so when everything that was committed is here. `digests`: of the last replay's aggregates."""
        if not self.queue:
            self._say(Ready(plan_version, self.version, {}, dict(digests)))

    def go_on(self) -> None:
        """Starts the replay of the oldest commit, if there is one and none runs."""
        if not self.base_loaded or self._replaying or not self.queue:
            return
        commit = self.queue[0]
        self._replaying = True
        self._device.push(ReplayStep(commit.step, commit.learning_rate, commit.clip_factor))

    def give_up(self, reason: str) -> CatchUpFailed:
        """What to say; the caller leaves the place. The coordinator gives a newer version, or lets this worker wait."""
        if self._assignment is not None:
            self._failed_version = self._assignment.version
        return CatchUpFailed(self.version, reason)
