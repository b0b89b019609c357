"""What each optimizer keeps of a parameter beside its value, and which settings are whose. Torch-free and pure.

Optimizer state goes by block and parameter, as `KIND:NAME` of one of the kinds below; so a checkpoint depends neither
on the cut nor on how a worker lays it out.

| optimizer   | keeps of a parameter |
| ----------- | --- |
| `sgd`       | `momentum`, if there is any |
| `adamw`     | `exp_avg`, `exp_avg_sq` |
| `nadam`     | `exp_avg`, `exp_avg_sq` |
| `muon`      | `momentum` of a hidden matrix, `exp_avg` and `exp_avg_sq` of everything else |
| `adamw8bit` | codes and scales of both moments; of parameters below 4096 elements what `adamw` keeps |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal, assert_never

OptimizerName = Literal["adamw", "nadam", "sgd", "muon", "adamw8bit"]

# Elements that share a scale: Dettmers et al. 2022, section 2.1, have 2048; smaller blocks cost 3 % of the memory that
# they save, and an outlier spoils fewer neighbours.
QUANTISED_BLOCK_ELEMENTS = 256
# Smaller parameters are norms and biases: they are sensitive and cost nothing (as in the paper's section 2.3).
QUANTISED_LEAST_ELEMENTS = 4096

CODES, SCALES = "_codes", "_scales"
_MOMENTS = ("exp_avg", "exp_avg_sq")
_VALUES = (*_MOMENTS, "momentum")


@dataclass(frozen=True, slots=True)
class Kept:
    """One tensor of a parameter's optimizer state. `data_type` is a name of safetensors: F32 or U8."""

    kind: str
    data_type: str
    shape: tuple[int, ...]


def kept_tensor(kind: str, parameter_shape: tuple[int, ...]) -> Kept | None:
    """What a kind's tensor looks like for a parameter of that shape; None for no kind of state."""
    if kind in _VALUES:
        return Kept(kind, "F32", parameter_shape)
    if kind.endswith(CODES) and kind.removesuffix(CODES) in _MOMENTS:
        return Kept(kind, "U8", parameter_shape)
    if kind.endswith(SCALES) and kind.removesuffix(SCALES) in _MOMENTS:
        return Kept(kind, "F32", (-(-prod(parameter_shape) // QUANTISED_BLOCK_ELEMENTS),))
    return None


def takes_muon(shape: tuple[int, ...], *, hidden: bool) -> bool:
    """Whether Muon orthogonalises a parameter: hidden matrices only (Jordan et al. 2024, "Empirical considerations").

    Embeddings and the head are tables of vectors, not maps between hidden spaces; `hidden` is false for whatever lies
    in a model's first or last block. Convolutions (4-D) and stacked experts (3-D) are left to AdamW too.
    """
    return hidden and len(shape) == 2


def kinds_kept(
    optimizer: OptimizerName, momentum: float, shape: tuple[int, ...], *, hidden: bool
) -> tuple[str, ...]:
    """The kinds of state that an optimizer keeps of a parameter, in the order in which they travel."""
    match optimizer:
        case "adamw" | "nadam":
            return _MOMENTS
        case "sgd":
            return ("momentum",) if momentum else ()
        case "muon":
            return ("momentum",) if takes_muon(shape, hidden=hidden) else _MOMENTS
        case "adamw8bit":
            if prod(shape) < QUANTISED_LEAST_ELEMENTS:
                return _MOMENTS
            return tuple(moment + part for moment in _MOMENTS for part in (CODES, SCALES))
        case _:
            assert_never(optimizer)


def state_bytes_per_parameter(optimizer: OptimizerName, momentum: float) -> float:
    """Bytes of optimizer state per parameter of a hidden matrix, where nearly all parameters of a large model are.

    What Muon leaves to AdamW takes 4 bytes more. `memory` counts 4 bytes for temporaries that AdamW, which goes through
    a vector in small pieces, does not need.
    """
    match optimizer:
        case "adamw" | "nadam":
            return 8
        case "sgd":
            return 4 if momentum else 0
        case "muon":
            return 4
        case "adamw8bit":
            return 2 * (1 + 4 / QUANTISED_BLOCK_ELEMENTS)
        case _:
            assert_never(optimizer)


_ADAM: tuple[OptimizerName, ...] = ("adamw", "adamw8bit", "nadam", "muon")
# Settings that mean nothing to some optimizers, and those that heed them.
SETTINGS: Mapping[str, tuple[OptimizerName, ...]] = {
    "beta1": _ADAM,
    "beta2": _ADAM,
    "epsilon": _ADAM,
    "weight_decay": _ADAM,
    "momentum": ("sgd", "muon"),
    "momentum_decay": ("nadam",),
    "muon_scale": ("muon",),
    "muon_iterations": ("muon",),
    "muon_adamw_lr": ("muon",),
}
MUON_MOMENTUM = 0.95


def misplaced(optimizer: OptimizerName, given: Mapping[str, object], defaults: Mapping[str, object]) -> str:
    """What is wrong with settings that would change nothing; "" when nothing is.

    Zero and the default are let pass: they ask for nothing.
    """
    for key, owners in SETTINGS.items():
        if optimizer in owners or key not in given or given[key] in (0, defaults[key]):
            continue
        names = " and ".join(f'"{owner}"' for owner in owners)
        return (
            f'{key} = {given[key]!r} is for optimizer {names}, and means nothing to "{optimizer}": remove it'
        )
    return ""
