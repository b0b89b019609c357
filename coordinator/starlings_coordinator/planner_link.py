"""The planner's child process, as the loop sees it: a request goes in, an event comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from starlings_coordinator.children import Child, ChildSpec
from starlings_coordinator.core.events import Event, PlanComputed, PlannerFailed
from starlings_protos.advice_messages import AdviceReply, AdviceRequest
from starlings_protos.convert import from_proto, to_proto
from starlings_protos.errors import RefusedError
from starlings_protos.messages import PlanReply, PlanRequest, Refusal
from starlings_protos.process_pb2 import AdviceReply as AdviceMessage
from starlings_protos.process_pb2 import FromPlanner, ToPlanner

# Two linear programmes, each a second or two with a thousand workers.
ADVICE_WITHIN_S = 12.0


class PlannerLink:
    """At most one request is open: the core asks again only when it has given up on the one before."""

    def __init__(self, *, profile_json: bytes, log_path: Path, post: Callable[[Event], None]) -> None:
        self._profile_json = profile_json
        self._post = post
        self._pending: PlanRequest | None = None
        # Whether the child that runs now has the pending request.
        self._asked = False
        # Whoever waits for advice.
        self._advice: asyncio.Future[AdviceMessage] | None = None
        self.child: Child[ToPlanner, FromPlanner] = Child(
            ChildSpec("planner", "starlings_coordinator.planner", FromPlanner, log_path, disposable=True),
            on_start=self._ask,
            on_message=self._said,
            on_end=self._ended,
        )

    def compute(self, request: PlanRequest) -> None:
        hangs = (self._pending is not None and self._asked) or self._advice is not None
        self._pending, self._asked = request, False
        if hangs:
            self.child.kill()  # the next one is asked when it starts
        else:
            self._ask()

    async def advise(self, request: AdviceRequest) -> AdviceReply:
        """What the planner says of a plan that stands. Plans that are wanted meanwhile come first, and end this.

        Raises:
            RefusedError: BUSY: something else is being worked out, or the planner ended.
        """
        if self._pending is not None or self._advice is not None:
            raise RefusedError(Refusal.BUSY, "The planner is at another question: ask again in a moment.")
        message = ToPlanner()
        plan = replace(request.plan, profile_json=self._profile_json)
        to_proto(replace(request, plan=plan), message.advice)
        self._advice = waiting = asyncio.get_running_loop().create_future()
        try:
            if not self.child.send(message):
                raise RefusedError(Refusal.BUSY, "The planner is being started: ask again in a moment.")
            said = await asyncio.wait_for(waiting, ADVICE_WITHIN_S)
        except TimeoutError:
            self.child.kill()
            raise RefusedError(
                Refusal.BUSY, f"The planner did not answer within {ADVICE_WITHIN_S:.0f} s."
            ) from None
        finally:
            self._advice = None
        return from_proto(said, AdviceReply)

    def _ask(self) -> None:
        self._asked = False
        if self._pending is not None:
            message = ToPlanner()
            to_proto(replace(self._pending, profile_json=self._profile_json), message.plan)
            self._asked = self.child.send(message)

    def _said(self, message: FromPlanner) -> None:
        if message.HasField("advice"):
            if self._advice is not None and not self._advice.done():
                self._advice.set_result(message.advice)
            return
        request = self._pending
        if request is None or message.plan.request_id != request.request_id:
            return  # an answer to a question that is not asked any more
        self._pending, self._asked = None, False
        try:
            self._post(PlanComputed(from_proto(message.plan, PlanReply)))
        except ValueError as error:
            self._post(PlannerFailed(request.request_id, f"an unreadable answer: {error}"))

    def _ended(self, reason: str) -> None:
        if self._advice is not None and not self._advice.done():
            self._advice.set_exception(
                RefusedError(Refusal.BUSY, f"The planner had to be started again ({reason}): ask again.")
            )
        if self._pending is not None and self._asked:
            request, self._pending, self._asked = self._pending, None, False
            self._post(PlannerFailed(request.request_id, reason))
