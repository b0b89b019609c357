"""The engine process, less patient with peers: `python -m support.hasty_engine PARENT_PID`."""

from __future__ import annotations

import os
import sys
from functools import partial

from starlings_protos.pace import Pace
from starlings_worker import engine, engine_process

PACE = Pace(between_s=2.0, grace_s=3.0, least_bytes_per_s=float(64 << 10))
UNREAD_S = 2.0

if __name__ == "__main__":
    patient = engine_process.DataService
    engine_process.DataService = partial(patient, pace=PACE, unread_s=UNREAD_S)  # type: ignore[misc, assignment]
    status = engine.main()
    sys.stderr.flush()
    os._exit(status)
