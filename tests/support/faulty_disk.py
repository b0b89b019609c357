"""A local disk that fails at a chosen call, and the states in which a power cut at that call may leave it.

The model is POSIX's, which promises less than any real file system does: bytes are safe when their file was synced, a
name (created, renamed or removed) when its folder was; anything else may have reached the disk or not, in any
combination. Nothing is really synced, which would take most of a test's time.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from starlings_job.local_files import LocalFiles, NewFile


class PowerCut(BaseException):
    """Nothing happens after it: no handler of the program runs, as far as the disk is concerned."""


@dataclass(frozen=True)
class Fault:
    """At the call with this number (from 0). `number` None: power is cut; else the error of that number is raised.

    A full disk stays full: every later call that needs room fails as well. Other errors come once.
    """

    call: int
    number: int | None


@dataclass
class Inode:
    is_folder: bool
    data: bytearray = field(default_factory=bytearray)
    synced_bytes: int = 0
    entries: dict[str, Inode] = field(default_factory=dict)


@dataclass
class Change:
    """Of names in one folder: `put` appears as `name`, `drop` disappears."""

    folder: Inode
    put: tuple[str, Inode] | None
    drop: tuple[str, Inode] | None
    synced: bool = False


class FaultyDisk(LocalFiles):
    """Works on the real folder `root`, and keeps book on what of it is durable."""

    def __init__(self, root: Path, fault: Fault | None = None) -> None:
        self._root = os.fspath(root)
        self._fault = fault
        self._first = _read_tree(self._root)
        self._now = _copy(self._first, {}, self._images(self._first))
        self._changes: list[Change] = []
        self._is_full = False
        self._dead = False
        self.calls: list[str] = []

    def _images(self, _: Inode) -> dict[int, Inode]:
        """The durable twin of each inode of the volatile tree, filled by `_copy`."""
        self._durable: dict[int, Inode] = {}
        return self._durable

    def _call(self, what: str, *, needs_room: bool, before: Any = None) -> None:
        if self._dead:
            raise PowerCut
        number = len(self.calls)
        self.calls.append(what)
        fault = self._fault
        if fault is not None and number == fault.call:
            if before is not None:
                before()
            if fault.number is None:
                self._dead = True
                raise PowerCut
            self._is_full = fault.number == errno.ENOSPC
            if needs_room or not self._is_full:
                raise OSError(fault.number, os.strerror(fault.number), what)
        elif self._is_full and needs_room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), what)

    def _at(self, path: str) -> tuple[Inode, str]:
        """The folder of a path and the name in it."""
        relative = os.path.relpath(path, self._root)
        *parents, name = relative.split(os.sep)
        folder = self._now
        for parent in parents:
            folder = folder.entries[parent]
        return folder, name

    def _change(self, folder: Inode, put: tuple[str, Inode] | None, drop: tuple[str, Inode] | None) -> None:
        if drop is not None and folder.entries.get(drop[0]) is drop[1]:
            del folder.entries[drop[0]]
        if put is not None:
            folder.entries[put[0]] = put[1]
        self._changes.append(Change(folder, put, drop))

    # ------------------------------------------------------------------ what the program calls

    def make_folder(self, path: str) -> None:
        if os.path.isdir(path):
            return
        self.make_folder(os.path.dirname(path))
        self._call(f"mkdir {path}", needs_room=True)
        os.mkdir(path)
        folder, name = self._at(path)
        self._change(folder, (name, Inode(True)), None)

    @contextlib.contextmanager
    def new_file(self, path: str) -> Iterator[NewFile]:
        self._call(f"open {path}", needs_room=True)
        inode = Inode(False)
        folder, name = self._at(path)
        with open(path, "wb", buffering=0) as file:
            self._change(folder, (name, inode), None)
            yield _File(self, file, inode, path)
            self._call(f"fsync {path}", needs_room=True)
            inode.synced_bytes = len(inode.data)

    def write(self, file: BinaryIO, inode: Inode, path: str, data: bytes) -> None:
        def half() -> None:
            """The kernel may take a part before it says that there is no room."""
            file.write(data[: len(data) // 2])
            inode.data += data[: len(data) // 2]

        self._call(f"write {path} {len(data)}", needs_room=True, before=half)
        file.write(data)
        inode.data += data

    def rename(self, old: str, new: str) -> None:
        self._call(f"rename {old} {new}", needs_room=True)
        os.replace(old, new)
        folder, name = self._at(old)
        target, new_name = self._at(new)
        assert folder is target, "one sync must do"
        inode = folder.entries[name]
        self._change(folder, (new_name, inode), (name, inode))

    def remove_file(self, path: str) -> None:
        self._call(f"unlink {path}", needs_room=False)
        os.unlink(path)
        folder, name = self._at(path)
        self._change(folder, None, (name, folder.entries[name]))

    def remove_folder(self, path: str) -> None:
        self._call(f"rmdir {path}", needs_room=False)
        os.rmdir(path)
        folder, name = self._at(path)
        self._change(folder, None, (name, folder.entries[name]))

    def sync_folder(self, path: str) -> None:
        self._call(f"fsync {path}", needs_room=True)
        if not os.path.abspath(path).startswith(self._root):
            return
        folder, name = self._at(path)
        inode = self._now if os.path.samefile(path, self._root) else folder.entries[name]
        for change in self._changes:
            if change.folder is inode:
                change.synced = True

    # ------------------------------------------------------------------ what a power cut leaves

    def leave(self, target: Path, rng: random.Random, luck: float) -> None:
        """Writes a state to the new folder `target`. `luck`: the share of unsynced things that reached the disk."""
        image = {id(self._now): self._durable[id(self._now)]}
        copies: dict[int, Inode] = {}
        top = _copy(image[id(self._now)], copies, {})
        twins: dict[int, Inode] = {
            volatile: copies[id(durable)] for volatile, durable in self._durable.items()
        }

        def twin(inode: Inode) -> Inode:
            return twins.setdefault(id(inode), Inode(inode.is_folder))

        for change in self._changes:
            if not change.synced and rng.random() >= luck:
                continue
            folder = twin(change.folder)
            if change.drop is not None and folder.entries.get(change.drop[0]) is twin(change.drop[1]):
                del folder.entries[change.drop[0]]
            if change.put is not None:
                folder.entries[change.put[0]] = twin(change.put[1])
                inode = change.put[1]
                if not inode.is_folder:
                    unsynced = len(inode.data) - inode.synced_bytes
                    kept = unsynced if rng.random() < luck else rng.randint(0, unsynced)
                    twin(inode).data = inode.data[: inode.synced_bytes + kept]
        _write_tree(top, target)


@dataclass
class _File:
    disk: FaultyDisk
    file: BinaryIO
    inode: Inode
    path: str

    def write(self, data: bytes | memoryview, /) -> int:
        self.disk.write(self.file, self.inode, self.path, bytes(data))
        return len(data)


def _read_tree(path: str) -> Inode:
    if not os.path.isdir(path):
        data = bytearray(Path(path).read_bytes())
        return Inode(False, data, len(data))
    names = sorted(os.listdir(path))
    return Inode(True, entries={name: _read_tree(os.path.join(path, name)) for name in names})


def _copy(inode: Inode, copies: dict[int, Inode], originals: dict[int, Inode]) -> Inode:
    """A deep copy; `copies` by the identity of the original, `originals` by that of the copy."""
    entries = {name: _copy(child, copies, originals) for name, child in inode.entries.items()}
    made = Inode(inode.is_folder, bytearray(inode.data), inode.synced_bytes, entries)
    copies[id(inode)], originals[id(made)] = made, inode
    return made


def _write_tree(inode: Inode, path: Path) -> None:
    if not inode.is_folder:
        path.write_bytes(inode.data)
        return
    path.mkdir()
    for name, child in inode.entries.items():
        _write_tree(child, path / name)
