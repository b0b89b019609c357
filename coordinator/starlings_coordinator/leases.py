"""The samples' bytes on their way out: the core names samples, the shell reads them from the memory map."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from starlings_job.records import DatasetMeta, pack_tokens
from starlings_protos.messages import Lease, LeaseGrant, LeaseKind

# A text sample begins with this much of a held-out sample.
PROMPT_TOKENS = 32


class Records(Protocol):
    """What is needed of `starlings_job.records.RecordStore`."""

    @property
    def meta(self) -> DatasetMeta: ...

    def read(self, ids: Sequence[int]) -> bytes: ...

    def read_held_out(self, ids: Sequence[int]) -> bytes: ...

    def held_out_tokens(self, sample: int, count: int) -> tuple[int, ...]: ...


def generation_context(samples: Sequence[int], records: Records) -> tuple[int, ...]:
    """The tokens that a GENERATE lease continues: prompt and what was generated, at most the model's context.

    Args:
        samples: the held-out sample whose beginning is the prompt, then the generated tokens.
    """
    prompt = records.held_out_tokens(samples[0], PROMPT_TOKENS)
    return (*prompt, *samples[1:])[-records.meta.context_tokens :]


def filled_lease(lease: Lease, records: Records) -> Lease:
    """The lease with its records.

    Raises:
        ValueError: a sample that does not exist (a defect of the core).
    """
    match lease.key.kind:
        case LeaseKind.TRAIN:
            data = records.read(lease.samples)
        case LeaseKind.EVALUATE | LeaseKind.EVALUATE_AVERAGE:
            data = records.read_held_out(lease.samples)
        case LeaseKind.GENERATE:
            data = pack_tokens(generation_context(lease.samples, records), records.meta.token_bytes)
        case _:
            raise ValueError(f"a lease of kind {lease.key.kind!r}")
    return replace(lease, records=data)


def filled_grant(grant: LeaseGrant, records: Records) -> LeaseGrant:
    return LeaseGrant(tuple(filled_lease(lease, records) for lease in grant.leases))
