"""The append-only log, its snapshots and a few facts about the job, in SQLite or PostgreSQL through one piece of code.

Writers call `append` before the effects of the records leave the process; it returns once they are durable. A
snapshot holds everything up to a sequence number, and what it holds leaves the log.
"""

from __future__ import annotations

import errno
import shutil
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError, NoSuchModuleError, SQLAlchemyError

from starlings_protos.errors import ExitCode, StarlingsError

SCHEMA_VERSION = 1

metadata = sa.MetaData()

log = sa.Table(
    "log",
    metadata,
    # Given out by this process, without gaps: replay can tell that nothing is missing.
    sa.Column("seq", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("wall_s", sa.Float, nullable=False),
    sa.Column("kind", sa.String(64), nullable=False),
    sa.Column("payload", sa.LargeBinary, nullable=False),
)
snapshots = sa.Table(
    "snapshots",
    metadata,
    # The last record that the snapshot includes.
    sa.Column("seq", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("wall_s", sa.Float, nullable=False),
    sa.Column("payload", sa.LargeBinary, nullable=False),
)
meta = sa.Table(
    "meta",
    metadata,
    sa.Column("name", sa.String(64), primary_key=True),
    sa.Column("value", sa.Text, nullable=False),
)

# Any fixed number: PostgreSQL's advisory locks are named by one.
_POSTGRES_LOCK = 0x57A21195
_SQLITE_BUSY_TIMEOUT_S = 5.0
# With less than this SQLite cannot even begin: its shared-memory file alone has 32 KiB.
_NEEDED_BYTES = 64 << 10


class StoreError(StarlingsError):
    """The store cannot be opened, read or written; the message says what to do."""

    exit_code: int = ExitCode.USAGE


class StoreFull(StoreError):
    """No room left. Everything appended before is safe; nothing of the failed append is."""

    exit_code = ExitCode.DISK_FULL


class StoreInUse(StoreError):
    """Another coordinator works on the same database."""

    exit_code = ExitCode.IN_USE


class StoreMismatch(StoreError):
    """The database was written by another version of Starlings, or for another job."""

    exit_code = ExitCode.MISMATCH


@dataclass(frozen=True, slots=True)
class LogEntry:
    seq: int
    wall_s: float
    kind: str
    payload: bytes


@dataclass(frozen=True, slots=True)
class Saved:
    """What a start folds into the state: the newest snapshot, then the entries after it in order."""

    snapshot: bytes | None
    entries: tuple[LogEntry, ...]


def sqlite_url(path: Path) -> str:
    return f"sqlite:///{path}"


def _is_full(error: DBAPIError) -> bool:
    origin = error.orig
    if isinstance(origin, sqlite3.Error):
        code = getattr(origin, "sqlite_errorcode", 0)
        return code == sqlite3.SQLITE_FULL or "disk is full" in str(origin)
    if isinstance(origin, OSError):
        return origin.errno == errno.ENOSPC
    return getattr(origin, "sqlstate", None) == "53100"  # PostgreSQL: disk_full


def _no_room(url: sa.URL) -> bool:
    """A full disk also shows as an input/output error, or as a file that cannot be opened."""
    if url.get_backend_name() != "sqlite" or not url.database:
        return False
    with suppress(OSError):
        return shutil.disk_usage(Path(url.database).absolute().parent).free < _NEEDED_BYTES
    return False


@contextmanager
def _translated(url: sa.URL) -> Iterator[None]:
    """SQLAlchemy's errors as ours; a password in the address never gets into a message."""
    where = url.render_as_string(hide_password=True)
    try:
        yield
    except DBAPIError as error:
        if _is_full(error) or _no_room(url):
            raise StoreFull(
                f"No space left for the coordinator's log ({where}). Nothing recorded so far is lost: free some "
                "space and start again."
            ) from error
        raise StoreError(f"The coordinator's log ({where}) failed: {error.orig}") from error
    except SQLAlchemyError as error:
        raise StoreError(f"The coordinator's log ({where}) failed: {error}") from error


class Store:
    """One process's handle on one database. Calls block and may come from any one thread at a time.

    Raises:
        StoreError: and its children, from every method.
    """

    def __init__(self, url: str) -> None:
        self._engine = _make_engine(url)
        self._lock_connection: sa.Connection | None = None
        self._log_connection: sa.Connection | None = None
        self._next_seq = 1
        # Bytes and entries in the log since the last snapshot.
        self.log_bytes = 0
        self.log_entries = 0
        try:
            with _translated(self._engine.url):
                self._lock()
                self._check_schema()
                self._log_connection = self._engine.connect()
        except BaseException:
            self.close()
            raise

    @property
    def engine(self) -> sa.Engine:
        """For tables that others keep in the same database."""
        return self._engine

    def _lock(self) -> None:
        """SQLite files lie in the job's directory, which has a lock of its own."""
        if self._engine.dialect.name != "postgresql":
            return
        self._lock_connection = self._engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        taken = self._lock_connection.scalar(sa.select(sa.func.pg_try_advisory_lock(_POSTGRES_LOCK)))
        if not taken:
            where = self._engine.url.render_as_string(hide_password=True)
            raise StoreInUse(f"{where} is in use by another coordinator. End that one first.")

    def _check_schema(self) -> None:
        metadata.create_all(self._engine)
        found = self.read_meta("schema_version")
        if found is None:
            self.write_meta("schema_version", str(SCHEMA_VERSION))
        elif found != str(SCHEMA_VERSION):
            raise StoreMismatch(
                f"The coordinator's log has schema version {found}, this Starlings writes {SCHEMA_VERSION}: "
                "use the version that wrote it, or prepare the job in a new directory."
            )

    def read_meta(self, name: str) -> str | None:
        with _translated(self._engine.url), self._engine.connect() as connection:
            value: str | None = connection.scalar(sa.select(meta.c.value).where(meta.c.name == name))
            return value

    def write_meta(self, name: str, value: str) -> None:
        with _translated(self._engine.url), self._engine.begin() as connection:
            connection.execute(sa.delete(meta).where(meta.c.name == name))
            connection.execute(sa.insert(meta).values(name=name, value=value))

    def load(self) -> Saved:
        """Also sets where the next append goes on."""
        with _translated(self._engine.url), self._engine.connect() as connection:
            newest = connection.execute(
                sa.select(snapshots.c.seq, snapshots.c.payload).order_by(snapshots.c.seq.desc()).limit(1)
            ).first()
            covered = int(newest.seq) if newest else 0
            rows = connection.execute(sa.select(log).where(log.c.seq > covered).order_by(log.c.seq)).all()
        entries = tuple(LogEntry(int(r.seq), float(r.wall_s), r.kind, bytes(r.payload)) for r in rows)
        for position, entry in enumerate(entries, start=covered + 1):
            if entry.seq != position:
                raise StoreError(
                    f"The coordinator's log lacks record {position}: restore the database from a backup."
                )
        self._next_seq = covered + len(entries) + 1
        self.log_entries = len(entries)
        self.log_bytes = sum(len(e.payload) for e in entries)
        return Saved(bytes(newest.payload) if newest else None, entries)

    def append(self, records: Sequence[tuple[str, bytes]], wall_s: float) -> None:
        """Writes (kind, payload) pairs in one transaction; durable on return, absent on any error."""
        if not records:
            return
        connection = self._connection()
        rows: list[dict[str, Any]] = [
            {"seq": seq, "wall_s": wall_s, "kind": kind, "payload": payload}
            for seq, (kind, payload) in enumerate(records, start=self._next_seq)
        ]
        with _translated(self._engine.url), connection.begin():
            connection.execute(sa.insert(log), rows)
        self._next_seq += len(rows)
        self.log_entries += len(rows)
        self.log_bytes += sum(len(payload) for _, payload in records)

    def write_snapshot(self, payload: bytes, wall_s: float) -> None:
        """`payload` includes every record appended so far; those and older snapshots go with the same commit."""
        connection = self._connection()
        covered = self._next_seq - 1
        with _translated(self._engine.url), connection.begin():
            connection.execute(sa.delete(snapshots))
            connection.execute(sa.insert(snapshots).values(seq=covered, wall_s=wall_s, payload=payload))
            connection.execute(sa.delete(log).where(log.c.seq <= covered))
        self.log_entries = 0
        self.log_bytes = 0

    def _connection(self) -> sa.Connection:
        if self._log_connection is None:
            raise StoreError("The coordinator's log is closed.")
        return self._log_connection

    def close(self) -> None:
        for connection in (self._log_connection, self._lock_connection):
            if connection is not None:
                connection.close()
        self._log_connection = self._lock_connection = None
        self._engine.dispose()


def _make_engine(url: str) -> sa.Engine:
    try:
        parsed = sa.make_url(url)
    except SQLAlchemyError:
        raise StoreError(
            "The store's address is no URL: use sqlite:///PATH or postgresql://USER@HOST/DATABASE."
        ) from None
    if parsed.drivername == "postgresql":
        parsed = parsed.set(drivername="postgresql+psycopg")
    if parsed.get_backend_name() not in ("sqlite", "postgresql"):
        raise StoreError(
            f"The store '{parsed.get_backend_name()}' is not known: use sqlite:///PATH or postgresql://..."
        )
    try:
        if parsed.get_backend_name() == "sqlite":
            engine = sa.create_engine(
                parsed, connect_args={"check_same_thread": False, "timeout": _SQLITE_BUSY_TIMEOUT_S}
            )
            sa.event.listen(engine, "connect", _configure_sqlite)
            return engine
        return sa.create_engine(parsed, pool_pre_ping=True)
    except (ImportError, NoSuchModuleError):
        raise StoreError("PostgreSQL needs a driver: install starlings[postgres].") from None


def _configure_sqlite(connection: sqlite3.Connection, _record: object) -> None:
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    # FULL: every commit is synced, so it survives a power cut, not only the end of this process. A power cut can
    # take the commit under way, of which nobody was told; and more only if the disk lies about syncing.
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.close()
