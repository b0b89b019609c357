"""Whatever happens at whichever call while a checkpoint is written: the one before or the new one is there, whole."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import random
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import fsspec
import pytest

from starlings_job import local_files
from starlings_job.checkpoint import CheckpointWriter, load_manifest, read_block, versions
from starlings_job.errors import DiskFull
from starlings_job.state import RawTensor, block_digest
from support.faulty_disk import Fault, FaultyDisk, PowerCut

SEED = int(os.environ.get("STARLINGS_FAULT_SEED", "20261202"))
BLOCKS = ("embed", "head")


def state(block: str, seed: int) -> dict[str, RawTensor]:
    data = random.Random(f"{block} {seed}").randbytes(48)
    tensors = {"param:w": RawTensor("F32", (3, 4), memoryview(data))}
    if block == "embed":
        tensors["exp_avg:w"] = RawTensor("F32", (12,), memoryview(data[::-1]))
    return tensors


def write(url: str | Path, version: int, seed: int, keep: int = 2) -> None:
    with CheckpointWriter(url, version, keep=keep) as writer:
        for block in BLOCKS:
            writer.add_block(block, state(block, seed))
        writer.finish({"seed": seed})


def loaded(url: str | Path) -> dict[int, int]:
    """Every version that is said to be there, with the seed of what is in it; all of it read, hashes checked."""
    found = {}
    for version in versions(url):
        seed = load_manifest(url, version).facts["seed"]
        for block in BLOCKS:
            assert block_digest(read_block(url, version, block)) == block_digest(state(block, seed)), version
        found[version] = seed
    return found


@contextlib.contextmanager
def faulty(disk: FaultyDisk) -> Iterator[FaultyDisk]:
    before, local_files.LOCAL = local_files.LOCAL, disk
    try:
        yield disk
    finally:
        local_files.LOCAL = before


# name -> what is there before (version -> seed), and what is written.
SITUATIONS: dict[str, tuple[Mapping[int, int], int]] = {
    "the first one ever": ({}, 10),
    "one more, and the oldest goes": ({10: 1, 20: 2}, 30),
    "the same version again": ({10: 1, 20: 2}, 20),
}
NEW = 7


def prepare(directory: Path, situation: str) -> tuple[Mapping[int, int], int]:
    before, version = SITUATIONS[situation]
    directory.mkdir()
    with faulty(FaultyDisk(directory)):
        for number, seed in before.items():
            write(directory / "c", number, seed)
    if before:
        # What an earlier crash left is in the way.
        shutil.copytree(directory / "c" / "00000010", directory / "c" / f"{version:08d}.building")
        shutil.copytree(directory / "c" / "00000010", directory / "c" / "00000010.replaced")
        (directory / "c" / "00000015.removed").mkdir()
    return before, version


def check(url: Path, before: Mapping[int, int], version: int, *, done: bool = False) -> None:
    """Newest and whole: as before, or as written. The next save works, and then all is tidy."""
    found = loaded(url)
    wanted = dict(before) | {version: NEW}
    newest = max(found, default=None)
    if done or (newest is not None and found[newest] == NEW):
        assert newest == version
        assert found[version] == NEW
    else:
        assert newest == max(before, default=None)
    for number, seed in found.items():
        assert seed in (before.get(number), wanted.get(number))
    with faulty(FaultyDisk(url.parent)):
        write(url, version + 10, 8)
    found = loaded(url)
    assert found[version + 10] == 8
    assert sorted(p.name for p in url.iterdir()) == [f"{number:08d}" for number in sorted(found)]
    assert len(found) <= 2


def calls_of(directory: Path, situation: str) -> list[str]:
    _, version = prepare(directory, situation)
    with faulty(FaultyDisk(directory)) as disk:
        write(directory / "c", version, NEW)
    return disk.calls


def only_slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize("states", [1, only_slow(8)])
@pytest.mark.parametrize("situation", list(SITUATIONS))
def test_power_cut_at_every_call(tmp_path: Path, situation: str, states: int) -> None:
    """`states`: how many of those that each cut may leave."""
    rng = random.Random(f"{SEED} {situation}")
    print(f"STARLINGS_FAULT_SEED={SEED}")
    count = len(calls_of(tmp_path / "whole", situation))
    assert count > 20
    base = tmp_path / "base"
    before, version = prepare(base, situation)
    for call in range(count + 1):
        work = tmp_path / f"work{call}"
        shutil.copytree(base, work)
        cut = False
        with faulty(FaultyDisk(work, Fault(call, None))) as disk:
            try:
                write(work / "c", version, NEW)
            except PowerCut:
                cut = True
        assert cut == (call < count)
        for number in range(states):
            left = tmp_path / f"left{call}.{number}"
            # What was not synced is gone, or there, or each thing by chance.
            luck = (0.0, 0.6, 0.3, 1.0)[(call + number) % 4]
            disk.leave(left, rng, luck)
            check(left / "c", before, version, done=not cut)
            shutil.rmtree(left)
        shutil.rmtree(work)


@pytest.mark.parametrize(
    ("situation", "number"),
    [
        ("the first one ever", errno.ENOSPC),
        ("one more, and the oldest goes", errno.EIO),
        ("the same version again", errno.ENOSPC),
        only_slow("the first one ever", errno.EIO),
        only_slow("one more, and the oldest goes", errno.ENOSPC),
        only_slow("the same version again", errno.EIO),
    ],
)
def test_error_at_every_call(tmp_path: Path, situation: str, number: int) -> None:
    calls = calls_of(tmp_path / "whole", situation)
    base = tmp_path / "base"
    before, version = prepare(base, situation)
    for call, what in enumerate(calls):
        work = tmp_path / f"work{call}"
        shutil.copytree(base, work)
        failed = False
        with faulty(FaultyDisk(work, Fault(call, number))):
            try:
                write(work / "c", version, NEW)
                # Only what comes after the version is there may fail without being told.
                assert loaded(work / "c")[version] == NEW, what
            except (OSError, DiskFull) as error:
                failed = True
                told = error
        if failed:
            assert isinstance(told, DiskFull) == (number == errno.ENOSPC), told
            assert ("free some space" if number == errno.ENOSPC else "Input/output") in str(told)
        if failed and number == errno.ENOSPC:
            # The space is given back, so that others can use it.
            assert not (work / "c" / f"{version:08d}.building").exists(), what
        check(work / "c", before, version, done=not failed)
        shutil.rmtree(work)


@pytest.mark.parametrize("saves", [25, only_slow(300)])
def test_power_cuts_one_after_the_other(tmp_path: Path, saves: int) -> None:
    """Each save is cut somewhere and goes on from what the cut before left."""
    rng = random.Random(SEED)
    print(f"STARLINGS_FAULT_SEED={SEED}")
    here, counter, best = tmp_path / "0", itertools.count(1), 0
    here.mkdir()
    write(here / "c", 1, 1)
    held = {1: 1}
    for version in range(2, saves):
        # Now and then a version again, as after a rewind.
        target = max(held) if rng.random() < 0.3 else version
        with faulty(FaultyDisk(here, Fault(rng.randrange(40), None))) as disk, contextlib.suppress(PowerCut):
            write(here / "c", target, version)
        after = tmp_path / str(next(counter))
        disk.leave(after, rng, rng.choice([0.0, 0.3, 0.8, 1.0]))
        shutil.rmtree(here)
        here, found = after, loaded(after / "c")
        newest = max(held)
        assert max(found) in (newest, target)
        assert found[max(found)] in (held[newest], version)
        best += found.get(target) == version
        held = found
    assert saves / 10 < best < saves - 2


# ------------------------------------------------------------------ anything else that fsspec reaches


class Storage:
    """Every call to the file system behind memory:// is counted; number `call` fails, with `cut` all after it too."""

    NAMES = ("open", "rm", "rm_file", "makedirs", "ls", "exists", "pipe_file")

    def __init__(self, monkeypatch: pytest.MonkeyPatch, call: int, *, cut: bool) -> None:
        self.calls = 0
        self._call, self._cut, self._dead = call, cut, False
        filesystem = fsspec.filesystem("memory")
        for name in self.NAMES:
            monkeypatch.setattr(filesystem, name, self._wrap(getattr(filesystem, name)))

    def _wrap(self, real: Any) -> Any:
        def called(*arguments: Any, **options: Any) -> Any:
            self.count()
            result = real(*arguments, **options)
            return _Upload(self, result) if "wb" in arguments else result

        return called

    def count(self) -> None:
        number, self.calls = self.calls, self.calls + 1
        if self._dead or number == self._call:
            self._dead = self._cut
            raise PowerCut if self._cut else OSError(errno.EIO, "the storage does not answer")


class _Upload:
    """Written bytes may be lost; a cut upload leaves an empty file, which is more than an object store does."""

    def __init__(self, storage: Storage, file: Any) -> None:
        self._storage, self._file = storage, file

    def __enter__(self) -> _Upload:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._storage.count()
            self._file.close()

    def write(self, data: bytes | memoryview) -> int:
        self._storage.count()
        return int(self._file.write(bytes(data)))


@pytest.mark.parametrize(
    ("situation", "cut"),
    [
        ("the first one ever", True),
        ("one more, and the oldest goes", False),
        ("the same version again", True),
        only_slow("the first one ever", False),
        only_slow("one more, and the oldest goes", True),
        only_slow("the same version again", False),
    ],
)
def test_storage_fails_at_every_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, situation: str, cut: bool
) -> None:
    before, version = SITUATIONS[situation]

    def begin(url: str) -> None:
        for number, seed in before.items():
            write(url, number, seed)

    url = f"memory://{tmp_path.name}-whole"
    begin(url)
    with monkeypatch.context() as patched:
        storage = Storage(patched, -1, cut=cut)
        write(url, version, NEW)
    assert storage.calls > 20
    for call in range(storage.calls):
        url = f"memory://{tmp_path.name}-{call}"
        begin(url)
        failed = False
        with monkeypatch.context() as patched:
            Storage(patched, call, cut=cut)
            try:
                write(url, version, NEW)
            except (OSError, PowerCut):
                failed = True
        found = loaded(url)
        newest = max(found, default=None)
        if failed and (newest is None or found[newest] != NEW):
            assert newest == max(before, default=None)
        else:
            assert found[version] == NEW
        write(url, version + 10, 8)
        assert loaded(url)[version + 10] == 8
        filesystem, root = fsspec.core.url_to_fs(url)
        left = sorted(str(name).rpartition("/")[2] for name in filesystem.ls(root, detail=False))
        assert left == [f"{number:08d}" for number in versions(url)]
        assert len(left) <= 2
        for folder in left:
            files = [str(name).rpartition("/")[2] for name in filesystem.ls(f"{root}/{folder}", detail=False)]
            named = {file.name for file in load_manifest(url, int(folder)).files} | {"manifest.json"}
            # What a failed second writing of a version left in it goes when the version goes.
            assert named == set(files) or (named < set(files) and int(folder) == version == 20)
