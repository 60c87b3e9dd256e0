"""Database: one SQLite file, or an in-memory database, and the one thread that uses it.

The event loop never waits for the disk: each piece of work is a plain function over the connection
and runs as one transaction in the database's thread, in order. The file is locked while it is
open; a second process cannot open it, unless it succeeds this one in an upgrade: `share`.

If the disk is full, or the file is on a read-only file system, reads go on and writes raise
`StoreOutOfSpace`. `check_writable` raises it before any work is done for a result that could not
be stored; it lets a write through from time to time, which finds out whether there is space again.
"""

import asyncio
import logging
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from pathlib import Path
from typing import Protocol, TypeVar

from engine.priority import lower_thread_priority
from gateway.errors import StoreFailed, StoreOutOfSpace

T = TypeVar("T")
Work = Callable[[sqlite3.Connection], T]
logger = logging.getLogger(__name__)

VERSION = 5
RETRY_SECONDS = 10.0  # between two writes that are tried while the disk is full
SHARED_WAIT_MS = 10_000  # a transaction waits so long for one of the other server
MIN_FREE_BYTES = 16 << 20  # with less free space on the disk, nothing new is accepted
_RECORDS = """
CREATE TABLE {0} (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    tenant TEXT NOT NULL,
    num_bytes INTEGER NOT NULL,
    expires_at INTEGER NOT NULL,
    used_at INTEGER NOT NULL,
    record BLOB NOT NULL
);
CREATE INDEX {0}_by_tenant ON {0} (tenant, used_at);
"""
_CONVERSATIONS = _RECORDS.format("conversation")
_OUT_OF_SPACE = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_IOERR})
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
    record BLOB NOT NULL,
    num_bytes INTEGER NOT NULL DEFAULT 0
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
CREATE INDEX file_by_tenant ON file (tenant);
""" + _RECORDS.format("response")
_STREAMS = """
CREATE TABLE stream (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    num_bytes INTEGER NOT NULL,
    ended_at INTEGER,
    record BLOB NOT NULL,
    events BLOB
);
"""
_ITEMS = """
ALTER TABLE {0} ADD COLUMN num_items INTEGER NOT NULL DEFAULT 0;
CREATE TABLE {0}_item (
    seq INTEGER PRIMARY KEY,
    owner INTEGER NOT NULL,
    id TEXT NOT NULL,
    record BLOB NOT NULL
);
CREATE INDEX {0}_item_by_owner ON {0}_item (owner);
CREATE INDEX {0}_item_by_id ON {0}_item (owner, id);
CREATE TRIGGER {0}_deleted AFTER DELETE ON {0} BEGIN
    DELETE FROM {0}_item WHERE owner = old.seq;
END;
DELETE FROM {0} WHERE NOT json_valid(CAST(record AS TEXT)); -- SQLite reads 1,000 levels
INSERT INTO {0}_item (owner, id, record)
    SELECT seq, json_extract(value, '$.id'), CAST(value AS BLOB)
    FROM {0}, json_each(CAST(record AS TEXT), '$.items');
UPDATE {0} SET
    num_items = json_array_length(CAST(record AS TEXT), '$.items'),
    record = CAST(json_extract(CAST(record AS TEXT), '$.response') AS BLOB);
"""
_ALL_ITEMS = _ITEMS.format("response") + _ITEMS.format("conversation")
_MIGRATIONS = {
    1: """
ALTER TABLE batch ADD COLUMN num_bytes INTEGER NOT NULL DEFAULT 0;
DROP INDEX response_by_use;
CREATE INDEX response_by_tenant ON response (tenant, used_at);
CREATE INDEX file_by_tenant ON file (tenant);
""",
    2: _STREAMS,
    3: _CONVERSATIONS,
    4: _ALL_ITEMS,  # until then an object and its items were one record
}  # to the next version, by version

# Pieces of uploads that a former process did not finish.
_CLEAN_UP = "DELETE FROM file_piece WHERE file_id NOT IN (SELECT id FROM file)"


class StoreExecutor(Protocol):
    """Runs work off the event loop, one piece at a time, in the order of the calls."""

    async def __call__(self, work: Callable[[], T]) -> T: ...

    def close(self) -> None:
        """Wait for the work that was begun; no call may follow."""


# In the context of a request: is told the seconds of each piece of the store's work for it, which
# may hold the interpreter's lock for most of them
store_meter: ContextVar[Callable[[float], object] | None] = ContextVar("store_meter", default=None)


class StoreThread:
    """The `StoreExecutor` of a server: one thread."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "store", lower_thread_priority)

    async def __call__(self, work: Callable[[], T]) -> T:
        charge, seconds = store_meter.get(), list[float]()

        def timed() -> T:
            began = time.thread_time()
            try:
                return work()
            finally:
                seconds.append(time.thread_time() - began)

        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, timed)
        finally:
            if charge is not None:
                charge(sum(seconds))

    def close(self) -> None:
        self._thread.shutdown()


class Database:
    """The open database. Errors of SQLite are raised as `StoreFailed`."""

    def __init__(
        self,
        path: Path | None,
        executor: StoreExecutor | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        is_shared: bool = False,
    ) -> None:
        """Open or create the file. Without `path`, the database is in memory. `is_shared`: another
        server has it open and shares it."""
        self.path = path
        self._executor = executor or StoreThread()
        self._clock = clock
        self._full_since: float | None = None  # the time of the last write that failed
        try:
            self._connection = _opened(path, is_shared=is_shared)
        except (OSError, sqlite3.Error) as error:
            self._executor.close()
            raise StoreFailed(f"cannot open the store {path}: {_reason(error)}") from error

    @property
    def is_writable(self) -> bool:
        """Whether the last write, or the last `check_writable`, found space."""
        return self._full_since is None

    async def read(self, work: Work[T]) -> T:
        """The result of `work`, which changes nothing."""
        return await self._executor(lambda: self._transact(work, "BEGIN"))

    async def write(self, work: Work[T]) -> T:
        """The result of `work`, run as one transaction, which is rolled back if it raises.

        Raises `StoreOutOfSpace` if the disk is full.
        """
        return await self._executor(lambda: self._transact(work, "BEGIN IMMEDIATE"))

    async def check_writable(self) -> None:
        """Raises `StoreOutOfSpace` if a write now would probably fail."""
        await self._executor(self._check_space)

    async def share(self) -> None:
        """Let the server that succeeds this one open the file, too. Transactions of both then wait
        for each other. Raises `StoreFailed`."""
        if self.path is not None:
            await self._executor(self._reopen)

    def _reopen(self) -> None:
        self._connection.close()
        try:
            self._connection = _opened(self.path, is_shared=True)
        except (OSError, sqlite3.Error) as error:
            raise StoreFailed(f"cannot share the store {self.path}: {_reason(error)}") from error

    def close(self) -> None:
        """Wait for the work that was begun and close the file."""
        self._executor.close()
        self._connection.close()

    def _check_space(self) -> None:
        if self._full_since is not None and self._clock() < self._full_since + RETRY_SECONDS:
            raise StoreOutOfSpace
        if self.path is not None and shutil.disk_usage(self.path.parent).free < MIN_FREE_BYTES:
            self._note_full(f"less than {MIN_FREE_BYTES >> 20} MiB free beside {self.path}")
            raise StoreOutOfSpace

    def _transact(self, work: Work[T], begin: str) -> T:
        is_write = begin != "BEGIN"
        try:
            with self._connection as connection:
                connection.execute(begin)
                result = work(connection)
        except sqlite3.Error as error:
            if is_write and getattr(error, "sqlite_errorcode", 0) & 0xFF in _OUT_OF_SPACE:
                self._note_full(str(error))
                raise StoreOutOfSpace from error
            logger.error("store: %s", error)
            raise StoreFailed(f"the store failed: {error}") from error
        if is_write and self._full_since is not None:
            self._full_since = None
            logger.warning("store: writing works again")
        return result

    def _note_full(self, reason: str) -> None:
        if self._full_since is None:
            logger.error("store: cannot write, only reading from now on: %s", reason)
        self._full_since = self._clock()


def _opened(path: Path | None, *, is_shared: bool) -> sqlite3.Connection:
    if path is not None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            path.touch(mode=0o600)  # it contains prompts
    connection = sqlite3.connect(
        path or ":memory:", timeout=0.0, isolation_level=None, check_same_thread=False
    )
    try:
        if is_shared:
            connection.execute(f"PRAGMA busy_timeout = {SHARED_WAIT_MS}")
        else:
            connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if not 0 <= version <= VERSION:
            raise sqlite3.DatabaseError(
                f"its format is version {version}, this server supports {VERSION}"
            )
        if is_shared and version != VERSION:
            raise sqlite3.DatabaseError(
                f"the server that has it open uses version {version} of its format, this server "
                f"uses {VERSION}: stop that one first"
            )
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        if not is_shared:  # the other server has prepared it, and may be storing an upload
            _prepare(connection, version)
    except sqlite3.Error:
        connection.close()
        raise
    return connection


def _prepare(connection: sqlite3.Connection, version: int) -> None:
    """Create or update the tables, and clean up. A database of this version stays readable if the
    disk is full."""
    if version == 0:
        tables = _TABLES + _STREAMS + _CONVERSATIONS + _ALL_ITEMS
        connection.executescript(f"BEGIN;{tables}PRAGMA user_version = {VERSION};COMMIT;")
    for old in range(version or VERSION, VERSION):
        connection.executescript(f"BEGIN;{_MIGRATIONS[old]}PRAGMA user_version = {old + 1};COMMIT;")
    try:
        connection.execute(_CLEAN_UP)
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode & 0xFF not in _OUT_OF_SPACE:
            raise
        logger.warning("store: opened for reading only: %s", error)


def _reason(error: Exception) -> str:
    if isinstance(error, sqlite3.OperationalError) and "locked" in str(error):
        return "another server has it open"
    return str(error.strerror if isinstance(error, OSError) else error)


def in_pieces(records: Iterable[bytes], num_bytes: int) -> Iterator[list[bytes]]:
    """The records in lists of at least `num_bytes`; the last has the rest, which may be empty."""
    piece: list[bytes] = []
    size = 0
    for record in records:
        piece.append(record)
        size += len(record)
        if size >= num_bytes:
            yield piece
            piece, size = [], 0
    yield piece
