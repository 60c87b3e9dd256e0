"""Database: one SQLite file, or an in-memory database, and the one thread that uses it.

The event loop never waits for the disk: each piece of work is a plain function over the connection
and runs as one transaction in the database's thread, in order. The file is locked while it is
open; a second process cannot open it.
"""

import asyncio
import logging
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol, TypeVar

from gateway.errors import StoreFailed

T = TypeVar("T")
Work = Callable[[sqlite3.Connection], T]
logger = logging.getLogger(__name__)

VERSION = 1
_TABLES = """
CREATE TABLE file (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    tenant TEXT NOT NULL,
    purpose TEXT NOT NULL,
    num_bytes INTEGER NOT NULL,
    expires_at INTEGER,
    record BLOB NOT NULL
);
CREATE TABLE file_piece (
    file_id TEXT NOT NULL,
    number INTEGER NOT NULL,
    content BLOB NOT NULL,
    PRIMARY KEY (file_id, number)
);
CREATE TABLE batch (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    tenant TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    is_live INTEGER NOT NULL,
    record BLOB NOT NULL
);
CREATE TABLE batch_line (
    batch_id TEXT NOT NULL,
    number INTEGER NOT NULL,
    custom_id TEXT NOT NULL,
    body BLOB NOT NULL,
    answer BLOB,
    is_error INTEGER,
    PRIMARY KEY (batch_id, number)
);
CREATE UNIQUE INDEX batch_line_by_custom_id ON batch_line (batch_id, custom_id);
CREATE TABLE response (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    tenant TEXT NOT NULL,
    num_bytes INTEGER NOT NULL,
    expires_at INTEGER NOT NULL,
    used_at INTEGER NOT NULL,
    record BLOB NOT NULL
);
CREATE INDEX response_by_use ON response (used_at);
"""

# Pieces of uploads that a former process did not finish.
_CLEAN_UP = "DELETE FROM file_piece WHERE file_id NOT IN (SELECT id FROM file)"


class StoreExecutor(Protocol):
    """Runs work off the event loop, one piece at a time, in the order of the calls."""

    async def __call__(self, work: Callable[[], T]) -> T: ...

    def close(self) -> None:
        """Wait for the work that was begun; no call may follow."""
        ...


class StoreThread:
    """The `StoreExecutor` of a server: one thread."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "store")

    async def __call__(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def close(self) -> None:
        self._thread.shutdown()


class Database:
    """The open database. Errors of SQLite are raised as `StoreFailed`."""

    def __init__(self, path: Path | None, executor: StoreExecutor | None = None) -> None:
        """Open or create the file. Without `path`, the database is in memory."""
        self.path = path
        self._executor = executor or StoreThread()
        try:
            self._connection = _opened(path)
        except (OSError, sqlite3.Error) as error:
            self._executor.close()
            raise StoreFailed(f"cannot open the store {path}: {_reason(error)}") from error

    async def do(self, work: Work[T]) -> T:
        """The result of `work`, run as one transaction, which is rolled back if it raises."""
        return await self._executor(lambda: self._transact(work))

    def close(self) -> None:
        """Wait for the work that was begun and close the file."""
        self._executor.close()
        self._connection.close()

    def _transact(self, work: Work[T]) -> T:
        try:
            with self._connection as connection:
                connection.execute("BEGIN IMMEDIATE")
                return work(connection)
        except sqlite3.Error as error:
            logger.error("store: %s", error)
            raise StoreFailed(f"the store failed: {error}") from error


def _opened(path: Path | None) -> sqlite3.Connection:
    if path is not None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.touch(mode=0o600)  # it contains prompts
    connection = sqlite3.connect(
        path or ":memory:", timeout=0.0, isolation_level=None, check_same_thread=False
    )
    try:
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version not in (0, VERSION):
            raise sqlite3.DatabaseError(
                f"its format is version {version}, this server supports {VERSION}"
            )
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        if version == VERSION:
            connection.execute(_CLEAN_UP)
        else:
            connection.executescript(f"BEGIN;{_TABLES}PRAGMA user_version = {VERSION};COMMIT;")
    except sqlite3.Error:
        connection.close()
        raise
    return connection


def _reason(error: Exception) -> str:
    if isinstance(error, sqlite3.OperationalError) and "locked" in str(error):
        return "another server has it open"
    return str(error.strerror if isinstance(error, OSError) else error)
