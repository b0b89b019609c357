"""Generated tokens as text for people, without torch and without the tokenizers library.

Byte tokens are exact. For a Hugging Face tokenizer the usual decoders (byte-level, metaspace, byte fallback) are read
from `tokenizer.json`; that is enough for a text sample, and never an error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

TOKENIZER_LIMIT_BYTES = 64 << 20
TEXT_LIMIT_CHARACTERS = 4000
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")

Detokenise = Callable[[Sequence[int]], str]


def printable(text: str) -> str:
    """Text from a model, safe for a terminal: line breaks and tabs stay, other control characters do not."""
    kept = "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
    return kept[:TEXT_LIMIT_CHARACTERS]


def bytes_to_text(tokens: Sequence[int]) -> str:
    return printable(bytes(t for t in tokens if 0 <= t < 256).decode("utf-8", "replace"))


def ids_to_text(tokens: Sequence[int]) -> str:
    """When nothing better is known."""
    return " ".join(map(str, tokens))


def byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte (Radford et al. 2019, `bytes_to_unicode` of their code), inverted."""
    printable_bytes = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable_bytes]
    return {chr(b): b for b in printable_bytes} | {chr(256 + i): b for i, b in enumerate(others)}


class VocabularyDecoder:
    """Decodes with the vocabulary of a `tokenizer.json`."""

    def __init__(self, record: object) -> None:
        """Raises ValueError when there is no vocabulary that we understand."""
        self._pieces = _pieces(record)
        self._byte_level = "ByteLevel" in json.dumps(
            {k: record.get(k) for k in ("decoder", "pre_tokenizer")} if isinstance(record, dict) else {}
        )
        self._alphabet = byte_level_alphabet()

    def __call__(self, tokens: Sequence[int]) -> str:
        data = b"".join(self._bytes(self._pieces.get(t, "")) for t in tokens)
        return printable(data.decode("utf-8", "replace"))

    def _bytes(self, piece: str) -> bytes:
        if self._byte_level and all(c in self._alphabet for c in piece):
            return bytes(self._alphabet[c] for c in piece)
        fallback = _BYTE_TOKEN.fullmatch(piece)
        if fallback is not None:
            return bytes([int(fallback[1], 16)])
        return piece.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()


def _pieces(record: object) -> dict[int, str]:
    if not isinstance(record, dict) or not isinstance(model := record.get("model"), dict):
        raise ValueError("no tokenizer")
    match model.get("vocab"):
        case dict(vocabulary):
            pieces = {i: t for t, i in vocabulary.items() if isinstance(t, str) and isinstance(i, int)}
        case list(vocabulary):  # Unigram: [piece, score] by id
            pieces = {i: str(entry[0]) for i, entry in enumerate(vocabulary) if isinstance(entry, list)}
        case _:
            raise ValueError("no vocabulary")
    for token in record.get("added_tokens") or ():
        if isinstance(token, dict) and isinstance(token.get("id"), int):
            pieces[token["id"]] = str(token.get("content", ""))
    return pieces


def detokeniser(tokenizer: str, directory: Path) -> Detokenise:
    """For the kind of tokenizer that dataset.json names ("bytes", "huggingface"), with its files in `directory`."""
    if tokenizer == "bytes":
        return bytes_to_text
    for path in (directory / "tokenizer.json", directory / "tokenizer" / "tokenizer.json"):
        try:
            if path.stat().st_size <= TOKENIZER_LIMIT_BYTES:
                return VocabularyDecoder(json.loads(path.read_bytes()))
        except (OSError, ValueError, RecursionError, TypeError, IndexError):
            continue
    return ids_to_text
