"""Where a checkpoint's version is built and how it becomes visible: a local folder, or any other fsspec system.

On a local disk a version is built as `<version>.building`; file contents and names are synced before that folder is
renamed, and the rename is synced before anything else is removed. A version that goes is renamed first, so that no half
of it is ever seen under its name. Elsewhere there are no renames: files come first and the manifest last, and writing a
version again takes other file names, so that the manifest that is there stays true until it is replaced.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, cast

import fsspec

from starlings_job import local_files
from starlings_job.local_files import NewFile
from starlings_job.manifest import MANIFEST, Manifest

_VERSION = re.compile(r"[0-9]{8,}")
_BUILDING = ".building"
_REPLACED = ".replaced"
_REMOVED = ".removed"
_LEFTOVER = re.compile(r"[0-9]{8,}\.(building|replaced|removed)")


def open_url(url: str | Path) -> tuple[Any, str, bool]:
    """File system, root path, and whether it is a local disk."""
    filesystem, root = fsspec.core.url_to_fs(os.path.abspath(url) if isinstance(url, Path) else str(url))
    protocol = filesystem.protocol if isinstance(filesystem.protocol, str) else filesystem.protocol[0]
    return filesystem, root.rstrip("/"), protocol in ("file", "local")


class Place(Protocol):
    """One version in the making. Every method raises OSError."""

    def begin(self) -> None: ...
    def new_file(self, name: str) -> AbstractContextManager[tuple[str, NewFile]]:
        """The name that it really has, and the file."""

    def publish(self, manifest: Manifest) -> None:
        """From now on the version is there."""

    def abandon(self) -> None:
        """As if it had never been begun; a version of that number that was there before stays."""

    def forget(self, version: int) -> None: ...
    def remove_leftovers(self) -> None:
        """What crashes left behind; this is the only writer."""


def place_of(url: str | Path, version: int, known: Manifest | None) -> Place:
    """`known`: the manifest of that very version, when it is there already."""
    filesystem, root, local = open_url(url)
    return _Local(root, version) if local else _Remote(filesystem, root, version, known)


class _Local:
    def __init__(self, root: str, version: int) -> None:
        self._files = local_files.LOCAL
        self._root = root
        self._final = os.path.join(root, f"{version:08d}")
        self._folder = self._final + _BUILDING

    def begin(self) -> None:
        is_new = not os.path.isdir(self._root)
        self._files.remove_tree(self._folder)
        self._files.make_folder(self._folder)
        if is_new:
            self._files.sync_folder(os.path.dirname(self._root))

    @contextlib.contextmanager
    def new_file(self, name: str) -> Iterator[tuple[str, NewFile]]:
        with self._files.new_file(os.path.join(self._folder, name)) as file:
            yield name, file

    def publish(self, manifest: Manifest) -> None:
        with self.new_file(MANIFEST) as (_, file):
            file.write(manifest.to_json())
        self._files.sync_folder(self._folder)
        old = self._final + _REPLACED
        for last_try in (False, False, True):
            if os.path.isdir(self._final):
                self._files.remove_tree(old)
                self._files.rename(self._final, old)
            try:
                self._files.rename(self._folder, self._final)
                break
            except OSError:
                # A reader may have healed what looked like a crash between the two renames.
                heal(Path(self._root))
                if last_try:
                    raise
        self._files.sync_folder(self._root)

    def abandon(self) -> None:
        self._files.remove_tree(self._folder)

    def forget(self, version: int) -> None:
        path = os.path.join(self._root, f"{version:08d}")
        self._files.remove_tree(path + _REMOVED)
        self._files.rename(path, path + _REMOVED)
        self._files.sync_folder(self._root)
        self._files.remove_tree(path + _REMOVED)

    def remove_leftovers(self) -> None:
        heal(Path(self._root))
        leftovers = sorted(name for name in os.listdir(self._root) if _LEFTOVER.fullmatch(name))
        for name in leftovers:
            self._files.remove_tree(os.path.join(self._root, name))
        if leftovers:
            self._files.sync_folder(self._root)


def heal(root: Path) -> None:
    """A crash between the two renames of `publish` left the older version under another name."""
    if not root.is_dir():
        return
    for old in root.glob(f"*{_REPLACED}"):
        final = old.with_name(old.name.removesuffix(_REPLACED))
        if not final.exists():
            with contextlib.suppress(OSError):
                local_files.LOCAL.rename(str(old), str(final))


class _Remote:
    def __init__(self, filesystem: Any, root: str, version: int, known: Manifest | None) -> None:
        self._filesystem = filesystem
        self._root = root
        self._folder = f"{root}/{version:08d}"
        self._taken = {file.name for file in known.files} if known is not None else set()
        self._replaces = known is not None
        self._made: list[str] = []

    def begin(self) -> None:
        if not self._replaces:
            self._remove(self._folder)
        self._filesystem.makedirs(self._folder, exist_ok=True)

    @contextlib.contextmanager
    def new_file(self, name: str) -> Iterator[tuple[str, NewFile]]:
        while name in self._taken:
            stem, dot, ending = name.rpartition(".")
            name = f"{stem}.again{dot}{ending}"
        self._taken.add(name)
        self._made.append(name)
        with self._filesystem.open(f"{self._folder}/{name}", "wb") as file:
            yield name, cast(NewFile, file)

    def publish(self, manifest: Manifest) -> None:
        # One request where it matters (object stores), so the old manifest or the new one is there.
        self._filesystem.pipe_file(f"{self._folder}/{MANIFEST}", manifest.to_json())
        self._made.clear()
        kept = {file.name for file in manifest.files} | {MANIFEST}
        for name in self._names(self._folder):
            if name not in kept:
                with contextlib.suppress(OSError):
                    self._filesystem.rm_file(f"{self._folder}/{name}")

    def abandon(self) -> None:
        if not self._replaces:
            self._remove(self._folder)
            return
        for name in self._made:
            with contextlib.suppress(FileNotFoundError):
                self._filesystem.rm_file(f"{self._folder}/{name}")

    def forget(self, version: int) -> None:
        self._remove(f"{self._root}/{version:08d}")

    def remove_leftovers(self) -> None:
        for name in self._names(self._root):
            folder = f"{self._root}/{name}"
            if _VERSION.fullmatch(name) and not self._filesystem.exists(f"{folder}/{MANIFEST}"):
                self._remove(folder)

    def _names(self, folder: str) -> list[str]:
        self._filesystem.invalidate_cache()
        return [_last(path) for path in self._filesystem.ls(folder, detail=False)]

    def _remove(self, folder: str) -> None:
        # The manifest first: from then on the version does not exist.
        with contextlib.suppress(FileNotFoundError):
            self._filesystem.rm_file(f"{folder}/{MANIFEST}")
        with contextlib.suppress(FileNotFoundError):
            self._filesystem.rm(folder, recursive=True)


def version_folders(url: str | Path) -> Iterator[tuple[int, dict[str, int | None]]]:
    """Every version that has a manifest, ascending, with the files' sizes (None: the system does not say)."""
    filesystem, root, local = open_url(url)
    if local:
        heal(Path(root))
    filesystem.invalidate_cache()
    try:
        names = [_last(path) for path in filesystem.ls(root, detail=False)]
    except FileNotFoundError:
        return
    for name in sorted((name for name in names if _VERSION.fullmatch(name)), key=int):
        try:
            entries = filesystem.ls(f"{root}/{name}", detail=True)
        except (FileNotFoundError, NotADirectoryError):
            continue
        sizes = {_last(entry["name"]): entry["size"] for entry in entries}
        if MANIFEST in sizes:
            yield int(name), sizes


def _last(path: object) -> str:
    return str(path).rstrip("/").rpartition("/")[2]
