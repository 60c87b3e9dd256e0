"""Store: files, batches and responses, in one database; and the events of streams, in memory."""

import logging
import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine.errors import StartupError
from gateway.errors import StoreFailed
from gateway.store.batches import Batches, BatchQueue
from gateway.store.conversations import Conversations
from gateway.store.database import Database, StoreExecutor
from gateway.store.event_ring import RingLimits
from gateway.store.files import Files
from gateway.store.held_streams import HeldStreams
from gateway.store.journal import Journal
from gateway.store.responses import ResponseLimits, Responses
from gateway.store.usage import StoreLimits

DEFAULT_LIMITS = ResponseLimits()
DEFAULT_RINGS = RingLimits()
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Store:
    """Shared by the routes and the batch runner. The opener closes it."""

    database: Database
    files: Files
    batch_queue: BatchQueue
    responses: Responses
    conversations: Conversations
    held: HeldStreams
    journal: Journal

    async def is_lost_at_end(self) -> bool:
        """Whether it has any of these, events apart, and keeps them in memory only."""
        if self.database.path is not None:
            return False
        return await self.database.read(_has_rows)

    def close(self) -> None:
        self.database.close()


def _has_rows(db: sqlite3.Connection) -> bool:
    tables = ("file", "batch", "response", "conversation")
    query = " OR ".join(f"EXISTS (SELECT 1 FROM {table})" for table in tables)
    return bool(db.execute(f"SELECT {query}").fetchone()[0])


def open_store(
    path: Path | None,
    limits: StoreLimits,
    executor: StoreExecutor | None = None,
    responses: ResponseLimits = DEFAULT_LIMITS,
    clock: Callable[[], float] = time.monotonic,
    rings: RingLimits = DEFAULT_RINGS,
    *,
    is_shared: bool = False,
) -> Store:
    """The store in that file, or in memory. Raises `StoreFailed` if it cannot be opened.
    `is_shared`: the server that this one succeeds has it open and shares it."""
    database = Database(path, executor, clock, is_shared=is_shared)
    return Store(
        database,
        Files(database, limits),
        BatchQueue(Batches(database, limits)),
        Responses(database, responses),
        Conversations(database, responses),
        HeldStreams(rings, clock),
        Journal(database, rings),
    )


def open_named(
    path: Path, limits: StoreLimits, rings: RingLimits = DEFAULT_RINGS, *, is_shared: bool = False
) -> Store:
    """The store in the file that `--store` names, or that another server shares. Raises
    `StartupError`."""
    try:
        return open_store(path, limits, rings=rings, is_shared=is_shared)
    except StoreFailed as error:
        raise StartupError(str(error)) from error


def open_default(path: Path, limits: StoreLimits, rings: RingLimits = DEFAULT_RINGS) -> Store:
    """The store in that file; in memory, with a warning, if the file cannot be opened."""
    try:
        return open_store(path, limits, rings=rings)
    except StoreFailed as error:
        logger.warning(
            "%s; files, batches and responses are kept in memory and lost when this server ends: "
            "give it a file of its own with --store",
            error,
        )
        return open_store(None, limits, rings=rings)
