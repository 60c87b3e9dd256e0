"""`podway serve --record FILE`: the engine's events as JSON lines, written by a thread.

The event loop only puts rows into a queue. If the disk fails or falls behind, the recording ends
with an error in the log; serving goes on.
"""

import contextlib
import logging
import queue
import secrets
import threading
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import TextIO

from engine.control.event_recorder import EventRecorder, RecordingHeader, Row, render
from engine.errors import StartupError

logger = logging.getLogger(__name__)

MAX_BACKLOG = 200_000  # rows in the queue; some minutes of a busy server
FLUSH_SECONDS = 1.0
_NAME_BYTES = 8
_KEY_BYTES = 32


class RecordingFile:
    """Writes rows to a file in a thread of its own; `put` does not block."""

    def __init__(self, file: TextIO, path: Path) -> None:
        self._file = file
        self._path = path
        self._rows: queue.SimpleQueue[Row | None] = queue.SimpleQueue()
        self._key = secrets.token_bytes(
            _KEY_BYTES
        )  # so that hashes cannot be matched with other data
        self._has_stopped = False
        self._thread = threading.Thread(target=self._run, name="record", daemon=True)
        self._thread.start()

    def put(self, row: Row) -> None:
        """Queue a row; dropped once the recording has failed."""
        if self._has_stopped:
            return
        self._rows.put(row)
        if self._rows.qsize() > MAX_BACKLOG:
            self._stop("the disk does not keep up")

    def close(self) -> None:
        """Write all queued rows and close the file."""
        self._rows.put(None)
        self._thread.join()
        with contextlib.suppress(OSError):  # already logged
            self._file.close()

    def _run(self) -> None:
        try:
            while self._write_batch():
                self._file.flush()
            self._file.flush()
        except OSError as error:
            self._stop(error.strerror or str(error))

    def _write_batch(self) -> bool:
        """Write rows until the queue is empty for a second; False after the last row."""
        row = self._rows.get()
        for _ in range(MAX_BACKLOG):
            if row is None:
                return False
            if not self._has_stopped:
                self._file.write(render(row, self._anonymize) + "\n")
            try:
                row = self._rows.get(timeout=FLUSH_SECONDS)
            except queue.Empty:
                return True
        return True

    def _anonymize(self, what: bytes | str) -> str:
        """A keyed hash: equal content has equal names within this file only."""
        data = what.encode() if isinstance(what, str) else what
        return blake2b(data, digest_size=_NAME_BYTES, key=self._key).hexdigest()

    def _stop(self, reason: str) -> None:
        if not self._has_stopped:
            self._has_stopped = True
            logger.error("the recording %s has stopped: %s", self._path, reason)


@contextlib.contextmanager
def recording(path: Path, header: RecordingHeader) -> Iterator[EventRecorder]:
    """An observer that records to `path` inside its block. Raises `StartupError`."""
    try:
        file = path.open("w", encoding="utf-8")
        file.write(header.line() + "\n")
    except OSError as error:
        raise StartupError(f"cannot write the recording {path}: {error.strerror}") from error
    record = RecordingFile(file, path)
    try:
        yield EventRecorder(record.put, header.kv.block_size)
    finally:
        record.close()
