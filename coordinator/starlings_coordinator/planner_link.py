"""The planner's child process, as the loop sees it: a request goes in, an event comes back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from starlings_coordinator.children import Child, ChildSpec
from starlings_coordinator.core.events import Event, PlanComputed, PlannerFailed
from starlings_protos.convert import from_proto, to_proto
from starlings_protos.messages import PlanReply, PlanRequest
from starlings_protos.process_pb2 import FromPlanner, ToPlanner


class PlannerLink:
    """At most one request is open: the core asks again only when it has given up on the one before."""

    def __init__(self, *, profile_json: bytes, log_path: Path, post: Callable[[Event], None]) -> None:
        self._profile_json = profile_json
        self._post = post
        self._pending: PlanRequest | None = None
        # Whether the child that runs now has the pending request.
        self._asked = False
        self.child: Child[ToPlanner, FromPlanner] = Child(
            ChildSpec("planner", "starlings_coordinator.planner", FromPlanner, log_path, disposable=True),
            on_start=self._ask,
            on_message=self._said,
            on_end=self._ended,
        )

    def compute(self, request: PlanRequest) -> None:
        hangs = self._pending is not None and self._asked
        self._pending, self._asked = request, False
        if hangs:
            self.child.kill()  # the next one is asked when it starts
        else:
            self._ask()

    def _ask(self) -> None:
        self._asked = False
        if self._pending is not None:
            message = ToPlanner()
            to_proto(replace(self._pending, profile_json=self._profile_json), message.plan)
            self._asked = self.child.send(message)

    def _said(self, message: FromPlanner) -> None:
        request = self._pending
        if request is None or message.plan.request_id != request.request_id:
            return  # an answer to a question that is not asked any more
        self._pending, self._asked = None, False
        try:
            self._post(PlanComputed(from_proto(message.plan, PlanReply)))
        except ValueError as error:
            self._post(PlannerFailed(request.request_id, f"an unreadable answer: {error}"))

    def _ended(self, reason: str) -> None:
        if self._pending is not None and self._asked:
            request, self._pending, self._asked = self._pending, None, False
            self._post(PlannerFailed(request.request_id, reason))
