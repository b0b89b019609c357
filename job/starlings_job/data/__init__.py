"""Data: sources of text, tokenizers, the held-out split, record files. `batch` alone imports torch."""

from starlings_job.records import (
    IMAGES,
    TOKENS,
    DatasetMeta,
    RecordStore,
    pack_tokens,
    unpack_tokens,
)

__all__ = ["IMAGES", "TOKENS", "DatasetMeta", "RecordStore", "pack_tokens", "unpack_tokens"]
