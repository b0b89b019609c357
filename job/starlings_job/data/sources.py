"""Where text comes from: files by glob, the interpreter's standard library, lines of JSON."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from starlings_job.errors import JobFileError, NoDataMatched

STDLIB = "stdlib"
STDLIB_WITHOUT = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib"})
# Large files are read, tokenised and written in pieces of about this size, cut at ends of lines.
PIECE_BYTES = 4 << 20
LINE_LIMIT_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Document:
    """A file, or a line of a JSON lines file."""

    # Relative to the source's root, with forward slashes: equal on every machine with the same text.
    name: str
    path: Path
    offset: int
    byte_count: int
    # Line number for JSON lines, 0 for a whole file.
    line: int = 0
    # Bytes that JSON's keys and quotes take, about.
    overhead_bytes: int = 0

    @property
    def file_name(self) -> str:
        """Without the line's number."""
        return self.name.removesuffix(f":{self.line}") if self.line else self.name

    @property
    def text_bytes(self) -> int:
        """About how much text the document holds."""
        return max(1, self.byte_count - self.overhead_bytes)


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that is tokenised in one go. `counts` tells whether its tokens are targets of the loss."""

    text: bytes
    counts: bool = True
    # The document ends behind this piece.
    ends: bool = False


def find_documents(sources: Sequence[str], data_format: str, base: Path) -> list[Document]:
    """All documents of a job's sources, sorted by name.

    Args:
        sources: "stdlib", or globs and directories relative to `base`.
        data_format: "text" or "jsonl".

    Raises:
        NoDataMatched: nothing matches, or what matches is empty.
    """
    files: dict[Path, str] = {}
    for source in sources:
        found = _stdlib() if source == STDLIB else _matching(source, base)
        if not found:
            where = f" (looked from {base})" if not os.path.isabs(source) else ""
            raise NoDataMatched(
                f"[data] source {source!r} matches no file{where}: check the path and the pattern; "
                'a directory and all below it is "DIR/**/*"'
            )
        for path, name in found:
            files.setdefault(path, name)
    documents: list[Document] = []
    for path, name in sorted(files.items(), key=lambda item: (item[1], str(item[0]))):
        if data_format == "jsonl":
            documents.extend(_lines(path, name))
        else:
            documents.append(Document(name, path, 0, path.stat().st_size))
    documents = [document for document in documents if document.byte_count]
    if not documents:
        raise NoDataMatched(f"[data] source {', '.join(sources)}: all files that match are empty")
    return documents


def _stdlib() -> list[tuple[Path, str]]:
    root = Path(sysconfig.get_paths()["stdlib"]).resolve()
    found = []
    for folder, inner, names in os.walk(root):
        inner[:] = sorted(name for name in inner if name not in STDLIB_WITHOUT)
        for name in names:
            path = Path(folder, name)
            if name.endswith(".py") and path.is_file():
                found.append((path, path.relative_to(root).as_posix()))
    return sorted(found, key=lambda item: item[1])


def _matching(source: str, base: Path) -> list[tuple[Path, str]]:
    pattern = os.path.expanduser(source)
    if os.path.isdir(base / pattern):
        pattern = os.path.join(pattern, "**", "*")
    names = sorted(glob.glob(pattern, root_dir=base, recursive=True))
    return [(path.resolve(), Path(name).as_posix()) for name in names if (path := base / name).is_file()]


def _lines(path: Path, name: str) -> Iterator[Document]:
    offset = 0
    with path.open("rb") as file:
        number = 0
        while line := file.readline(LINE_LIMIT_BYTES):
            number += 1
            if len(line) == LINE_LIMIT_BYTES:
                raise JobFileError(f"{path} line {number} has more than {LINE_LIMIT_BYTES} bytes")
            if line.strip():
                overhead = len('{"prompt": "", "completion": ""}' if b'"prompt"' in line else '{"text": ""}')
                yield Document(f"{name}:{number}", path, offset, len(line), number, overhead)
            offset += len(line)


def limited(documents: Sequence[Document], limit_bytes: int, seed: int) -> list[Document]:
    """About `limit_bytes` of text: whole documents drawn by hash of their names, in their old order.

    Where whole documents fall far short (few huge ones), one more is cut to fit.
    """
    if sum(d.byte_count for d in documents) <= limit_bytes:
        return list(documents)
    room, chosen = limit_bytes, {}
    order = sorted(range(len(documents)), key=lambda i: _key("limit", seed, documents[i].name))
    for index in order:
        if documents[index].byte_count <= room:
            chosen[index] = documents[index]
            room -= documents[index].byte_count
    if room > limit_bytes // 2:
        index = next(i for i in order if i not in chosen)
        # A line of JSON cannot be cut.
        if not documents[index].line:
            chosen[index] = replace(documents[index], byte_count=room)
    return [chosen[index] for index in sorted(chosen)]


@dataclass(frozen=True, slots=True)
class Split:
    """Which documents are held out, and how many last bytes of one more."""

    held_out: frozenset[int]
    tail_of: int | None = None
    tail_bytes: int = 0


def split_documents(documents: Sequence[Document], wanted_bytes: int, seed: int) -> Split:
    """Chooses whole documents by hash of their names until they have about `wanted_bytes`; at most a tenth of all.

    No single document has more than a quarter where others suffice; where whole documents do not do at all
    (one large file), the rest is the end of the largest.
    """
    wanted = min(wanted_bytes, sum(d.text_bytes for d in documents) // 10)
    order = sorted(range(len(documents)), key=lambda i: _key("held out", seed, documents[i].name))
    room, chosen = wanted, set[int]()
    for largest_allowed in (wanted // 4, wanted):
        for index in order:
            if room <= wanted // 20:
                return Split(frozenset(chosen))
            # A document a little too large is better than none.
            fits = documents[index].text_bytes <= min(largest_allowed, room + wanted // 16)
            if fits and index not in chosen and len(chosen) + 1 < len(documents):
                chosen.add(index)
                room -= documents[index].text_bytes
    rest = [i for i in order if i not in chosen]
    if room <= wanted // 2:
        return Split(frozenset(chosen))
    if any(documents[i].line for i in rest):
        if len(rest) == 1:
            return Split(frozenset(chosen))
        # Lines of JSON cannot be cut: the smallest that is left.
        smallest = min(rest, key=lambda i: documents[i].text_bytes)
        return Split(frozenset({*chosen, smallest}))
    largest = max(rest, key=lambda i: documents[i].byte_count)
    return Split(frozenset(chosen), largest, min(room, documents[largest].byte_count // 2))


def _key(purpose: str, seed: int, name: str) -> bytes:
    return hashlib.sha256(f"{purpose}\0{seed}\0{name}".encode()).digest()


class SourceReader:
    """Reads documents in pieces; counts and hashes the source bytes that were used."""

    def __init__(self, data_format: str) -> None:
        self._format = data_format
        self._digest = hashlib.sha256()
        self._path: Path | None = None
        self._file: BinaryIO | None = None
        self.byte_count = 0

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()

    def pieces(self, document: Document) -> Iterator[Piece]:
        """A document's text, in order.

        Raises:
            JobFileError: a line is no JSON, or has neither "text" nor "prompt" and "completion".
        """
        if self._file is None or self._path != document.path:
            self.close()
            self._file, self._path = document.path.open("rb"), document.path
        self._file.seek(document.offset)
        if self._format == "jsonl":
            yield from _json_line(document, self._used(self._file.read(document.byte_count)))
            return
        left = document.byte_count
        while left:
            piece = self._file.read(min(left, PIECE_BYTES))
            if not piece:
                break
            left -= len(piece)
            if left and not piece.endswith(b"\n"):
                more = self._file.readline(min(left, PIECE_BYTES))
                piece, left = piece + more, left - len(more)
            yield Piece(self._used(piece), ends=not left)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _used(self, data: bytes) -> bytes:
        self._digest.update(data)
        self.byte_count += len(data)
        return data


def _json_line(document: Document, line: bytes) -> Iterator[Piece]:
    where = f"{document.path} line {document.line}"
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        raise JobFileError(f"{where}: no JSON; [data] format jsonl needs one object per line") from None
    match record:
        case {"text": str(text)}:
            yield Piece(_utf8(text), ends=True)
        case {"prompt": str(prompt), "completion": str(completion)}:
            yield Piece(_utf8(prompt), counts=False)
            yield Piece(_utf8(completion), ends=True)
        case _:
            wanted = '{"text": ...} or {"prompt": ..., "completion": ...}'
            raise JobFileError(f"{where}: needs {wanted}, all of them strings")


def has_prompts(documents: Sequence[Document]) -> bool:
    """Whether any line of these JSON lines may have a prompt, so that a loss mask is needed."""
    for path in dict.fromkeys(document.path for document in documents):
        with path.open("rb") as file:
            if any(b'"prompt"' in line for line in file):
                return True
    return False


def _utf8(text: str) -> bytes:
    # JSON may hold lone surrogates.
    return text.encode("utf-8", "replace")
