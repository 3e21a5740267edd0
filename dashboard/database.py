"""The dashboard's database file: SQLite, opened safely, its schema versioned, one transaction a write.

WAL with full synchronisation: a write that has returned is on disk, and a process killed in the middle of one leaves the
file as it was before. The file holds pairing keys, so it and its companions are readable by their owner alone.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import stat
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from wire.errors import ConfigError
from wire.files import make_private_folder

BUSY_TIMEOUT_S: Final = 10.0
COMPANIONS: Final = ("-journal", "-wal", "-shm")
"""Files that SQLite opens beside it, whatever they are."""
_DISK_CODES: Final = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY})
"""SQLite's primary result codes for a disk that takes nothing; the file itself may be whole."""

MIGRATIONS: Final[Sequence[str]] = (
    """
    CREATE TABLE registrations (
        id TEXT PRIMARY KEY, alias TEXT NOT NULL, address TEXT NOT NULL, region TEXT NOT NULL, role TEXT NOT NULL,
        token_id TEXT NOT NULL UNIQUE, token_key BLOB NOT NULL, created_at REAL NOT NULL, expires_at REAL NOT NULL,
        node_id TEXT, public_key BLOB, redeemed_at REAL
    );
    CREATE INDEX registrations_of_nodes ON registrations (node_id);
    CREATE TABLE groups (number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, name TEXT NOT NULL,
        created_at REAL NOT NULL);
    CREATE TABLE group_members (group_id TEXT NOT NULL REFERENCES groups (id) ON DELETE CASCADE, position INTEGER NOT NULL,
        node_id TEXT NOT NULL, PRIMARY KEY (group_id, position)) WITHOUT ROWID;
    CREATE TABLE token_counters (node_id TEXT PRIMARY KEY, completed INTEGER NOT NULL, kv_assisted INTEGER NOT NULL)
        WITHOUT ROWID;
    CREATE TABLE benchmark_runs (number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, kind TEXT NOT NULL,
        status TEXT NOT NULL, started_at REAL NOT NULL, finished_at REAL, config TEXT NOT NULL,
        summary TEXT NOT NULL, live INTEGER NOT NULL);
    CREATE TABLE benchmark_stages (run_id TEXT NOT NULL REFERENCES benchmark_runs (id) ON DELETE CASCADE,
        position INTEGER NOT NULL, stage TEXT NOT NULL, PRIMARY KEY (run_id, position)) WITHOUT ROWID;
    CREATE TABLE node_counters (node_id TEXT PRIMARY KEY, incarnation TEXT NOT NULL, base TEXT NOT NULL,
        current TEXT NOT NULL, saved_at REAL NOT NULL) WITHOUT ROWID;
    """,
)
"""Statements that lead from each version of the schema to the next; the version is SQLite's ``user_version``."""


class Database:
    """One connection, used by one thread at a time.

    Args:
        path: the file; it and missing folders are made, for their owner only.

    Raises:
        ConfigError: the file cannot be made or opened, is no regular file, is no database or a damaged one, or was written
            by a newer version.
    """

    def __init__(self, path: Path, *, migrations: Sequence[str] = MIGRATIONS) -> None:
        self.changes = 0
        """Grows with every transaction that changed something."""
        self._lock = threading.Lock()
        self._path = path
        try:
            _make_private(path)
            self._connection = sqlite3.connect(
                path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False, cached_statements=64
            )
        except (OSError, sqlite3.Error) as error:
            why = (error.strerror if isinstance(error, OSError) else None) or "SQLite refuses it"
            raise ConfigError(
                f"the state file {path} cannot be opened: {why}", remedy="choose another with --state"
            ) from None
        try:
            self._connection.row_factory = sqlite3.Row
            for statement in ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON"):
                self._connection.execute(f"PRAGMA {statement}")
            (found,) = self._connection.execute("PRAGMA quick_check(1)").fetchone()
            if found != "ok":
                raise sqlite3.DatabaseError("its pages do not fit together")
            self._migrate(migrations)
        except sqlite3.DatabaseError as error:
            self._connection.close()
            if getattr(error, "sqlite_errorcode", 0) & 0xFF in _DISK_CODES:
                remedy = "make room on its disk, or choose another with --state"
                raise ConfigError(f"the state file {path} cannot be written: {error}", remedy=remedy) from None
            remedy = "move it away to begin anew, or restore it"
            raise ConfigError(f"the state file {path} is damaged or in use: {error}", remedy=remedy) from None
        except BaseException:
            self._connection.close()
            raise

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            self._connection.close()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Everything in the block is written, or nothing."""
        with self._lock:
            before = self._connection.total_changes
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                # SQLite has taken back by itself what a full disk interrupted.
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise
            self.changes += self._connection.total_changes != before

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[sqlite3.Connection]:
        """All reads in the block see one state; nothing may be written."""
        with self._lock:
            self._connection.execute("BEGIN")
            try:
                yield self._connection
            finally:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")

    def rows(self, query: str, *values: Any) -> list[sqlite3.Row]:
        """All rows of a query."""
        with self._lock:
            return self._connection.execute(query, values).fetchall()

    def row(self, query: str, *values: Any) -> sqlite3.Row | None:
        """The first row of a query, or None."""
        found = self.rows(query, *values)
        return found[0] if found else None

    def _migrate(self, migrations: Sequence[str]) -> None:
        with self.transaction() as connection:
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version > len(migrations):
                text = f"the state file {self._path} was written by a newer version of this program"
                raise ConfigError(text, remedy="upgrade, or choose another with --state")
            for statements in migrations[version:]:
                # executescript() would commit first; the schema must change in one transaction.
                for statement in statements.split(";"):
                    if statement.strip():
                        connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {len(migrations)}")


def _make_private(path: Path) -> None:
    make_private_folder(path.parent)
    # Looked at before it is opened: opening a device can have effects, and its mode is not ours to change.
    for each in (path, *(path.with_name(f"{path.name}{ending}") for ending in COMPANIONS)):
        with contextlib.suppress(FileNotFoundError):
            _require_regular(each, each.lstat().st_mode)
    # Before SQLite makes it by the umask; its companions (-wal, -shm) take over the mode of the file.
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | getattr(os, "O_CLOEXEC", 0)
    descriptor = os.open(path, flags, 0o600)
    try:
        _require_regular(path, os.fstat(descriptor).st_mode)
        os.fchmod(descriptor, 0o600)
    finally:
        os.close(descriptor)


def _require_regular(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise ConfigError(f"the state file {path} is not a regular file", remedy="choose another with --state")
