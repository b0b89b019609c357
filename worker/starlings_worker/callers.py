"""Who may call a data port: workers and the keeper with a valid assignment of this job, in their newest life."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc.aio

from starlings_protos.assignments import assignment_from_metadata, verify_assignment
from starlings_protos.errors import RefusedError
from starlings_protos.messages import Refusal, WorkerId
from starlings_protos.peers import peer_identity

Context = grpc.aio.ServicerContext[Any, Any]


class Callers:
    """One per life of an engine. Remembers the newest incarnation of each caller: older ones are fenced."""

    def __init__(self) -> None:
        self._incarnations: dict[WorkerId, int] = {}

    def check(
        self,
        context: Context,
        *,
        assignment_key_der: bytes,
        job: str,
        now_wall_s: float,
        named_by_plan: Callable[[WorkerId], int] = lambda _: 0,
    ) -> WorkerId:
        """The caller's id.

        Args:
            now_wall_s: by the coordinator's clock.
            named_by_plan: the incarnation of a worker that the plan knows.

        Raises:
            RefusedError: no valid assignment, or one of an earlier life.
        """
        peer = peer_identity(context)
        metadata = [(str(key), value) for key, value in context.invocation_metadata() or ()]
        claim = verify_assignment(
            assignment_key_der,
            assignment_from_metadata(metadata),
            worker_id=peer.id,
            job=job,
            now_wall_s=now_wall_s,
        )
        worker_id = WorkerId(peer.id)
        newest = max(self._incarnations.get(worker_id, 0), named_by_plan(worker_id))
        if claim.incarnation < newest:
            raise RefusedError(
                Refusal.ASSIGNMENT,
                f"{worker_id} lives its life {newest}; this assignment is of {claim.incarnation}",
            )
        self._incarnations[worker_id] = claim.incarnation
        return worker_id
