"""The engine process: `python -m starlings_worker.engine PARENT_PID`, started by the supervisor.

Speaks `ToEngine` and `FromEngine` over standard input and output (starlings_protos.pipes). The first message
says on which device, and with how many threads; torch is imported only then, because it reads those settings
once.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys

from starlings_protos import pipes, process_pb2
from starlings_worker.platform import die_with_parent


def prepare_environment(start: process_pb2.StartEngine) -> None:
    """What must be set before torch and transformers are imported."""
    threads = str(start.threads or _default_threads())
    os.environ.update(
        # A waiting thread of OpenMP must not spin: on a shared machine that was seen to cost 29x.
        OMP_WAIT_POLICY="PASSIVE",
        KMP_BLOCKTIME="0",
        OMP_NUM_THREADS=threads,
        MKL_NUM_THREADS=threads,
        # Large tensors in huge pages, where the system has any: touching fresh memory costs a third then. An exchange
        # touches more memory than it computes.
        THP_MEM_ALLOC_ENABLE="1",
        # Nothing that trains may reach the hub, whatever a configuration says.
        HF_HUB_OFFLINE="1",
        TRANSFORMERS_OFFLINE="1",
        HF_HUB_DISABLE_TELEMETRY="1",
        TOKENIZERS_PARALLELISM="false",
        TRANSFORMERS_VERBOSITY="error",
    )


def _default_threads() -> int:
    if hasattr(os, "sched_getaffinity"):
        return max(1, len(os.sched_getaffinity(0)))
    return max(1, os.cpu_count() or 1)


def main() -> int:
    # Ctrl-C is for the supervisor, which ends engines in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A crash, or the supervisor's SIGABRT to an engine that hangs, leaves the stacks in the log.
    faulthandler.enable()
    if len(sys.argv) > 1:
        die_with_parent(int(sys.argv[1]))
    incoming, outgoing = pipes.claim_stdio()
    first = pipes.read_blocking(incoming, process_pb2.ToEngine)
    if first is None:
        return 0
    if first.WhichOneof("body") != "start":
        print("the supervisor's first message is not StartEngine", file=sys.stderr)
        return 1
    prepare_environment(first.start)
    # Only now: these import torch.
    from starlings_worker.engine_process import run_engine

    return run_engine(first.start, incoming, outgoing)


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    # Everything is closed by now; taking torch's thousands of modules apart would cost seconds of processor time.
    os._exit(status)
