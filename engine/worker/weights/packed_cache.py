"""Packed weights cached on disk: a start packs them into a file, and later starts map that file.

All workers of a machine that map a file share its pages. A start that finds no usable file writes a
new one while it serves, or packs straight into the pages of one if memory is scarce.

A file belongs to one share of one checkpoint in one layout. Its header says from which files it was
made: their sizes, times and inodes, of which the system changes at least one whenever a file is
written or replaced. A file that is incomplete, damaged or made from something else is replaced.
Where none can be written the weights are packed at every start; both log one line.
"""

import hashlib
import json
import os
import shutil
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from engine.files import remove_abandoned
from engine.transport.process_memory import available_bytes
from engine.worker.model.kv.kv_tensors import size_text
from engine.worker.weights.mappings import CachedPages
from engine.worker.weights.packed_file import (
    READ_THREAD,
    MappedFile,
    NewFile,
    PackedFile,
    warn_not_cached,
)

VERSION = 2  # the version of the file format
SUFFIX = ".packed"
FREE_BYTES = 1 << 30  # so much of the disk stays free
READ_BYTES = 1 << 20  # the system reads only a part of a larger piece
_NAME_DIGITS = 24


@dataclass(frozen=True, slots=True)
class PackedCache:
    """The cache of one worker's share of a checkpoint; "" as the folder caches nothing.

    `files` are the checkpoint's; `share` is any numbers that identify the worker's part of it;
    `reader` identifies the code that reads the files. All files in the folder have at most
    `max_bytes` together: the least recently used are removed. If the worker `is_alone`, no other
    one of this server reads the same parts of the checkpoint.
    """

    folder: str = ""
    max_bytes: int = 0
    files: Sequence[Path] = ()
    share: Sequence[int] = ()
    reader: str = ""
    is_alone: bool = False

    @contextmanager
    def open(self, layout: str, expected_bytes: int) -> Iterator[PackedFile]:
        """The file for this layout, about `expected_bytes` long if it has to be written.

        A new file is kept if the block ends without an error.
        """
        if not self.folder or not self.files:
            yield PackedFile()
            return
        path, facts = self._path(layout), self._facts(layout)
        remove_abandoned(path.parent)
        if (found := MappedFile.open(path, facts)) is not None:
            yield found
            return
        read_ahead(self.files)
        new = self._create(path, facts, expected_bytes)
        if new is None:
            yield PackedFile()
            return
        try:
            yield new
            new.finish(path)
        finally:
            new.discard()  # unless finished

    def _path(self, layout: str) -> Path:
        identity = json.dumps([str(self.files[0].resolve()), *self.share, layout])
        digest = hashlib.sha256(identity.encode()).hexdigest()
        return Path(self.folder) / f"{digest[:_NAME_DIGITS]}{SUFFIX}"

    def _facts(self, layout: str) -> list[object]:
        """What identifies the contents, without reading the checkpoint's files."""
        stats = [(path.name, path.stat()) for path in self.files]
        seen = [
            [name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]
            for name, stat in stats
        ]
        return [VERSION, layout, self.reader, seen]

    def _create(self, path: Path, facts: object, expected_bytes: int) -> NewFile | None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._make_room(path, expected_bytes)
            pages = CachedPages(self.files, frees=self.is_alone)
            return NewFile(path.parent, facts, expected_bytes, pages)
        except OSError as error:
            warn_not_cached(error)
            return None

    def _make_room(self, path: Path, num_bytes: int) -> None:
        """Remove the least recently used files until `num_bytes` more fit. Raises `OSError` if they
        cannot fit."""
        if num_bytes > self.max_bytes:
            limit = f"--packed-cache-size {size_text(self.max_bytes)}"
            raise OSError(f"they need {size_text(num_bytes)}, more than {limit}")
        others = sorted(
            ((one.stat(), one) for one in path.parent.glob(f"*{SUFFIX}") if one != path),
            key=lambda pair: pair[0].st_mtime,
        )
        used = sum(stat.st_size for stat, _ in others)
        for stat, one in others:
            if used + num_bytes <= self.max_bytes:
                break
            one.unlink(missing_ok=True)
            used -= stat.st_size
        free = shutil.disk_usage(path.parent).free
        if free - num_bytes < FREE_BYTES:
            raise OSError(
                f"they need {size_text(num_bytes)}, and {size_text(free)} are free on the disk, of "
                f"which {size_text(FREE_BYTES)} are left free"
            )


def read_ahead(files: Sequence[Path]) -> None:
    """Have the system read these files, if they fit in memory, while kernels are compiled."""
    if sys.platform != "linux" or sum(path.stat().st_size for path in files) > available_bytes():
        return

    def read() -> None:
        for path in files:
            with suppress(OSError), path.open("rb") as file:
                for at in range(0, path.stat().st_size, READ_BYTES):
                    os.posix_fadvise(file.fileno(), at, READ_BYTES, os.POSIX_FADV_WILLNEED)

    threading.Thread(target=read, name=READ_THREAD, daemon=True).start()
