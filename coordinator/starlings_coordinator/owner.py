"""What the owner sees and commands: status, watch, stop, invites. Delegated to by `service.py`."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace

from starlings_coordinator.bus.bulletin import Bulletin
from starlings_coordinator.clock import Clock
from starlings_coordinator.core.advising import advice_request, worth_words
from starlings_coordinator.core.core import Core
from starlings_coordinator.core.effects import Answer
from starlings_coordinator.core.events import (
    DrainAsked,
    EvictionRequested,
    OwnerCommand,
    PauseRequested,
    ReadmissionRequested,
    ResumeRequested,
    StopRequested,
    WorkerRevoked,
)
from starlings_coordinator.core.reasons import find_worker, why
from starlings_coordinator.core.views import Headline, headline
from starlings_coordinator.detokenise import Detokenise
from starlings_coordinator.enrolment import EnrolmentAuthority
from starlings_coordinator.leases import PROMPT_TOKENS, Records
from starlings_coordinator.loop import CoreLoop
from starlings_coordinator.reach.book import ReachBook
from starlings_protos import control_pb2
from starlings_protos.advice_messages import Advice, AdviceReply, AdviceRequest
from starlings_protos.convert import to_proto
from starlings_protos.errors import RefusedError, clean_text
from starlings_protos.messages import Refusal, WorkerId
from starlings_protos.status import StatusReply, WorkerStatus

SHORTEST_INTERVAL_S = 0.1
LONGEST_INTERVAL_S = 60.0
# A watcher hears this often that the coordinator lives, also when nothing changes.
QUIET_INTERVAL_S = 5.0
WATCHERS_LIMIT = 64
# Building status replies takes at most one part in this many of the time, however many ask.
AGE_PER_BUILD = 25.0
REASON_LIMIT_CHARACTERS = 200
NAME_LIMIT_CHARACTERS = 64


def trimmed(status: StatusReply, after_event: int, after_step: int) -> StatusReply:
    """Only the events and loss points that are newer.

    A restarted coordinator numbers its events anew, and a rewound job has fewer loss points: whoever has seen
    later ones than there are gets everything.
    """
    newest_event = status.events[-1].sequence if status.events else 0
    if after_event > newest_event:
        after_event = 0
    newest_step = status.loss_curve[-1].step if status.loss_curve else -1
    if after_step > newest_step:
        after_step = -1
    return replace(
        status,
        events=tuple(e for e in status.events if e.sequence > after_event),
        loss_curve=tuple(p for p in status.loss_curve if p.step > after_step),
    )


def _without_clock(status: StatusReply) -> StatusReply:
    bus = status.bus
    return replace(status, elapsed_s=0.0, bus=replace(bus, for_s=0.0) if bus is not None else None)


class OwnerDesk:
    def __init__(
        self,
        core: Core,
        loop: CoreLoop,
        authority: EnrolmentAuthority,
        clock: Clock,
        records: Records,
        detokenise: Detokenise,
        bulletin: Bulletin | None = None,
        reach: ReachBook | None = None,
        planner: Callable[[AdviceRequest], Awaitable[AdviceReply]] | None = None,
    ) -> None:
        self._core = core
        self._loop = loop
        self._authority = authority
        self._clock = clock
        self._records = records
        self._detokenise = detokenise
        self._bulletin = bulletin
        self._reach = reach
        self._planner = planner
        self._sample: tuple[object, str] = (None, "")
        self._watchers = 0
        self._built: StatusReply | None = None
        self._built_at_s = self._build_took_s = 0.0
        # Commands that wait for their answer.
        self._asked = 0
        self._waiting: dict[int, asyncio.Future[Answer]] = {}

    # ------------------------------------------------------------------ status

    def headline(self) -> Headline:
        return headline(self._core)

    def status(self, after_event: int = 0, after_step: int = -1) -> StatusReply:
        found = trimmed(self._whole(), after_event, after_step)
        return replace(
            found,
            workers=tuple(map(self._with_reach, found.workers)),
            sample_text=self._sample_text(),
            bus=self._bulletin.health() if self._bulletin is not None else None,
        )

    def _with_reach(self, worker: WorkerStatus) -> WorkerStatus:
        if self._reach is None:
            return worker
        reach, relays = self._reach.reach(worker.worker_id), self._reach.relays_of(worker.worker_id)
        return replace(worker, reach=reach.value, relays=relays) if reach.value else worker

    def _whole(self) -> StatusReply:
        """The same for all who ask within moments: with many workers it takes long to make."""
        now = self._clock.now()
        age_s = now.monotonic_s - self._built_at_s
        if self._built is None or age_s >= self._build_took_s * AGE_PER_BUILD or self._loop.ended.is_set():
            self._built, self._built_at_s = self._core.status(now), now.monotonic_s
            self._build_took_s = self._clock.now().monotonic_s - now.monotonic_s
        return self._built

    def reply(self, request: control_pb2.StatusRequest) -> control_pb2.StatusReply:
        found, now_s = self.status(request.after_event), self._clock.now().monotonic_s
        reply = control_pb2.StatusReply()
        # Only here: to those who watch, time that passes is no news.
        workers = tuple(replace(w, silent_s=self._silent_s(w.worker_id, now_s)) for w in found.workers)
        to_proto(replace(found, workers=workers), reply)
        return reply

    def _silent_s(self, worker_id: WorkerId, now_s: float) -> float:
        member = self._core.members.get(worker_id)
        here = member is not None and member.here
        return max(0.0, now_s - member.detector.last_heard_s) if member is not None and here else 0.0

    def _sample_text(self) -> str:
        """Prompt and continuation; decoded once."""
        state = self._core.state
        if not state.text_tokens:
            return ""
        key = (state.text_version, state.text_prompt_sample, state.text_tokens)
        if self._sample[0] != key:
            prompt = self._records.held_out_tokens(state.text_prompt_sample, PROMPT_TOKENS)
            self._sample = (key, self._detokenise((*prompt, *state.text_tokens)))
        return self._sample[1]

    async def watch(
        self, request: control_pb2.StatusRequest
    ) -> AsyncGenerator[control_pb2.StatusReply, None]:
        """The state now, then again when it changed; the last reply is the job's end.

        Raises:
            RefusedError: BUSY: too many watch already.
        """
        if self._watchers >= WATCHERS_LIMIT:
            raise RefusedError(Refusal.BUSY, f"{self._watchers} others watch this job; try again later.")
        self._watchers += 1
        try:
            async with aclosing(self._changes(request)) as changes:
                async for status in changes:
                    reply = control_pb2.StatusReply()
                    to_proto(status, reply)
                    yield reply
        finally:
            self._watchers -= 1

    async def _changes(self, request: control_pb2.StatusRequest) -> AsyncGenerator[StatusReply, None]:
        interval_s = request.interval_s if math.isfinite(request.interval_s) else 0.0
        interval_s = min(max(interval_s, SHORTEST_INTERVAL_S), LONGEST_INTERVAL_S)
        after_event, after_step = request.after_event, -1
        known: StatusReply | None = None
        quiet_s = 0.0
        while True:
            ended = self._loop.ended.is_set()
            status = self.status(after_event, after_step)
            # The clock alone is no news.
            if known != (settled := _without_clock(status)) or quiet_s >= QUIET_INTERVAL_S:
                yield status
                quiet_s = 0.0
                known = replace(settled, events=(), loss_curve=())
                after_event = status.events[-1].sequence if status.events else after_event
                after_step = status.loss_curve[-1].step if status.loss_curve else after_step
            if ended:
                return
            try:
                await asyncio.wait_for(self._loop.ended.wait(), interval_s)
            except TimeoutError:
                quiet_s += interval_s

    # ------------------------------------------------------------------ commands

    async def stop(self, request: control_pb2.StopRequest) -> control_pb2.StopReply:
        reason = clean_text(request.reason, REASON_LIMIT_CHARACTERS) or "stopped by the owner"
        await self._loop.post(StopRequested(reason))
        await self._loop.turn()
        return control_pb2.StopReply(phase=self._core.phase.value)

    def answered(self, answer: Answer) -> None:
        waiting = self._waiting.pop(answer.request, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    async def _command(self, make: Callable[[int], OwnerCommand]) -> control_pb2.CommandReply:
        """Answered when its record is stored and its effects have left.

        Raises:
            RefusedError: NOT_NOW: the core said why.
        """
        self._asked += 1
        waiting: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[self._asked] = waiting
        number = self._asked
        try:
            await self._loop.post(make(number))
            await self._loop.turn()
        finally:
            self._waiting.pop(number, None)
        if not waiting.done():
            raise RefusedError(Refusal.BUSY, "The coordinator is ending; ask again when it is back.")
        answer = waiting.result()
        if answer.refused:
            raise RefusedError(Refusal.NOT_NOW, answer.reply.text)
        reply = control_pb2.CommandReply()
        to_proto(answer.reply, reply)
        return reply

    def _worker(self, named: str) -> WorkerId:
        """Raises RefusedError: NOT_HELD: none, or several."""
        found = find_worker(self._core, clean_text(named, NAME_LIMIT_CHARACTERS))
        if len(found) == 1:
            return found[0]
        if not found:
            raise RefusedError(
                Refusal.NOT_HELD,
                f"This job knows no worker '{clean_text(named, NAME_LIMIT_CHARACTERS)}': "
                "`starlings workers` lists them.",
            )
        some = ", ".join(found[:4])
        raise RefusedError(
            Refusal.NOT_HELD, f"That may be {some}{' ...' if len(found) > 4 else ''}: say more of the id."
        )

    async def pause(self, request: control_pb2.PauseRequest) -> control_pb2.CommandReply:
        reason = clean_text(request.reason, REASON_LIMIT_CHARACTERS) or "no reason given"
        return await self._command(lambda number: PauseRequested(number, reason))

    async def resume(self, request: control_pb2.ResumeRequest) -> control_pb2.CommandReply:
        return await self._command(ResumeRequested)

    async def drain(self, request: control_pb2.DrainRequest) -> control_pb2.CommandReply:
        worker_id = self._worker(request.worker)
        reason = clean_text(request.reason, REASON_LIMIT_CHARACTERS) or "no reason given"
        return await self._command(lambda number: DrainAsked(number, worker_id, reason))

    async def evict(self, request: control_pb2.EvictRequest) -> control_pb2.CommandReply:
        worker_id = self._worker(request.worker)
        if request.readmit:
            return await self._command(lambda number: ReadmissionRequested(number, worker_id))
        reason = clean_text(request.reason, REASON_LIMIT_CHARACTERS) or "no reason given"
        for_s = request.for_s if math.isfinite(request.for_s) else 0.0
        reply = await self._command(
            lambda number: EvictionRequested(number, worker_id, reason, for_s, request.force)
        )
        if self._bulletin is not None:
            self._bulletin.forget(worker_id)
        return reply

    async def why(self, request: control_pb2.WhyRequest) -> control_pb2.WhyReply:
        worker_id = self._worker(request.worker)
        found = why(self._core, worker_id, self._clock.now())
        with contextlib.suppress(
            RefusedError
        ):  # what it is worth is not worth waiting for a planner that is busy
            advice = await self._advice(worker_id)
            tokens = self._microbatch_tokens
            because = tuple(worth_words(one, worker_id, tokens) for one in advice)
            found = replace(found, because=found.because + because)
        reply = control_pb2.WhyReply()
        to_proto(found, reply)
        return reply

    @property
    def _microbatch_tokens(self) -> int:
        job = self._core.config.job
        return job.train.microbatch * job.tokens_per_sample

    async def _advice(self, about: WorkerId | None = None) -> tuple[Advice, ...]:
        """Raises RefusedError: NOT_NOW: there is no plan to amend; BUSY: the planner is."""
        request = advice_request(self._core, about)
        if isinstance(request, str) or self._planner is None:
            raise RefusedError(Refusal.NOT_NOW, str(request))
        answer = await self._planner(request)
        if answer.failure:
            raise RefusedError(Refusal.BUSY, f"There is no advice: {answer.failure}.")
        return answer.advice

    async def advise(self, request: control_pb2.AdviceWanted) -> control_pb2.AdviceGiven:
        reply = control_pb2.AdviceGiven(microbatch_tokens=self._microbatch_tokens)
        for advice in await self._advice():
            to_proto(advice, reply.advice.add())
        return reply

    async def create_invite(self, request: control_pb2.CreateInviteRequest) -> control_pb2.Invite:
        return await asyncio.to_thread(
            self._authority.create_invite, request.lifetime_s, request.uses, request.role
        )

    def list_invites(self) -> control_pb2.InviteList:
        return self._authority.list_invites()

    async def revoke_invite(self, request: control_pb2.RevokeInviteRequest) -> control_pb2.RevokeInviteReply:
        reply = await asyncio.to_thread(self._authority.revoke_invite, request.token_id, request.workers)
        for worker_id in reply.worker_ids:
            await self._loop.post(WorkerRevoked(WorkerId(worker_id)))
            if self._bulletin is not None:
                self._bulletin.forget(worker_id)
        return reply
