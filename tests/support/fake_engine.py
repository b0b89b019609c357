"""Stands in for an engine: speaks its pipe without torch. FAKE_ENGINE says what goes wrong.

    ""            starts, answers Welcome with a ProbeReport, ends on Finish and Drain as a real one does
    "crash"       is killed by SIGKILL as soon as it is welcomed
    "no_device"   fails before it is ready, with exit code 13
    "hang"        says nothing any more after it was welcomed
    "stubborn"    ignores Drain

Every message that it gets is noted, one line each, in FAKE_ENGINE_LOG.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys

from starlings_protos import control_pb2, pipes, process_pb2
from starlings_worker.platform import die_with_parent


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(int(sys.argv[1]))
    incoming, outgoing = pipes.claim_stdio()
    mode = os.environ.get("FAKE_ENGINE", "")

    def send(message: process_pb2.FromEngine) -> None:
        pipes.write(outgoing, message)
        outgoing.flush()

    def note(text: str) -> None:
        with open(os.environ["FAKE_ENGINE_LOG"], "a") as log:
            log.write(f"{os.getpid()} {text}\n")

    worker_id = ""
    while (message := pipes.read_blocking(incoming, process_pb2.ToEngine)) is not None:
        kind = message.WhichOneof("body")
        if kind == "control":
            kind = message.control.WhichOneof("body")
        elif kind == "link":
            kind = f"link {message.link.up}"
        note(str(kind))
        match kind:
            case "start" if mode == "no_device":
                failed = process_pb2.EngineFailed(
                    exit_code=13, message="torch cannot use the GPU: update the driver"
                )
                send(process_pb2.FromEngine(failed=failed))
                return 13
            case "start":
                worker_id = message.start.worker_id
                started = process_pb2.EngineStarted(
                    addresses=["127.0.0.1:9"], numeric_class="cpu/fake", device="a fake"
                )
                send(process_pb2.FromEngine(started=started))
            case "welcome" if mode == "crash":
                os.kill(os.getpid(), signal.SIGKILL)
            case "welcome" if mode == "hang":
                faulthandler.enable()
                while True:
                    signal.pause()
            case "welcome":
                report = control_pb2.ProbeReport(addresses=["127.0.0.1:9"], memory_bytes=1 << 30)
                report.forward_seconds["layer"] = 0.001
                send(process_pb2.FromEngine(control=control_pb2.ToCoordinator(probe_report=report)))
                beat = control_pb2.ToCoordinator(
                    heartbeat=control_pb2.Heartbeat(progress=message.control.ByteSize())
                )
                send(process_pb2.FromEngine(control=beat))
                counters = control_pb2.Telemetry(
                    worker_id=worker_id, incarnation=message.control.welcome.incarnation
                )
                counters.samples.add(wall_time_s=1e9, forward_bytes=7)
                send(process_pb2.FromEngine(control=control_pb2.ToCoordinator(telemetry=counters)))
            case "drain" if mode != "stubborn":
                leaving = control_pb2.Leaving(reason=message.drain.reason, within_s=message.drain.within_s)
                send(process_pb2.FromEngine(control=control_pb2.ToCoordinator(leaving=leaving)))
            case "finish":
                finished = process_pb2.EngineFinished(reason=message.control.finish.reason)
                send(process_pb2.FromEngine(finished=finished))
                return 0
            case _:
                pass
    return 1


if __name__ == "__main__":
    sys.exit(main())
