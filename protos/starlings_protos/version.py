"""Which protocol this code speaks. Both sides send their range; the highest common number is used."""

from __future__ import annotations

from importlib import metadata

# Raise MAX with every change of the wire that an older side would misread, MIN when the older way is dropped.
PROTOCOL_MIN = 1
PROTOCOL_MAX = 1


def negotiate(protocol_min: int, protocol_max: int) -> int | None:
    """The protocol to speak with a side that offers this range; None when there is none in common."""
    highest = min(protocol_max, PROTOCOL_MAX)
    return highest if highest >= max(protocol_min, PROTOCOL_MIN) else None


def no_common_protocol(protocol_min: int, protocol_max: int) -> str:
    """The sentence for a worker whose range has nothing in common with this coordinator's."""
    older = "This worker is too old" if protocol_max < PROTOCOL_MIN else "This coordinator is too old"
    fix = (
        "upgrade the worker: uv tool upgrade starlings"
        if protocol_max < PROTOCOL_MIN
        else "ask the owner to upgrade the coordinator, or install the version that the owner runs"
    )
    return (
        f"{older}: the worker speaks protocol {protocol_min} to {protocol_max}, the coordinator (version "
        f"{package_version()}) {PROTOCOL_MIN} to {PROTOCOL_MAX}; {fix}."
    )


def package_version() -> str:
    try:
        return metadata.version("starlings")
    except metadata.PackageNotFoundError:
        return "0+unknown"
