"""The planner's process: a ToPlanner comes in, a FromPlanner goes out, until the pipe ends."""

from __future__ import annotations

import sys

from starlings_coordinator.planner.plan import make_plan
from starlings_job.profile import Profile, ProfileError
from starlings_protos import pipes
from starlings_protos.convert import from_proto, to_proto
from starlings_protos.messages import PlanReply, PlanRequest
from starlings_protos.process_pb2 import FromPlanner, ToPlanner


def answer(request: PlanRequest) -> PlanReply:
    """Never raises: a planner that cannot plan says so."""
    try:
        return make_plan(request, Profile.from_json(request.profile_json))
    except ProfileError as error:
        return PlanReply(request.request_id, impossible=f"the model's profile is unreadable: {error}")
    except (ArithmeticError, ValueError) as error:
        return PlanReply(request.request_id, impossible=f"the planner failed: {error}")


def main() -> int:
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    # A stray print must not get between two messages.
    sys.stdout = sys.stderr
    while (message := pipes.read_blocking(source, ToPlanner)) is not None:
        reply = answer(from_proto(message.plan, PlanRequest))
        envelope = FromPlanner()
        to_proto(reply, envelope.plan)
        pipes.write(sink, envelope)
        sink.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
