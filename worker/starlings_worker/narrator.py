"""What a worker's messages mean for the person at the machine: one event with a sentence each."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from starlings_protos import control_pb2, process_pb2
from starlings_worker.options import WorkerEvent


class Narrator:
    """Turns the traffic of one worker into `WorkerEvent`s. Never raises because of what a message holds."""

    def __init__(self, listener: Callable[[WorkerEvent], None] | None) -> None:
        self._listener = listener
        self.worker_id = ""

    def tell(self, kind: str, text: str, data: Mapping[str, object] | None = None) -> None:
        if self._listener is not None:
            self._listener(WorkerEvent(kind, text, self.worker_id, data or {}))

    def engine_started(self, started: process_pb2.EngineStarted) -> None:
        self.tell(
            "engine_started",
            f"The engine is ready on {started.device} ({started.numeric_class}).",
            {"addresses": list(started.addresses), "numeric_class": started.numeric_class},
        )

    def ordered(self, message: control_pb2.ToWorker) -> None:
        """A message of the coordinator."""
        match message.WhichOneof("body"):
            case "assignment":
                plan = message.assignment
                first, last = plan.span.first_stage, plan.span.last_stage
                stages = f"stage {first}" if first == last else f"stages {first}-{last}"
                self.tell(
                    "plan",
                    f"Holds {stages} of {len(plan.stages)} (plan {plan.plan_version}).",
                    {
                        "plan_version": plan.plan_version,
                        "first_stage": first,
                        "last_stage": last,
                        "stages": len(plan.stages),
                        "version": plan.version,
                        "peers": [peer.worker_id for peer in plan.peers],
                    },
                )
            case "standby":
                self.tell("standby", f"Waits: {message.standby.reason}", {"reason": message.standby.reason})
            case "job_paused":
                self.paused(message.job_paused.paused, message.job_paused.reason)
            case "step_committed":
                step = message.step_committed
                self.tell(
                    "step",
                    f"Step {step.step} is done (gradient norm {step.gradient_norm:.3g}).",
                    {
                        "step": step.step,
                        "learning_rate": step.learning_rate,
                        "gradient_norm": step.gradient_norm,
                    },
                )
            case "step_restarted":
                again = message.step_restarted
                self.tell(
                    "step_restarted",
                    f"Step {again.step} begins anew: {again.reason}",
                    {"step": again.step, "attempt": again.attempt, "reason": again.reason},
                )
            case _:
                pass

    def welcomed(self, welcome: control_pb2.Welcome, *, first: bool, again: bool) -> None:
        """`first`: of this life; `again`: after a while without the coordinator."""
        if first or again:
            text = "The coordinator has welcomed this worker." if first else "The coordinator is back."
            self.tell("connected", text, {"incarnation": welcome.incarnation})
        if welcome.paused:
            self.paused(True, welcome.pause_reason)

    def paused(self, paused: bool, reason: str) -> None:
        """The job is, or goes on."""
        text = f"The job's owner has paused it: {reason}" if paused else "The job goes on."
        self.tell("paused" if paused else "resumed", text, {"reason": reason})

    def reported(self, message: control_pb2.ToCoordinator) -> None:
        """A message of the engine for the coordinator."""
        match message.WhichOneof("body"):
            case "probe_report":
                probe = message.probe_report
                passes = ", ".join(
                    f"{kind} {1e3 * (seconds + probe.backward_seconds.get(kind, 0.0)):.1f} ms"
                    for kind, seconds in sorted(probe.forward_seconds.items())
                )
                self.tell(
                    "probed",
                    f"Measured: {passes} per microbatch; {_size(probe.memory_bytes)} of memory.",
                    {
                        "forward_seconds": dict(probe.forward_seconds),
                        "backward_seconds": dict(probe.backward_seconds),
                        "memory_bytes": probe.memory_bytes,
                    },
                )
            case "ready":
                self.tell(
                    "ready", f"Loaded version {message.ready.version}.", {"version": message.ready.version}
                )
            case "peer_unreachable":
                lost = message.peer_unreachable
                self.tell(
                    "peer_unreachable",
                    f"Cannot reach {lost.worker_id}: {lost.reason}",
                    {"peer": lost.worker_id, "reason": lost.reason},
                )
            case _:
                pass


def _size(byte_count: int) -> str:
    """With a unit that leaves at least one digit before the point."""
    return f"{byte_count / 1e9:.1f} GB" if byte_count >= 1e9 else f"{byte_count / 1e6:.1f} MB"


def last_line(text: str) -> str:
    """Of a traceback the line that says what happened."""
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1].strip() if lines else "no reason given"
