"""Why a job does not train yet: verdicts that carry their reason, and say it in words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never


@dataclass(frozen=True, slots=True)
class ForWorkers:
    have: int
    need: int
    measured: int


@dataclass(frozen=True, slots=True)
class ForSettling:
    """Enough are here; others may be about to join."""

    seconds: float


@dataclass(frozen=True, slots=True)
class ForProbes:
    """Enough are here, and others are still being measured."""

    count: int


@dataclass(frozen=True, slots=True)
class ForKeeper:
    """Nobody can load weights before the keeper serves them."""

    version: int


@dataclass(frozen=True, slots=True)
class ForPlanner:
    pass


@dataclass(frozen=True, slots=True)
class ForRoom:
    """The planner's own words, such as "needs 3.1 GB more for stages 4-5"."""

    reason: str


@dataclass(frozen=True, slots=True)
class ForRetry:
    reason: str
    seconds: float


Reason = ForWorkers | ForSettling | ForProbes | ForKeeper | ForPlanner | ForRoom | ForRetry


@dataclass(frozen=True, slots=True)
class Waiting:
    reason: Reason
    # What led back here, e.g. a lost stage; "" at first.
    because: str = ""

    def words(self) -> str:
        text = _words(self.reason)
        return f"{text} ({self.because})" if self.because else text


def _words(reason: Reason) -> str:
    match reason:
        case ForWorkers():
            missing = reason.need - reason.measured
            text = f"waiting for {missing} more worker{'s' if missing != 1 else ''}"
            if reason.have > reason.measured:
                return f"{text}; {reason.have - reason.measured} being measured"
            return f"{text} to join"
        case ForSettling():
            return f"waiting {reason.seconds:.0f} s for others to join"
        case ForProbes():
            return f"waiting for {reason.count} more worker{'s' * (reason.count != 1)} to be measured"
        case ForKeeper():
            return f"waiting for the keeper to serve version {reason.version} of the weights"
        case ForPlanner():
            return "waiting for the planner"
        case ForRoom():
            return f"waiting for a worker: {reason.reason}"
        case ForRetry():
            return f"waiting {reason.seconds:.0f} s to try again: {reason.reason}"
        case _:
            assert_never(reason)
