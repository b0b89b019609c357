"""One worker per directory, on one machine: also when the directory was copied to another."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from starlings_worker.lock import DirectoryInUse, lock_directory


def test_a_second_process_is_refused_with_host_and_time(tmp_path: Path):
    with lock_directory(tmp_path):
        with pytest.raises(DirectoryInUse, match=rf"in use by {socket.gethostname()} .* since 20") as refused:
            lock_directory(tmp_path)
        assert refused.value.exit_code == 11
    lock_directory(tmp_path).release()


def _copied_from(directory: Path, copy: Path, host: str) -> None:
    """As if `directory` had been copied from another machine while in use there."""
    shutil.copytree(directory, copy)
    fields = json.loads((copy / "lock").read_text())
    (copy / "lock").write_text(json.dumps(fields | {"host": host}))


def test_a_copy_from_another_machine_is_refused_and_the_first_untouched(tmp_path: Path):
    first = lock_directory(tmp_path / "first")
    (tmp_path / "first" / "id.key").write_text("key")
    _copied_from(tmp_path / "first", tmp_path / "copy", "elsewhere.example.org")
    with pytest.raises(
        DirectoryInUse, match=r"copy of a directory in use by elsewhere\.example\.org .* since 20"
    ):
        lock_directory(tmp_path / "copy")
    with pytest.raises(DirectoryInUse):  # and again: the refusal changed nothing
        lock_directory(tmp_path / "copy")
    with pytest.raises(DirectoryInUse, match="in use by"):
        lock_directory(tmp_path / "first")
    first.release()
    # The way out that the message names.
    (tmp_path / "copy" / "lock").unlink()
    lock_directory(tmp_path / "copy").release()


def test_a_copy_on_the_same_machine(tmp_path: Path):
    with lock_directory(tmp_path / "first"):
        shutil.copytree(tmp_path / "first", tmp_path / "copy")
        with pytest.raises(DirectoryInUse, match="is a copy"):
            lock_directory(tmp_path / "copy")


def test_a_copy_made_while_nobody_used_it_is_fine(tmp_path: Path):
    lock_directory(tmp_path / "first").release()
    shutil.copytree(tmp_path / "first", tmp_path / "copy")
    lock_directory(tmp_path / "copy").release()


def _die_holding(directory: Path) -> None:
    code = (
        "import os, pathlib, sys; from starlings_worker.lock import lock_directory; "
        "lock = lock_directory(pathlib.Path(sys.argv[1])); os._exit(1)"
    )
    subprocess.run([sys.executable, "-c", code, str(directory)], check=False, timeout=60)
    assert (directory / "lock").read_text()


def test_after_a_crash_the_same_directory_may_be_used_even_under_a_new_host_name(tmp_path: Path):
    """Containers get a new name at every start; the volume stays."""
    _die_holding(tmp_path)
    fields = json.loads((tmp_path / "lock").read_text())
    with open(tmp_path / "lock", "r+") as file:  # in place: the same inode
        file.write(json.dumps(fields | {"host": "3f2a9c0d1e4b"}))
    lock_directory(tmp_path).release()


def test_a_crashed_directory_moved_on_the_same_machine(tmp_path: Path):
    _die_holding(tmp_path / "first")
    shutil.copytree(tmp_path / "first", tmp_path / "copy")
    lock_directory(tmp_path / "copy").release()


@pytest.mark.skipif(sys.platform == "win32", reason="modes are a POSIX matter")
def test_the_lock_is_private(tmp_path: Path):
    with lock_directory(tmp_path / "w"):
        assert os.stat(tmp_path / "w" / "lock").st_mode & 0o077 == 0
