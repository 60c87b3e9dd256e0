"""Store: files, batches and responses, in one database."""

import logging
from dataclasses import dataclass
from pathlib import Path

from engine.errors import StartupError
from gateway.errors import StoreFailed
from gateway.store.batch_queue import BatchQueue
from gateway.store.batches import Batches
from gateway.store.database import Database, StoreExecutor
from gateway.store.files import FileLimits, Files
from gateway.store.responses import ResponseLimits, Responses

DEFAULT_LIMITS = ResponseLimits()
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Store:
    """Shared by the routes and the batch runner. The opener closes it."""

    database: Database
    files: Files
    batch_queue: BatchQueue
    responses: Responses

    def close(self) -> None:
        self.database.close()


def open_store(
    path: Path | None,
    limits: FileLimits,
    executor: StoreExecutor | None = None,
    responses: ResponseLimits = DEFAULT_LIMITS,
) -> Store:
    """The store in that file, or in memory. Raises `StoreFailed` if it cannot be opened."""
    database = Database(path, executor)
    return Store(
        database,
        Files(database, limits),
        BatchQueue(Batches(database)),
        Responses(database, responses),
    )


def open_named(path: Path, limits: FileLimits) -> Store:
    """The store in the file that `--store` names. Raises `StartupError`."""
    try:
        return open_store(path, limits)
    except StoreFailed as error:
        raise StartupError(str(error)) from error


def open_default(path: Path, limits: FileLimits) -> Store:
    """The store in that file; in memory, with a warning, if the file cannot be opened."""
    try:
        return open_store(path, limits)
    except StoreFailed as error:
        logger.warning("%s; files, batches and responses are kept in memory", error)
        return open_store(None, limits)
