"""`podway serve --record FILE`: the engine's events as JSON lines, written by a thread.

The loop only puts rows into a queue. A disk that fails or falls behind ends the recording with
one line in the log, and never the serving.
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

MAX_BACKLOG = 200_000  # rows; some minutes of a busy server
FLUSH_SECONDS = 1.0
_NAME_BYTES = 8
_KEY_BYTES = 32


class RecordingFile:
    """Rows on their way to a file. `put` from the loop; the rest happens in the thread."""

    def __init__(self, file: TextIO, path: Path) -> None:
        self._file = file
        self._path = path
        self._rows: queue.SimpleQueue[Row | None] = queue.SimpleQueue()
        self._key = secrets.token_bytes(_KEY_BYTES)  # so that names are of no use elsewhere
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="record", daemon=True)
        self._thread.start()

    def put(self, row: Row) -> None:
        """Have a row written; dropped once the recording has failed."""
        if self._is_over:
            return
        self._rows.put(row)
        if self._rows.qsize() > MAX_BACKLOG:
            self._give_up("the disk does not keep up")

    def close(self) -> None:
        """Write what was put so far, and close the file."""
        self._rows.put(None)
        self._thread.join()
        with contextlib.suppress(OSError):  # what could not be flushed was told of
            self._file.close()

    def _run(self) -> None:
        try:
            while self._write_batch():
                self._file.flush()
            self._file.flush()
        except OSError as error:
            self._give_up(error.strerror or str(error))

    def _write_batch(self) -> bool:
        """Write rows for a while, or until there are none; False after the last one."""
        row = self._rows.get()
        for _ in range(MAX_BACKLOG):
            if row is None:
                return False
            if not self._is_over:
                self._file.write(render(row, self._name) + "\n")
            try:
                row = self._rows.get(timeout=FLUSH_SECONDS)
            except queue.Empty:
                return True
        return True

    def _name(self, what: bytes | str) -> str:
        """The same content has the same name, in this file alone."""
        data = what.encode() if isinstance(what, str) else what
        return blake2b(data, digest_size=_NAME_BYTES, key=self._key).hexdigest()

    def _give_up(self, reason: str) -> None:
        if not self._is_over:
            self._is_over = True
            logger.error("the recording %s ends early: %s", self._path, reason)


@contextlib.contextmanager
def recording(path: Path, header: RecordingHeader) -> Iterator[EventRecorder]:
    """An observer that writes to `path` until the block is left; raises `StartupError`."""
    try:
        file = path.open("w", encoding="utf-8")
        file.write(header.line() + "\n")
    except OSError as error:
        raise StartupError(f"cannot write the recording {path}: {error.strerror}") from error
    record = RecordingFile(file, path)
    try:
        yield EventRecorder(record.put, header.block_size)
    finally:
        record.close()
