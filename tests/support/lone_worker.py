"""A supervisor in a process of its own, with an engine that only pretends: `python -m support.lone_worker DIR`."""

from __future__ import annotations

import sys
from pathlib import Path

import starlings_worker.engine_child
from starlings_worker.options import WorkerOptions
from starlings_worker.supervisor import run_worker


def main() -> int:
    starlings_worker.engine_child.ENGINE_MODULE = "support.fake_engine"
    options = WorkerOptions(directory=Path(sys.argv[1]), devices="cpu", drain_s=5.0, on_event=print)
    return run_worker(options)


if __name__ == "__main__":
    sys.exit(main())
