"""How training goes on, as the rest of the core sees it: one step after the other (stepping.py) or without a barrier
(streaming/). Here is what both have in common.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from starlings_coordinator.core.events import WorkerSaid
from starlings_coordinator.core.members import Member
from starlings_coordinator.core.patience import Patience
from starlings_coordinator.core.phase import Phase
from starlings_coordinator.core.records import StepRetried
from starlings_protos.group_messages import GroupFromMember
from starlings_protos.messages import (
    ExchangeFailed,
    ExchangeGroup,
    ExchangeMember,
    ExchangeOpened,
    ExchangePurpose,
    MicrobatchDone,
    MicrobatchFailed,
    MicrobatchKey,
    PeerUnreachable,
    Prepared,
    StateReport,
    StepRestarted,
    WorkerId,
)
from starlings_protos.pair_messages import RoundOutcome, RoundReady
from starlings_protos.status import StageExchanges
from starlings_protos.stream_messages import LeasesReturned, StageReport

if TYPE_CHECKING:
    from starlings_coordinator.core.core import Core

TIED = "tied"


class Schedule(ABC):
    """One per core. Training is in its hands while the phase is TRAINING."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self.patience = Patience(core)
        # Workers that reported a broken link lately: their failures are the network's.
        self._link_trouble: set[WorkerId] = set()
        # Who was reported as unreachable lately, and by whom.
        self._accusations: dict[WorkerId, set[WorkerId]] = {}

    # ------------------------------------------------------------------ the life of a plan

    @abstractmethod
    def begin(self) -> None:
        """Every holder has its span, or has kept it through a restart of the coordinator."""

    @abstractmethod
    def recalled(self, reason: str) -> None:
        """After a restart of the coordinator, before `begin`: what becomes of what was under way."""

    @abstractmethod
    def go_on(self) -> None:
        """After every event."""

    def is_routine(self, said: WorkerSaid) -> bool:
        """Whether what was said, and heard by now, is no reason to look at everybody; then its speaker alone is served,
        and `go_on` is for the next event that is a reason, or for the next tick.
        """
        return False

    @abstractmethod
    def counts_on(self, worker_id: WorkerId) -> bool:
        """Whether what is under way cannot end well without `worker_id`."""

    @abstractmethod
    def leave_out(self, worker_id: WorkerId) -> str:
        """It goes on without a worker on which nothing depends. Returns how, in words."""

    @abstractmethod
    def begin_again(self) -> None:
        """The plan has other holders, and a new attempt has been announced."""

    @abstractmethod
    def remind(self, member: Member) -> None:
        """Say to a holder what it may have missed, before it hears of its assignment."""

    @abstractmethod
    def start_over(self, reason: str) -> None:
        """What is under way may have lost something: where that matters, it begins anew."""

    @abstractmethod
    def holder_leaves(self, member: Member) -> None:
        """A holder said that it wants to go, while others train."""

    # ------------------------------------------------------------------ what workers say

    @abstractmethod
    def microbatch_done(self, member: Member, message: MicrobatchDone) -> None: ...

    @abstractmethod
    def microbatch_failed(self, member: Member, message: MicrobatchFailed) -> None: ...

    @abstractmethod
    def died_at(self, member: Member, key: MicrobatchKey, reason: str) -> None:
        """The engine of a worker ended while its device was at that microbatch. Before it is known as lost."""

    @abstractmethod
    def prepared(self, member: Member, message: Prepared) -> None: ...

    @abstractmethod
    def exchange_failed(self, member: Member, message: ExchangeFailed) -> None: ...

    @abstractmethod
    def leases_returned(self, member: Member, message: LeasesReturned) -> None: ...

    @abstractmethod
    def stages_reported(self, member: Member, message: StageReport) -> None: ...

    def round_ready(self, member: Member, message: RoundReady) -> None:
        """Only a schedule with slots knows what to do with it."""
        self._core.dropped_messages += 1

    def round_outcome(self, member: Member, message: RoundOutcome) -> None:
        self._core.dropped_messages += 1

    def group_said(self, member: Member, message: GroupFromMember) -> None:
        self._core.dropped_messages += 1

    @abstractmethod
    def state_reported(self, member: Member, message: StateReport) -> bool:
        """Whether a report while others train was asked for from here."""

    def peer_unreachable(self, member: Member, message: PeerUnreachable) -> None:
        """A report voids nothing by itself; it says whom to blame should something fail."""
        core = self._core
        core.desk.announce(
            "unreachable", f"{member.worker_id} cannot reach {message.worker_id}: {message.reason}"
        )
        core.membership.accused(message.worker_id, member)
        self._link_trouble |= {member.worker_id, message.worker_id}
        suspect = core.members.get(message.worker_id)
        if suspect is not None and not suspect.here and core.phase is not Phase.LOADING:
            timings = core.config.timings
            if suspect.grace_s <= timings.reconnect_grace_s:
                # Its stream ended, and a peer finds it gone as well: two witnesses need no grace.
                reason = f"its connection ended, and {member.worker_id} cannot reach it either"
                core.membership.lose(suspect, reason)
                return
            # After a restart of the coordinator every stream is down, which says nothing of who held it, and a report
            # may be old. Whoever lives is back as soon as silence would have been noticed.
            suspect.grace_s = min(suspect.grace_s, max(timings.silence_least_s, timings.reconnect_grace_s))
        if message.worker_id in core.state.spans:
            self._accusations.setdefault(message.worker_id, set()).add(member.worker_id)

    def blame(self, reporter: Member) -> None:
        """One strike for something that failed: to whom most others could not reach, else to who reports the failure.

        Two that only cannot reach each other accuse each other: then one of them goes, the higher id.
        """
        core = self._core
        suspect = max(
            sorted(self._accusations),
            key=lambda w: (len(self._accusations[w]), w),
            default=reporter.worker_id,
        )
        core.members.get(suspect, reporter).strikes += 1

    def drop_offenders(self, what: str) -> None:
        """`what` failed because of them, as often as may be."""
        core, limit = self._core, self._core.config.strikes_limit
        if core.phase is not Phase.TRAINING:
            return
        for holder in core.holders:
            if holder.strikes >= limit:
                core.membership.dismiss(holder, None, f"{limit} {what} failed because of it")
                return

    # ------------------------------------------------------------------ rounds and attempts

    def groups(self) -> dict[str, tuple[WorkerId, ...]]:
        """Members of every exchange group, sorted."""
        core, state = self._core, self._core.state
        groups = {f"stage:{stage}": core.holders_of(stage) for stage in range(len(state.stages))}
        if core.config.profile.tied_count and len(state.stages) > 1:
            ends = set(core.holders_of(0)) | set(core.holders_of(len(state.stages) - 1))
            groups[TIED] = tuple(sorted(ends))
        return groups

    def open_round(self, weights: dict[str, dict[WorkerId, float]], purpose: ExchangePurpose) -> None:
        """Tell every holder of its groups; parts are shared out by upload rate, equally where one is unknown."""
        core, state = self._core, self._core.state
        records = {
            group: ExchangeGroup(
                group,
                tuple(
                    ExchangeMember(w, weights[group].get(w, 0.0), share)
                    for w, share in zip(members, self._shares(members), strict=True)
                ),
            )
            for group, members in self.groups().items()
        }
        for holder in core.holders:
            mine = tuple(
                record
                for _, record in sorted(records.items())
                if any(m.worker_id == holder.worker_id for m in record.members)
            )
            core.desk.send(
                holder,
                ExchangeOpened(state.step, state.attempt, mine, self.patience.exchange_s, purpose),
            )

    def _shares(self, members: tuple[WorkerId, ...]) -> list[float]:
        probes = [self._core.members[w].probe for w in members]
        rates = [probe.uplink_bytes_per_s if probe is not None else 0.0 for probe in probes]
        if any(not (math.isfinite(rate) and rate > 0) for rate in rates):
            return [1 / len(members)] * len(members)
        return [rate / sum(rates) for rate in rates]

    def announce_attempt(self, reason: str) -> None:
        """The next attempt at the present step (or at what follows the last one) begins, for all holders."""
        core, state = self._core, self._core.state
        core.desk.record(StepRetried(state.step, state.attempt + 1, reason))
        core.desk.announce("step_restarted", f"step {state.step} begins again: {reason}")
        for holder in core.holders:
            core.desk.send(holder, StepRestarted(state.step, state.attempt, reason))

    def beside(self, version: int) -> int:
        """At most so many acknowledged samples are not in what was saved as `version`."""
        return 0

    # ------------------------------------------------------------------ for people and tests

    @property
    @abstractmethod
    def samples_leased(self) -> int:
        """Distinct samples that were leased."""

    @property
    @abstractmethod
    def under_way(self) -> bool:
        """Whether somebody works on something that was leased."""

    @property
    def microbatches(self) -> tuple[int, int]:
        """Of the present step: how many, and how many are done."""
        return 0, 0

    @property
    def exchanges_shown(self) -> tuple[StageExchanges, ...]:
        """Of each stage whose replicas exchange in pairs."""
        return ()

    @abstractmethod
    def waiting_words(self) -> str:
        """Why nothing moves; "" while it does."""

    @abstractmethod
    def validate(self) -> None:
        """Invariants; raises AssertionError."""
