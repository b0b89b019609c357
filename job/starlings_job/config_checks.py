"""Checks of single values in a model's configuration: each gives None, or what the value must be. Torch-free."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Check = Callable[[object], str | None]

FULL, SLIDING = "full_attention", "sliding_attention"
LAYERS_LIMIT = 4096


def whole(low: int, high: int, *, optional: bool = False) -> Check:
    def check(value: object) -> str | None:
        if optional and value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            return f"must be a whole number from {low} to {high}"
        return None

    return check


def real(low: float, high: float, *, optional: bool = False) -> Check:
    def check(value: object) -> str | None:
        if optional and value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            return f"must be a number from {low} to {high}"
        return None

    return check


def flag(value: object) -> str | None:
    return None if isinstance(value, bool) else "must be true or false"


def one_of(*allowed: str) -> Check:
    def check(value: object) -> str | None:
        return None if value in allowed else f"must be one of {', '.join(allowed)}"

    return check


def only(*allowed: object, because: str) -> Check:
    """For keys that a family knows but that change what is computed in a way that is not offered here."""
    said = "null" if allowed[0] is None else str(allowed[0]).lower()

    def check(value: object) -> str | None:
        fine = any(value is item for item in allowed)
        return None if fine else f"must be {said} ({because})"

    return check


def list_of(what: str, fits: Callable[[Any], bool]) -> Check:
    """A list of at most one item per layer; `null` stands for what Hugging Face would put there."""

    def check(value: object) -> str | None:
        if value is None:
            return None
        if not isinstance(value, list) or len(value) > LAYERS_LIMIT or not all(fits(item) for item in value):
            return f"must be null or a list of {what}"
        return None

    return check


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


layer_types = list_of(f"{FULL} and {SLIDING}", lambda item: item in (FULL, SLIDING))
layer_numbers = list_of("layer numbers", lambda item: _is_whole(item) and 0 <= item < LAYERS_LIMIT)
zeros_and_ones = list_of("zeros and ones", lambda item: _is_whole(item) and item in (0, 1))


def token_id(value: object) -> str | None:
    fine = value is None or (isinstance(value, int) and not isinstance(value, bool) and -1 <= value < 2**31)
    return None if fine else "must be a token id or null"


def token_ids(value: object) -> str | None:
    items = value if isinstance(value, list) else [value]
    return (
        None
        if all(token_id(item) is None for item in items)
        else "must be a token id, a list of them, or null"
    )


_ROPE_NUMBERS: dict[str, Check] = {
    "rope_theta": real(1, 1e12),
    "factor": real(1, 1e6),
    "low_freq_factor": real(1e-3, 1e6),
    "high_freq_factor": real(1e-3, 1e6),
    "original_max_position_embeddings": whole(1, 1 << 24),
    "beta_fast": real(0, 1e6),
    "beta_slow": real(0, 1e6),
    "attention_factor": real(0, 1e6),
    "mscale": real(0, 1e6),
    "mscale_all_dim": real(0, 1e6),
    "partial_rotary_factor": real(0.01, 1),
}
# Types whose frequencies change with the length of the input would make stages disagree.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_ROPE_NEEDS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}


def rope(*types: str) -> Check:
    """One table of rotary positions, of one of these types."""

    def check(value: object) -> str | None:
        if value is None:
            return None
        if not isinstance(value, dict):
            return "must be a table or null"
        for key, item in value.items():
            if key in ("rope_type", "type"):
                if item not in types:
                    return f"{key} must be one of {', '.join(types)}"
            elif key not in _ROPE_NUMBERS:
                return f"has no key {key!r}; allowed: rope_type, {', '.join(_ROPE_NUMBERS)}"
            elif item is not None and (wrong := _ROPE_NUMBERS[key](item)):
                return f"{key} {wrong}"
        kind = str(value.get("rope_type", value.get("type", "default")))
        missing = [key for key in _ROPE_NEEDS.get(kind, ()) if value.get(key) is None]
        return f"of type {kind} needs {', '.join(missing)}" if missing else None

    return check


def rope_by_layer_type(value: object) -> str | None:
    """Global and local layers have tables of their own."""
    if value is None:
        return None
    if not isinstance(value, dict) or not set(value) <= {FULL, SLIDING}:
        return f"must be a table of the tables {FULL} and {SLIDING}, or null"
    for key, table in value.items():
        wrong = rope(*ROPE_TYPES)(table)
        if wrong:
            return f"{key} {wrong}"
    return None
