"""The same store on PostgreSQL: a server of our own, in a temporary directory, on a local socket only."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from starlings_coordinator.store import Store, StoreInUse

pytest.importorskip("psycopg")
INITDB, SERVER = shutil.which("initdb"), shutil.which("pg_ctl")


def _as_user() -> list[str]:
    """PostgreSQL refuses to run as root."""
    if sys.platform == "win32" or os.geteuid() != 0:
        return []
    return ["runuser", "-u", "postgres", "--"]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    if not INITDB or not SERVER or (_as_user() and not shutil.which("runuser")):
        pytest.skip("no PostgreSQL server is installed here")
    # Socket paths are limited to some hundred characters, so not below pytest's own directory.
    folder = Path(tempfile.mkdtemp(prefix="pg"))
    try:
        if _as_user():
            shutil.chown(folder, "postgres")
        data = folder / "data"
        begin = [*_as_user(), INITDB, "-D", str(data), "-A", "trust", "-U", "starlings"]
        if subprocess.run(begin, capture_output=True, check=False).returncode:
            pytest.skip("initdb does not work here")
        control = [*_as_user(), SERVER, "-D", str(data), "-w", "-l", str(folder / "log")]
        subprocess.run(
            [*control, "-o", f"-c listen_addresses='' -k {folder}", "start"], check=True, capture_output=True
        )
        try:
            yield f"postgresql://starlings@/postgres?host={folder}"
        finally:
            subprocess.run([*control, "-m", "immediate", "stop"], check=False, capture_output=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.slow
def test_log_snapshot_and_restart(url: str) -> None:
    store = Store(url)
    store.load()
    store.append([("a", b"\x00\xff"), ("b", b"")], 1.0)
    store.write_snapshot(b"so far", 2.0)
    store.append([("c", b"3")], 3.0)
    store.write_meta("job_digest", "abc")
    store.close()
    again = Store(url)
    saved = again.load()
    assert saved.snapshot == b"so far"
    assert [(e.seq, e.kind, e.payload) for e in saved.entries] == [(3, "c", b"3")]
    assert again.read_meta("job_digest") == "abc"
    again.close()


@pytest.mark.slow
def test_second_coordinator_is_refused_until_the_first_is_gone(url: str) -> None:
    first = Store(url)
    with pytest.raises(StoreInUse, match="another coordinator") as refused:
        Store(url)
    assert refused.value.exit_code == 11
    first.close()
    Store(url).close()
