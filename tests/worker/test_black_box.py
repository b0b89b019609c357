"""What the device was at outlives the engine's process, whatever ends it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from starlings_protos.messages import LeaseKind, MicrobatchKey
from starlings_worker.black_box import FILE, BlackBox, take

KEY = MicrobatchKey(LeaseKind.TRAIN, 1 << 41, 7, 3)
DIES = """
import os, signal, sys
from pathlib import Path
from starlings_protos.messages import LeaseKind, MicrobatchKey
from starlings_worker.black_box import BlackBox
with BlackBox(Path(sys.argv[1])).at(MicrobatchKey(LeaseKind.TRAIN, 1 << 41, 7, 3)):
    os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))
"""


def test_a_process_that_is_killed_leaves_what_it_was_at(tmp_path: Path) -> None:
    path = tmp_path / FILE
    ended = subprocess.run([sys.executable, "-c", DIES, str(path)], timeout=60, check=False)
    assert ended.returncode != 0
    assert take(path) == KEY
    assert take(path) is None, "said once"


def test_what_has_ended_is_not_what_it_was_at(tmp_path: Path) -> None:
    path = tmp_path / FILE
    box = BlackBox(path)
    with box.at(KEY):
        assert take(path) == KEY
    with pytest.raises(RuntimeError), box.at(KEY):
        raise RuntimeError("a failure of its own, which is reported")
    assert take(path) is None
    with box.at(MicrobatchKey(LeaseKind.EVALUATE, 1, 0, 0)):
        assert take(path) is None


def test_nothing_there_is_nothing_to_say(tmp_path: Path) -> None:
    assert take(tmp_path / FILE) is None
    (tmp_path / FILE).write_bytes(b"short")
    assert take(tmp_path / FILE) is None
    with BlackBox(tmp_path / "no" / "where").at(KEY), BlackBox(None).at(KEY):
        pass
