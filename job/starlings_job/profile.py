"""What each block of a model costs: parameters, arithmetic, memory, traffic. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

FORMAT = 1
JSON_LIMIT_BYTES = 16 << 20
BLOCKS_LIMIT = 8192


class ProfileError(ValueError):
    """Bytes that are no profile of this version."""


@dataclass(frozen=True, slots=True)
class BlockProfile:
    """One block. "Per sample" means one sequence of the job's length, or one image."""

    name: str
    # Blocks of one kind cost alike; probes measure one of each.
    kind: str
    parameter_count: int
    # Of these, how many are trained: frozen ones have no gradient and no optimizer state.
    trainable_count: int
    # Multiplications and additions of one forward; a backward costs about twice that.
    flops_per_sample: int
    # Bytes that autograd keeps for the backward, without the parameters and the block's input.
    activation_bytes_per_sample: int
    # Bytes of the block's float32 output: what crosses the wire when the cut is behind this block.
    boundary_bytes_per_sample: int
    # Bytes of the largest parameter in float32.
    largest_tensor_bytes: int
    # Of the trained parameters, those in tensors of two or more dimensions, and the rows and columns of these added up:
    # what codecs that send factors save. 0 in profiles that were made before there were any.
    matrix_count: int = 0
    matrix_sides: int = 0


@dataclass(frozen=True, slots=True)
class Profile:
    """All blocks in order, and the shape of the work."""

    blocks: tuple[BlockProfile, ...]
    family: str
    sequence_length: int
    # Width of the last block's output: tokens of the vocabulary, or classes.
    vocabulary_size: int
    # Bytes of one lease record.
    record_bytes: int
    # Parameters that the first and the last block share; 0 when untied. Each block counts its own copy.
    tied_count: int = 0

    @property
    def block_names(self) -> tuple[str, ...]:
        return tuple(block.name for block in self.blocks)

    @property
    def kinds(self) -> dict[str, int]:
        """Each kind and the index of the first block of it: what a probe measures."""
        first: dict[str, int] = {}
        for index, block in enumerate(self.blocks):
            first.setdefault(block.kind, index)
        return first

    @property
    def parameter_count(self) -> int:
        """Parameters of the whole model; a shared one counts once."""
        return sum(block.parameter_count for block in self.blocks) - self.tied_count

    def stage_parameters(self, first_block: int, last_block: int) -> int:
        """Parameters that a holder of blocks first..last keeps."""
        return sum(block.parameter_count for block in self.blocks[first_block : last_block + 1])

    def tensor_limit_bytes(self, microbatch: int) -> int:
        """No tensor on the job's data plane is larger: boundaries, records, a whole model's state as one vector.

        1 KiB of grace holds a codec's own header.
        """
        boundary = max(block.boundary_bytes_per_sample for block in self.blocks) * microbatch
        vector = 12 * sum(block.parameter_count for block in self.blocks)
        return max(boundary, vector, self.record_bytes * microbatch) + 1024

    def block_limit_bytes(self) -> int:
        """No block's state is larger: parameters and two optimizer tensors in float32."""
        return max(12 * block.parameter_count for block in self.blocks)

    def to_json(self) -> bytes:
        record = {"format": FORMAT, **asdict(self)}
        return json.dumps(record, sort_keys=True, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Profile:
        """The inverse of `to_json`.

        Raises:
            ProfileError: malformed, of another format, or out of range.
        """
        if len(data) > JSON_LIMIT_BYTES:
            raise ProfileError(f"a profile of {len(data)} bytes is above the limit of {JSON_LIMIT_BYTES}")
        try:
            record = json.loads(data)
        except (ValueError, RecursionError):
            raise ProfileError("the profile is no JSON") from None
        if not isinstance(record, dict) or record.get("format") != FORMAT:
            raise ProfileError(f"the profile is not of format {FORMAT}")
        blocks = record.get("blocks")
        if not isinstance(blocks, list) or not 1 <= len(blocks) <= BLOCKS_LIMIT:
            raise ProfileError("the profile has no list of blocks")
        values = _checked(cls, {k: v for k, v in record.items() if k != "blocks"}, skip=("blocks",))
        return cls(blocks=tuple(BlockProfile(**_checked(BlockProfile, block)) for block in blocks), **values)


def _checked(cls: type, record: object, skip: tuple[str, ...] = ()) -> dict[str, Any]:
    if not isinstance(record, Mapping):
        raise ProfileError(f"a {cls.__name__} must be an object")
    values = {}
    for f in fields(cls):
        if f.name in skip:
            continue
        value = record.get(f.name, f.default)
        if f.type == "int":
            fine = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63
        else:
            fine = isinstance(value, str) and len(value) <= 256
        if not fine:
            raise ProfileError(f"{cls.__name__}.{f.name} is out of range: {str(value)[:60]!r}")
        values[f.name] = value
    return values
