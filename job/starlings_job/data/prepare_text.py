"""Text to record files: find, split, tokenise, count."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from starlings_job.data.sources import (
    Document,
    SourceReader,
    Split,
    find_documents,
    has_prompts,
    limited,
    split_documents,
)
from starlings_job.data.tokenizer import BYTES, Tokenizer
from starlings_job.data.writer import HeldOutWriter, TokenWriter
from starlings_job.errors import NoDataMatched
from starlings_job.records import TOKENS, DatasetMeta, token_bytes_for
from starlings_job.sections import DataSection
from starlings_job.source_ranges import SourceRange, source_names, write_sources

# Bytes of text per token that a subword tokenizer is taken to need when the held-out split is chosen.
_BYTES_PER_TOKEN = 4
# So many times more text is held out than is evaluated: records from many documents say more about the text.
_HELD_OUT_ABUNDANCE = 8


def write_text(
    directory: Path,
    data: DataSection,
    base: Path,
    tokenizer: Tokenizer,
    *,
    vocabulary_size: int,
    context_tokens: int,
    seed: int,
    progress: Callable[[float, str], None] | None = None,
) -> DatasetMeta:
    """Writes `tokens.bin`, `held_out.bin` (and masks) and `sources.json` to `directory`.

    Args:
        base: what relative paths of the sources are relative to.
        vocabulary_size: of the model; at least the tokenizer's.
        progress: told the fraction of source bytes read, and what is being read.

    Raises:
        NoDataMatched: no text, or too little for one training and one held-out sample.
        JobFileError: a malformed line of JSON.
        OSError: the disk is full.
    """
    documents = find_documents(data.source, data.format, base)
    if data.limit is not None:
        documents = limited(documents, data.limit, seed)
    length = data.sequence_length
    per_token = 1 if tokenizer.kind == BYTES else _BYTES_PER_TOKEN
    wanted = data.held_out * (length + 1) * _HELD_OUT_ABUNDANCE * per_token
    split = split_documents(documents, wanted, seed)
    masked = data.format == "jsonl" and has_prompts(documents)
    token_bytes = token_bytes_for(vocabulary_size)
    train = TokenWriter(directory, token_bytes=token_bytes, sequence_length=length, masked=masked)
    held = HeldOutWriter(
        directory,
        token_bytes=token_bytes,
        sequence_length=length,
        masked=masked,
        records=data.held_out,
    )
    reader = SourceReader(data.format)
    total, next_report = sum(d.byte_count for d in documents), 0
    names = source_names([d.file_name for d in documents])
    source_of = {d.name: name for d, name in zip(documents, names, strict=True)}
    marked: list[str] = []
    end = tokenizer.end_of_line if data.format == "jsonl" else tokenizer.end_of_file
    with contextlib.ExitStack() as stack:
        for opened in (reader, train):
            stack.callback(opened.close)
        for document, held_out in _parts(documents, split):
            to = held if held_out else train
            if not held_out and marked[-1:] != [source_of[document.name]]:
                train.mark()
                marked.append(source_of[document.name])
            for piece in reader.pieces(document):
                to.add(tokenizer.encode(piece.text), piece.counts)
                to.add(end if piece.ends else (), piece.counts)
                if progress is not None and reader.byte_count >= next_report:
                    progress(reader.byte_count / total, document.name)
                    next_report = reader.byte_count + total // 200
    held.write()
    write_sources(directory, _ranges(marked, [*train.marks, train.records]))
    if not train.records or not held.records:
        needed = (length + 1) * per_token
        raise NoDataMatched(
            f"[data] source {', '.join(data.source)} has only {reader.byte_count} bytes: too little for one training "
            f"and one held-out sample of {length} tokens (about {11 * needed} bytes); "
            "give it more text or a smaller sequence_length"
        )
    byte_level = tokenizer.kind == BYTES
    return DatasetMeta(
        kind=TOKENS,
        population=train.records,
        held_out=held.records,
        sequence_length=length,
        vocabulary_size=vocabulary_size,
        token_bytes=token_bytes,
        masked=masked,
        stride_tokens=length + 1 if masked else length,
        held_out_stride_tokens=length + 1,
        context_tokens=context_tokens,
        tokenizer=tokenizer.kind,
        source_files=len(documents),
        source_bytes=reader.byte_count,
        source_sha256=reader.sha256,
        unigram_entropy=held.entropies.unigram if byte_level else None,
        bigram_entropy=held.entropies.bigram if byte_level else None,
    )


def _ranges(names: Sequence[str], bounds: Sequence[int]) -> list[SourceRange]:
    """Of sources in order; one that is too small to begin a record has none."""
    last = bounds[-1]
    ranges = [
        SourceRange(name, first, min(end, last) - first)
        for name, (first, end) in zip(names, pairwise(bounds), strict=True)
    ]
    return [found for found in ranges if found.samples > 0]


def _parts(documents: Sequence[Document], split: Split) -> Iterator[tuple[Document, bool]]:
    """Documents in order with whether they are held out; the one that is cut comes in two parts."""
    for index, document in enumerate(documents):
        if index != split.tail_of:
            yield document, index in split.held_out
            continue
        front = document.byte_count - split.tail_bytes
        yield replace(document, byte_count=front), False
        yield replace(document, offset=document.offset + front, byte_count=split.tail_bytes), True
