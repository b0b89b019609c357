"""A cut that the owner fixes: `[pipeline] stages`. Pure.

A whole number of stages leaves it to the planner where to cut, by what workers measure. A list, the blocks of each
stage, is the same cut for whatever workers: what an experiment wants whose runs are compared.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlings_protos.messages import Stage

Stages = int | tuple[int, ...]


def parse_stages(value: object) -> Stages:
    """What stands in the job file: a number of stages, 0 for the planner's choice, or the blocks of each stage.

    Raises:
        ValueError: neither.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if isinstance(value, list | tuple) and value:
        blocks = [b for b in value if isinstance(b, int) and not isinstance(b, bool) and b >= 1]
        if len(blocks) == len(value):
            return tuple(blocks)
    raise ValueError(
        f"{value!r} is neither a number of stages, such as 3 (0: the planner decides), nor the blocks of each stage, "
        "such as [3, 3, 2]"
    )


def stage_count(stages: Stages) -> int:
    """How many stages are wanted; 0: as many as the planner finds best."""
    return stages if isinstance(stages, int) else len(stages)


def fixed_cut(stages: Stages) -> tuple[Stage, ...]:
    """The stages whose blocks were listed; () when the planner cuts."""
    cut, first = [], 0
    for blocks in () if isinstance(stages, int) else stages:
        cut.append(Stage(first, first + blocks - 1))
        first += blocks
    return tuple(cut)


def cut_problem(stages: Stages, blocks: Sequence[str]) -> str:
    """Why a model of these blocks cannot be cut so, and what to write instead; "" when it can."""
    count = stage_count(stages)
    names = f"{len(blocks)} blocks ({blocks[0]} to {blocks[-1]})"
    if count > len(blocks):
        return f"[pipeline] stages: the model has {names}, and a block is never cut: {len(blocks)} stages at most"
    if not isinstance(stages, int) and sum(stages) != len(blocks):
        return (
            f"[pipeline] stages: {list(stages)} are {sum(stages)} blocks, and the model has {names}: "
            f"write numbers that add up to {len(blocks)}"
        )
    return ""
