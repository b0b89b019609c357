"""The planner's process: a ToPlanner comes in, a FromPlanner goes out, one at a time, until the pipe ends."""

from __future__ import annotations

import sys
import traceback

from starlings_coordinator.planner.linear.advice import advise
from starlings_coordinator.planner.plan import make_plan
from starlings_job.profile import Profile, ProfileError
from starlings_protos import pipes
from starlings_protos.advice_messages import AdviceReply, AdviceRequest
from starlings_protos.convert import from_proto, to_proto
from starlings_protos.messages import PlanReply, PlanRequest
from starlings_protos.process_pb2 import AdviceRequest as AdviceRequestMessage
from starlings_protos.process_pb2 import FromPlanner, ToPlanner


def advised(message: AdviceRequestMessage) -> AdviceReply:
    """Never raises, either."""
    request_id = message.plan.request_id
    try:
        request = from_proto(message, AdviceRequest)
        return advise(request, Profile.from_json(request.plan.profile_json))
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        return AdviceReply(request_id, failure=f"the planner failed: {type(error).__name__}: {error}")


def answer(message: ToPlanner) -> PlanReply | AdviceReply:
    """Never raises: a planner that cannot plan says so, and is there for the next request."""
    if message.HasField("advice"):
        return advised(message.advice)
    request_id = message.plan.request_id
    try:
        request = from_proto(message.plan, PlanRequest)
        return make_plan(request, Profile.from_json(request.profile_json))
    except ProfileError as error:
        return PlanReply(request_id, impossible=f"the model's profile is unreadable: {error}")
    except Exception as error:
        # To the coordinator's log, whoever looks for the cause needs it.
        traceback.print_exc(file=sys.stderr)
        return PlanReply(request_id, impossible=f"the planner failed: {type(error).__name__}: {error}")


def main() -> int:
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    # A stray print must not get between two messages.
    sys.stdout = sys.stderr
    try:
        while (message := pipes.read_blocking(source, ToPlanner)) is not None:
            envelope, said = FromPlanner(), answer(message)
            to_proto(said, envelope.plan if isinstance(said, PlanReply) else envelope.advice)
            pipes.write(sink, envelope)
            sink.flush()
    except (pipes.PipeError, BrokenPipeError) as error:
        print(f"planner: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
