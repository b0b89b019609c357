"""Numbers as people write them in a job file: "0.8M" tokens, "8MB" or "8MiB" of text."""

from __future__ import annotations

import re
from decimal import Decimal

_COUNT = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9, "T": 10**12}
_BYTES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_PATTERN = re.compile(r"\s*([0-9][0-9_]{0,30}(?:\.[0-9]{1,12})?)\s*([A-Za-z]{0,3})\s*")


def parse_count(value: object) -> int:
    """A whole number of things: 800000, "800_000", "0.8M".

    Raises:
        ValueError: not a positive whole number.
    """
    return _parse(value, _COUNT, 'such as 800000 or "0.8M"')


def parse_bytes(value: object) -> int:
    """A number of bytes: 8000000, "8M", "8MB", "8MiB".

    Raises:
        ValueError: not a positive whole number of bytes.
    """
    if isinstance(value, str) and value.strip()[-1:] in ("B", "b"):
        value = value.strip()[:-1]
    return _parse(value, {**_BYTES, **_BINARY}, 'such as 8000000, "8M" or "8MiB"')


def _parse(value: object, units: dict[str, int], example: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"must be a number, {example}")
    if isinstance(value, str):
        match = _PATTERN.fullmatch(value)
        if match is None or match[2].upper() not in units:
            raise ValueError(f"must be a number, {example}")
        number = Decimal(match[1].replace("_", "")) * units[match[2].upper()]
    else:
        number = Decimal(str(value))
    if not number.is_finite() or number != number.to_integral_value() or not 1 <= number < 2**63:
        raise ValueError(f"must be a positive whole number, {example}")
    return int(number)
