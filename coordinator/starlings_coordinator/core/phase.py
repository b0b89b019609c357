"""The phases of a job; see core.py for how they follow each other."""

from __future__ import annotations

import enum


class Phase(enum.Enum):
    GATHERING = "gathering"
    PLANNING = "planning"
    LOADING = "loading"
    TRAINING = "training"
    FINISHING = "finishing"
    DONE = "done"
    FAILED = "failed"
