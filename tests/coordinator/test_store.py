"""The log keeps what it acknowledged, in order, over restarts, snapshots and full disks."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import sqlalchemy as sa
from hypothesis import given, settings
from hypothesis import strategies as st

from starlings_coordinator.store import Store, StoreError, StoreFull, StoreMismatch, sqlite_url


def _url(directory: Path) -> str:
    return sqlite_url(directory / "core.sqlite")


def _payloads(store: Store) -> list[bytes]:
    return [e.payload for e in store.load().entries]


def test_appended_records_come_back_in_order(tmp_path: Path) -> None:
    store = Store(_url(tmp_path))
    store.append([("a", b"1"), ("b", b"2")], wall_s=10.0)
    store.append([("c", b"3")], wall_s=11.0)
    store.close()
    saved = Store(_url(tmp_path)).load()
    assert [(e.seq, e.wall_s, e.kind, e.payload) for e in saved.entries] == [
        (1, 10.0, "a", b"1"),
        (2, 10.0, "b", b"2"),
        (3, 11.0, "c", b"3"),
    ]
    assert saved.snapshot is None


@settings(max_examples=10, deadline=None)
@given(st.lists(st.one_of(st.lists(st.binary(max_size=20), max_size=4), st.none()), max_size=12))
def test_snapshot_and_entries_together_are_everything(
    tmp_path_factory: pytest.TempPathFactory, acts: list[list[bytes] | None]
) -> None:
    """None = restart after a snapshot. The fold over what is stored equals the fold over what was appended."""
    url = _url(tmp_path_factory.mktemp("store"))
    store, everything = Store(url), b""
    store.load()
    for act in acts:
        if act is None:
            store.write_snapshot(everything, 0.0)
            store.close()
            store = Store(url)
            store.load()
        else:
            store.append([("x", p) for p in act], 0.0)
            everything += b"".join(act)
    saved = store.load()
    assert (saved.snapshot or b"") + b"".join(e.payload for e in saved.entries) == everything
    store.close()


KILLED = """
import sys
from starlings_coordinator.store import Store
store = Store(sys.argv[1])
for number in range(10**6):
    store.append([("x", str(number).encode())], 0.0)
    print(number, flush=True)
"""


def test_what_was_acknowledged_survives_a_kill(tmp_path: Path) -> None:
    writer = subprocess.Popen(
        [sys.executable, "-c", KILLED, _url(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    said = [int(writer.stdout.readline()) for _ in range(50)]
    writer.send_signal(signal.SIGKILL)
    said += [int(line) for line in writer.stdout.read().split("\n")[:-1]]
    writer.wait()
    writer.stdout.close()
    kept = [int(payload) for payload in _payloads(Store(_url(tmp_path)))]
    # The commit under way may be there or not; nobody heard of it.
    assert kept in (said, [*said, len(said)])


def test_snapshot_truncates_the_log(tmp_path: Path) -> None:
    store = Store(_url(tmp_path))
    for _ in range(50):
        store.append([("x", bytes(1000))], 0.0)
    assert (store.log_entries, store.log_bytes) == (50, 50_000)
    store.write_snapshot(b"all", 1.0)
    assert (store.log_entries, store.log_bytes) == (0, 0)
    assert store.load().entries == ()
    with store.engine.connect() as connection:
        assert connection.scalar(sa.text("select count(*) from log")) == 0


def test_full_disk_loses_nothing_and_says_so(tmp_path: Path) -> None:
    store = Store(_url(tmp_path))
    store.append([("x", b"kept")], 0.0)
    connection = store._connection()
    pages = connection.exec_driver_sql("pragma page_count").scalar_one()
    connection.exec_driver_sql(f"pragma max_page_count={pages}")
    connection.commit()
    with pytest.raises(StoreFull, match="free some space"):
        store.append([("x", bytes(1 << 20))], 0.0)
    connection.exec_driver_sql("pragma max_page_count=1000000")
    connection.commit()
    store.append([("x", b"after")], 0.0)
    assert _payloads(store) == [b"kept", b"after"]


def test_gap_in_the_log_is_found(tmp_path: Path) -> None:
    store = Store(_url(tmp_path))
    store.append([("x", b"1"), ("x", b"2"), ("x", b"3")], 0.0)
    with store.engine.begin() as connection:
        connection.execute(sa.text("delete from log where seq = 2"))
    with pytest.raises(StoreError, match="lacks record 2"):
        store.load()


def test_other_schema_version_is_refused(tmp_path: Path) -> None:
    store = Store(_url(tmp_path))
    store.write_meta("schema_version", "999")
    store.close()
    with pytest.raises(StoreMismatch, match="999"):
        Store(_url(tmp_path))


@pytest.mark.parametrize("url", ["nonsense", "mysql://host/db", "sqlite:////no/such/directory/core.sqlite"])
def test_unusable_address_is_one_clear_error(url: str) -> None:
    with pytest.raises(StoreError):
        Store(url)


def test_password_stays_out_of_messages() -> None:
    pytest.importorskip("psycopg")
    with pytest.raises(StoreError) as failed:
        Store("postgresql://starlings:secretword@127.0.0.1:1/none?connect_timeout=2")
    assert "secretword" not in str(failed.value)
