"""Which keys of `[exchange]` mean something to which preset, and what each is when it is left out. Pure.

A key that a preset does not heed is refused in a job file: it would change nothing, and its author believes it does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlings_job.exchange_rules import Preset, rules_for

# What replicas that do not meet on the way are called.
NONE = "none"
_TWO_SIDED: tuple[Preset, ...] = ("pairs", "noloco", "palsgd")
# All replicas of a stage average displacements in a round with quorum and deadline.
GROUPS: tuple[Preset, ...] = ("diloco", "sparseloco")
# Presets that go by slots: exchanges of a stage's replicas follow a clock.
_ROUNDS: tuple[Preset, ...] = (*_TWO_SIDED, *GROUPS)
BY_SLOTS: tuple[Preset, ...] = (*_ROUNDS, "gossip")

# Beside `codec` and `force`, which say themselves what they are for.
HEEDED_BY: Mapping[str, tuple[Preset, ...]] = {
    "every": _ROUNDS,
    "swaps": ("pairs", "palsgd"),
    "fragments": BY_SLOTS,
    "outer_rate": _ROUNDS,
    "outer_momentum": (*_TWO_SIDED, "diloco"),
    "momentum_codec": ("pairs", "palsgd"),
    "warmup_fraction": _ROUNDS,
    "warmup_every": _ROUNDS,
    "warmup_swaps": ("pairs", "palsgd"),
    "seed": _TWO_SIDED,
    "gamma": ("noloco",),
    "pull_probability": ("palsgd",),
    "pull": ("palsgd",),
    "robust": GROUPS,
    "merge_alpha": GROUPS,
    "quasi_global": ("gossip",),
}


def left_out(preset: Preset, every: object = None) -> dict[str, Any]:
    """The preset's own numbers, also those that it cannot have otherwise.

    Args:
        every: what is written of that key, if anything: exchanges of the warm-up are never rarer.
    """
    rules = rules_for(preset)
    found = {
        "codec": rules.codec,
        "every": rules.main.inner_steps,
        "swaps": rules.swaps,
        "fragments": rules.fragments,
        "outer_rate": rules.main.outer_rate,
        "outer_momentum": rules.main.outer_momentum,
        "momentum_codec": rules.momentum_codec or NONE,
        "warmup_fraction": rules.warmup_fraction,
        "warmup_swaps": rules.warmup_swaps or 0,
        "gamma": rules.gamma,
        "pull_probability": rules.pull_probability,
        "pull": rules.pull,
        "robust": rules.robust,
        "merge_alpha": rules.merge_alpha,
    }
    if rules.warmup is not None:
        most = every if type(every) is int and every > 0 else rules.main.inner_steps
        found["warmup_every"] = min(rules.warmup.inner_steps, most)
    return found


def misplaced(preset: str, given: Mapping[str, object], defaults: Mapping[str, object]) -> str:
    """What is wrong with keys that would change nothing; "" when nothing is.

    Args:
        defaults: what they are when they are left out.
    """
    for key, owners in HEEDED_BY.items():
        if preset in owners or given[key] == defaults[key]:
            continue
        whose = " or ".join(f'"{owner}"' for owner in owners)
        return (
            f'{key} = {given[key]!r} is for preset = {whose} (with schedule = "async"), and means nothing to '
            f'"{preset}": remove it'
        )
    return ""
