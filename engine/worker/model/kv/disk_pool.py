"""The disk tier: copies of cached KV blocks in a file, which outlive the process.

A folder belongs to one model in one numeric format, since its name is a digest of both. `blocks`
has a slot of fixed size for each copy, `headers` says of each slot which content it has and the
checksum of its bytes. A header is cleared before its slot is written and written after it, and a
copy is used only if header and checksum agree: one that a crash tore is ignored, never read as KV.

After an upgrade two servers use the same slots, until the former one has ended. Then a copy may be
overwritten by the other server's, or be a mixture of both: the same check finds that.

Writes are made by a thread. A read of a slot whose write is still queued takes the queued bytes.
"""

import fcntl
import logging
import os
import re
import shutil
import threading
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from hashlib import sha256
from pathlib import Path
from queue import SimpleQueue

import numpy as np

from engine.errors import StartupError
from engine.kv_store import Bytes
from engine.step import HASH_BYTES

logger = logging.getLogger(__name__)

VERSION = 1  # the version of the files' format
FOLDER_DIGITS = 24
HEADERS = "headers"  # the file that the server which uses a folder locks
UNUSED_DAYS = 30
HEADER = np.dtype([("hash", f"V{HASH_BYTES}"), ("checksum", "<u4"), ("is_used", "<u4")])
READERS = 4  # threads
MAX_QUEUED_BYTES = 256 << 20  # waiting for the disk; copies beyond that are not written


def folder_of(directory: Path, facts: str) -> Path:
    """Where the copies of one model and format lie; `facts` is all that their bytes depend on."""
    return directory / sha256(f"{VERSION} {facts}".encode()).hexdigest()[:FOLDER_DIGITS]


class DiskFiles:
    """The slots of the disk tier, `block_bytes` each."""

    def __init__(
        self, folder: Path, num_slots: int, block_bytes: int, *, is_shared: bool = False
    ) -> None:
        """Open or create the files, which are sparse and have this size from now on: a smaller one
        keeps the first slots. `is_shared`: the server before or after this one may have them open.
        Raises `StartupError`."""
        self.num_slots = num_slots
        self.block_bytes = block_bytes
        self._queue: SimpleQueue[tuple[int, bytes, Bytes] | None] = SimpleQueue()
        self._queued: dict[int, tuple[bytes, Bytes]] = {}
        self._lock = threading.Lock()
        self._is_empty = threading.Condition(self._lock)
        self._has_failed = False
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._headers = _open(folder / HEADERS)
            _lock(self._headers, is_shared=is_shared)
            self._blocks = _open(folder / "blocks")
            os.ftruncate(self._headers, num_slots * HEADER.itemsize)
            os.ftruncate(self._blocks, num_slots * block_bytes)
        except BlockingIOError:
            raise StartupError(f"--disk-kv {folder} is in use by another server") from None
        except OSError as error:
            raise StartupError(f"--disk-kv {folder}: {error.strerror}") from error
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="disk-kv-read")
        self._thread = threading.Thread(target=self._run, name="disk-kv-write", daemon=True)
        self._thread.start()

    def hashes(self) -> bytes:
        """The content hashes of all slots, in their order; zeros for unused slots."""
        raw = os.pread(self._headers, self.num_slots * HEADER.itemsize, 0)
        headers = np.frombuffer(raw.ljust(self.num_slots * HEADER.itemsize, b"\0"), HEADER).copy()
        headers["hash"][headers["is_used"] != 1] = bytes(HASH_BYTES)
        return headers["hash"].tobytes()

    def write(self, slot: int, block_hash: bytes, content: Bytes) -> None:
        """Queue a copy; if the disk does not keep up or has failed, the copy is not written."""
        with self._lock:
            if self._has_failed or len(self._queued) * self.block_bytes > MAX_QUEUED_BYTES:
                return
            self._queued[slot] = block_hash, content
        self._queue.put((slot, block_hash, content))

    def read(self, slots: Sequence[int], hashes: Sequence[bytes]) -> list[Bytes | None]:
        """The bytes of these slots; None for one that does not hold this content."""
        return list(self._readers.map(self._read, slots, hashes))

    def wait(self) -> None:
        """Wait until all queued copies are written."""
        with self._lock:
            self._is_empty.wait_for(lambda: not self._queued)

    def close(self) -> None:
        """Write what is queued and close the files."""
        self._queue.put(None)
        self._thread.join()
        self._readers.shutdown()
        os.close(self._blocks)
        os.close(self._headers)

    def _read(self, slot: int, block_hash: bytes) -> Bytes | None:
        with self._lock:
            queued = self._queued.get(slot)
        if queued is not None:
            return queued[1] if queued[0] == block_hash else None
        try:
            raw = os.pread(self._headers, HEADER.itemsize, slot * HEADER.itemsize)
            content = os.pread(self._blocks, self.block_bytes, slot * self.block_bytes)
        except OSError as error:
            logger.warning("a KV block could not be read from the disk: %s", error.strerror)
            return None
        if len(raw) < HEADER.itemsize or raw != _header(block_hash, content):
            return None
        return np.frombuffer(content, np.uint8)

    def _run(self) -> None:
        while (queued := self._queue.get()) is not None:
            slot, block_hash, content = queued
            try:
                if not self._has_failed:  # what was queued before is not tried either
                    self._write(slot, block_hash, content.tobytes())
            except OSError as error:
                self._has_failed = True
                logger.error(
                    "--disk-kv: KV blocks are no longer written to the disk: %s", error.strerror
                )
            with self._lock:
                if self._queued.get(slot, (b"",))[0] == block_hash:
                    del self._queued[slot]
                self._is_empty.notify_all()

    def _write(self, slot: int, block_hash: bytes, content: bytes) -> None:
        at = slot * HEADER.itemsize
        os.pwrite(self._headers, bytes(HEADER.itemsize), at)
        os.pwrite(self._blocks, content, slot * self.block_bytes)
        os.pwrite(self._headers, _header(block_hash, content), at)


def _header(block_hash: bytes, content: bytes) -> bytes:
    return np.array((block_hash, zlib.crc32(content), 1), HEADER).tobytes()


def has_folders(directory: Path) -> bool:
    """Whether any model or format has copies in the directory, which need not exist."""
    return directory.is_dir() and bool(_folders(directory))


def _folders(directory: Path) -> list[Path]:
    """The folders that a disk tier made, of any model and format."""
    names = re.compile(f"[0-9a-f]{{{FOLDER_DIGITS}}}")
    ours = (folder for folder in directory.iterdir() if names.fullmatch(folder.name))
    return [folder for folder in ours if (folder / HEADERS).is_file()]


def remove_unused(directory: Path, keep: Path, now: float) -> None:
    """Delete the folders of models and formats that no server has written to for `UNUSED_DAYS`, so
    that each update of a model does not leave its files forever."""
    for folder in _folders(directory):
        headers = folder / HEADERS
        if folder != keep and now - headers.stat().st_mtime > UNUSED_DAYS * 86400:
            with headers.open("rb") as file, suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
                logger.info("--disk-kv: removed %s, unused for %d days", folder, UNUSED_DAYS)


def _lock(file: int, *, is_shared: bool) -> None:
    """Keep other servers from the file. `is_shared`: once that is possible."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if not is_shared:
            raise
        waiting = partial(fcntl.flock, file, fcntl.LOCK_EX)
        threading.Thread(target=waiting, name="disk-kv-lock", daemon=True).start()


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
