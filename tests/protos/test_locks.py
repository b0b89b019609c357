"""A directory belongs to one process at a time, and the refused one learns to whom."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from starlings_protos.locks import DirectoryInUse, DirectoryLock, holder_of

_HOLD = """
import sys, pathlib
from starlings_protos.locks import DirectoryLock
lock = DirectoryLock(pathlib.Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def test_second_holder_is_refused_and_told_who_has_it(tmp_path: Path) -> None:
    with DirectoryLock(tmp_path), pytest.raises(DirectoryInUse) as refused:
        DirectoryLock(tmp_path)
    holder = refused.value.holder
    assert holder is not None
    assert (holder.host, holder.process_id) == (socket.gethostname(), os.getpid())
    assert "since 20" in str(refused.value)


def test_released_lock_can_be_taken_again(tmp_path: Path) -> None:
    DirectoryLock(tmp_path).release()
    DirectoryLock(tmp_path).release()


def test_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "held\n"
    with pytest.raises(DirectoryInUse):
        DirectoryLock(tmp_path)
    child.kill()
    child.communicate()
    DirectoryLock(tmp_path).release()


def test_unreadable_holder_is_no_crash(tmp_path: Path) -> None:
    with DirectoryLock(tmp_path) as lock:
        lock.path.write_text("{")
        with pytest.raises(DirectoryInUse, match="another process"):
            DirectoryLock(tmp_path)


def test_who_holds_a_directory_can_be_asked_without_disturbing_anybody(tmp_path: Path) -> None:
    assert holder_of(tmp_path) is None
    with DirectoryLock(tmp_path):
        holder = holder_of(tmp_path)
        assert holder is not None
        assert holder.process_id == os.getpid()
        with pytest.raises(DirectoryInUse):
            DirectoryLock(tmp_path)
    assert holder_of(tmp_path) is None
    assert holder_of(tmp_path / "absent") is None
    DirectoryLock(tmp_path).release()


def test_a_look_at_the_lock_does_not_refuse_whoever_takes_it_meanwhile(tmp_path: Path) -> None:
    DirectoryLock(tmp_path).release()
    over = threading.Event()

    def look() -> None:
        # A look holds the lock for some microseconds.
        while not over.wait(0.002):
            holder_of(tmp_path)

    looker = threading.Thread(target=look)
    looker.start()
    try:
        for _ in range(100):
            DirectoryLock(tmp_path).release()
    finally:
        over.set()
        looker.join()
