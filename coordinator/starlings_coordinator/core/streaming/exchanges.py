"""Exchanges of an `async` job: one `StageRounds` (pairs) or `GroupStage` (groups) per stage, fed with holders, time and
what replicas say.

    plan changes ------------> joined, left          RoundReady ---> SlotClock, PairMatched
    ticks -------------------> slots, matches        RoundOutcome -> whose work is no replica's alone any more

Slot numbers rise through the whole life of a job, whoever is started again: how many are taken is written down ahead,
in portions, so that no round id comes a second time. Everything else here is soft: a coordinator that was started anew
learns from the replicas where the clocks stand, and one that is away costs rounds, not training.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from starlings_coordinator.core.grouping.stage import GroupStage
from starlings_coordinator.core.members import Member
from starlings_coordinator.core.pairing.links import PassiveEstimates, Place
from starlings_coordinator.core.pairing.outcomes import Named
from starlings_coordinator.core.pairing.rounds import START_WAIT_S, PairSettings, StageRounds, Told
from starlings_coordinator.core.phase import Phase
from starlings_coordinator.core.records import SlotsReserved
from starlings_coordinator.core.streaming.contributions import Contributions
from starlings_protos.group_messages import GroupDecided, GroupDropped, GroupFromMember
from starlings_protos.messages import WorkerId
from starlings_protos.pair_messages import RoundOutcome, RoundReady, SlotClock, SoloReason, SwapResult
from starlings_protos.status import ReplicaRounds, StageExchanges

if TYPE_CHECKING:
    from starlings_coordinator.core.core import Core

LOOK_EVERY_S = 0.1
# Slots that a record stands for. After a restart at most so many numbers are left out.
SLOTS_RESERVED = 256
# A worker that says that its slot is further on than this says nonsense: years of slots.
SLOTS_AHEAD_MOST = 1 << 30
# After a restart of the coordinator the first to come back may be one that never had a clock: those that have one
# are waited for this much longer than they are given to come back.
RECALL_WAIT_S = 15.0
# Slots whose beginnings are remembered, for outcomes.
SLOTS_REMEMBERED = 8
# People hear of the same pair at most this often.
NAMED_EVERY_S = 60.0
WORDS_MOST = 200

_TROUBLE = frozenset({SoloReason.REFUSED, SoloReason.SILENT, SoloReason.TOO_FAR, SoloReason.FAILED})


class Exchanges:
    def __init__(self, core: Core, contributions: Contributions) -> None:
        self._core = core
        self._contributions = contributions
        self.stages: tuple[StageRounds, ...] = ()
        self._links = PassiveEstimates()
        self._plan_version = -1
        self._looked_at_s = float("-inf")
        # By stage: what each replica had done at the last look, and when the newest slots began.
        self._at_look: list[dict[WorkerId, int]] = []
        self._at_slot: list[OrderedDict[int, dict[WorkerId, int]]] = []
        # By stage: length and warm-up that were announced last.
        self._announced: list[tuple[float, bool]] = []
        self._named_at_s: dict[tuple[WorkerId, WorkerId], float] = {}
        self._suspects: set[WorkerId] = set()
        # The round of a group whose decision was told to people last.
        self._spoken_of = 0

    # ------------------------------------------------------------------ the life of a plan

    def begin(self, *, recalled: bool) -> None:
        """`recalled`: workers have gone on with slots of the coordinator before this one."""
        core, job = self._core, self._core.config.job
        rules = job.pair_rules
        self.stages = ()
        self._plan_version = -1
        self._links = PassiveEstimates()
        if rules is None:
            return
        first_slot = core.state.slots_reserved + 1
        wait_s = core.config.timings.restart_grace_s + RECALL_WAIT_S if recalled else START_WAIT_S
        settings = PairSettings(
            rules,
            job.job.seed + job.exchange.seed,
            job.steps_total * job.tokens_per_step,
            0,
        )
        kind = GroupStage if rules.topology == "all" else StageRounds
        self.stages = tuple(
            kind(
                number,
                replace(settings, elements=self._elements(number)),
                self._links,
                self._contributions,
                first_slot=first_slot,
                start_wait_s=wait_s,
            )
            for number in range(len(core.state.stages))
        )
        self._at_look = [{} for _ in self.stages]
        self._at_slot = [OrderedDict() for _ in self.stages]
        self._announced = [(0.0, False) for _ in self.stages]
        self._named_at_s.clear()
        self._suspects.clear()
        self._follow_plan()

    def _elements(self, stage: int) -> int:
        core = self._core
        return sum(core.config.profile.blocks[b].trainable_count for b in core.state.stages[stage].blocks)

    def go_on(self) -> None:
        """After every event, while others train."""
        if not self.stages:
            return
        self._follow_plan()
        now_s = self._core.now.monotonic_s
        if now_s - self._looked_at_s < LOOK_EVERY_S:
            return
        self._looked_at_s = now_s
        for rounds in self.stages:
            self._note_slot(rounds)
            count = self._contributions.count
            self._at_look[rounds.stage] = {w: count(w, rounds.stage) for w in rounds.replicas}
            self._tell(rounds, rounds.look_at_time(self._core.state.tokens, now_s))

    def _follow_plan(self) -> None:
        """Whoever holds a stage now, in the life that it has now, takes part."""
        core = self._core
        if self._plan_version == core.state.plan_version:
            return
        self._plan_version = core.state.plan_version
        for rounds in self.stages:
            holders = core.holders_of(rounds.stage)
            for gone in sorted(rounds.replicas.keys() - set(holders)):
                rounds.left(gone)
                self._links.forget(gone)
            for worker_id in holders:
                if worker_id not in rounds.replicas:
                    self._join(rounds, core.members[worker_id])

    def _join(self, rounds: StageRounds, member: Member) -> None:
        hello, probe = member.hello, member.probe
        up, down = (probe.uplink_bytes_per_s, probe.downlink_bytes_per_s) if probe is not None else (0.0, 0.0)
        self._links.place(member.worker_id, Place(hello.site or hello.host_id, hello.region, up, down))
        now_s = self._core.now.monotonic_s
        told = rounds.joined(member.worker_id, member.incarnation, hello.region, now_s)
        self._tell(rounds, told)

    def remind(self, member: Member) -> None:
        """It is back on a new stream, and may have missed a clock. (A match that was lost costs a swap.)"""
        span = self._core.state.spans.get(member.worker_id)
        for rounds in self.stages if span is not None else ():
            if span is not None and rounds.stage in span:
                self._join(rounds, member)

    # ------------------------------------------------------------------ what replicas say

    def ready(self, member: Member, message: RoundReady) -> None:
        rounds = self._rounds_of(member, message.stage)
        ahead = message.slot - self._core.state.slots_reserved
        if rounds is None or ahead > SLOTS_AHEAD_MOST or not math.isfinite(message.begins_in_s):
            self._core.dropped_messages += 1
            return
        core = self._core
        told = rounds.ready(
            member.worker_id, member.incarnation, message, core.state.tokens, core.now.monotonic_s
        )
        self._tell(rounds, told)

    def outcome(self, member: Member, message: RoundOutcome) -> None:
        rounds = self._rounds_of(member, message.stage)
        if rounds is None:
            self._core.dropped_messages += 1
            return
        self._note_slot(rounds)
        if not rounds.outcome(member.worker_id, member.incarnation, message):
            return
        if message.result is not SwapResult.SOLO:
            # The sender has what its partners had when the slot began; whether they have its own, they say.
            at_slot = self._at_slot[message.stage].get(message.slot, {})
            partners = [message.partner] if message.partner else message.members
            for partner in partners:
                if partner != member.worker_id:
                    count = at_slot.get(partner, 0)
                    self._contributions.merged(partner, message.stage, message.fragment, count)
        elif message.solo_reason in _TROUBLE:
            self._speak_of(rounds, member, message)
            if message.solo_reason is SoloReason.SILENT and message.partner:
                self._core.membership.accused(WorkerId(message.partner), member)
        if message.solo_reason is SoloReason.TOO_FAR:
            self._let_copy(member)

    def group_said(self, member: Member, message: GroupFromMember) -> None:
        rounds = self._rounds_of(member, message.stage)
        if not isinstance(rounds, GroupStage):
            self._core.dropped_messages += 1
            return
        now_s = self._core.now.monotonic_s
        self._tell(rounds, rounds.said(member.worker_id, member.incarnation, message, now_s))

    def _rounds_of(self, member: Member, stage: int) -> StageRounds | None:
        span = self._core.state.spans.get(member.worker_id)
        here = stage < len(self.stages) and span is not None and stage in span
        return self.stages[stage] if here and self._core.plan_is_live else None

    def _let_copy(self, member: Member) -> None:
        """It came back from rounds alone too far away to be averaged with: as a new life it copies what others have.
        Not when it is all that is left of a stage.
        """
        core = self._core
        span = core.state.spans[member.worker_id]
        others = all(
            any(core.members[w].here for w in core.holders_of(stage) if w != member.worker_id)
            for stage in span.stages
        )
        if others and core.phase is Phase.TRAINING:
            core.membership.lose(
                member, "it is too far from its partners after rounds alone, and copies their weights"
            )

    # ------------------------------------------------------------------ what is told

    def _tell(self, rounds: StageRounds, told: Iterable[Told]) -> None:
        core, newest = self._core, 0
        clock: SlotClock | None = None
        for worker_id, message in told:
            newest = max(newest, message.slot)
            member = core.members.get(worker_id)
            if member is not None:
                core.desk.send(member, message)
            if isinstance(message, GroupDecided) and message.dropped and self._spoken_of != message.round_id:
                self._spoken_of = message.round_id
                self._speak_of_dropped(message, message.dropped)
            if isinstance(message, SlotClock) and (clock is None or message.slot > clock.slot):
                clock = message
        self._reserve(newest)
        if clock is not None:
            self._announce_clock(rounds.stage, clock)

    def _reserve(self, slot: int) -> None:
        """Nothing of this slot leaves before it is written down that its number is taken."""
        if slot > self._core.state.slots_reserved:
            self._core.desk.record(SlotsReserved(slot + SLOTS_RESERVED))

    def _announce_clock(self, stage: int, clock: SlotClock) -> None:
        length_s, warmup = self._announced[stage]
        if clock.warmup == warmup and math.isclose(clock.slot_length_s, length_s):
            return
        self._announced[stage] = (clock.slot_length_s, clock.warmup)
        kind = "a group" if isinstance(self.stages[stage], GroupStage) else "pairs"
        words = f"replicas of stage {stage} exchange in {kind} every {clock.slot_length_s:.1f} s"
        self._core.desk.announce("exchange", words + (" (warm-up)" if clock.warmup else ""))

    def _note_slot(self, rounds: StageRounds) -> None:
        """Remember how far each replica was when a slot began: a look before that, to be sure."""
        if not rounds.clock.running:
            return
        slot, began = rounds.clock.slot_at(self._core.now.monotonic_s), self._at_slot[rounds.stage]
        self._reserve(slot + 2)
        if slot not in began:
            began[slot] = self._at_look[rounds.stage]
            while len(began) > SLOTS_REMEMBERED:
                began.popitem(last=False)

    def _speak_of(self, rounds: StageRounds, member: Member, message: RoundOutcome) -> None:
        core, now_s = self._core, self._core.now.monotonic_s
        pair = (member.worker_id, message.partner)
        partner = message.partner or "its group"
        if now_s - self._named_at_s.get(pair, float("-inf")) >= NAMED_EVERY_S:
            self._named_at_s[pair] = now_s
            why = (message.detail or message.solo_reason.name.lower())[:WORDS_MOST]
            words = f"{member.worker_id} goes without {partner} in slot {message.slot}"
            core.desk.announce("exchange", f"{words} of stage {message.stage}: {why}")
        for suspect in rounds.book.suspects():
            if suspect not in self._suspects:
                self._suspects.add(suspect)
                accusers = ", ".join(sorted(rounds.book.of(suspect).accusers)[:4])
                core.desk.announce("suspect", f"{suspect} is named by several partners: {accusers}")

    def _speak_of_dropped(self, message: GroupDecided, dropped: tuple[GroupDropped, ...]) -> None:
        now_s = self._core.now.monotonic_s
        for one in dropped:
            pair = (WorkerId(""), one.worker_id)
            if now_s - self._named_at_s.get(pair, float("-inf")) >= NAMED_EVERY_S:
                self._named_at_s[pair] = now_s
                words = f"slot {message.slot} of stage {message.stage} goes without {one.worker_id}"
                self._core.desk.announce("exchange", f"{words}: {one.reason[:WORDS_MOST]}")

    # ------------------------------------------------------------------ for people

    def status(self) -> tuple[StageExchanges, ...]:
        now_s = self._core.now.monotonic_s
        return tuple(_status(rounds, now_s) for rounds in self.stages)


def _status(rounds: StageRounds, now_s: float) -> StageExchanges:
    clock, book = rounds.clock, rounds.book
    slot = max(0, clock.slot_at(now_s)) if clock.running else 0
    suspects = book.suspects()
    replicas = []
    for worker_id in sorted(rounds.replicas):
        record = book.of(worker_id)
        replicas.append(
            ReplicaRounds(
                worker_id,
                record.committed,
                record.solo,
                record.solo_slots_in_a_row,
                record.one_sided,
                worker_id in suspects,
                record.last,
            )
        )
    return StageExchanges(
        rounds.stage,
        slot,
        clock.length_of(slot) if clock.running else 0.0,
        clock.running and clock.warmup_at(slot),
        book.rounds_averaged,
        book.rounds_one_sided,
        book.unexpected,
        rounds.worst_far_interval() or 0,
        tuple(replicas),
        tuple(_named(named) for named in list(book.named)[-8:]),
    )


def _named(named: Named) -> str:
    by = named.by if named.by is not None else "the coordinator"
    return f"{named.worker_id}, by {by}: {named.reason[:WORDS_MOST]}"
