"""Pages of mapped files that were read once and need not stay in this process's memory."""

import ctypes
import sys
from collections.abc import Iterable, Iterator
from mmap import MADV_DONTNEED
from pathlib import Path
from typing import NamedTuple

SMAPS = Path("/proc/self/smaps")


class Mapping(NamedTuple):
    """A run of addresses, and its pages that are copies of our own."""

    start: int
    stop: int
    path: str
    own_bytes: int


def drop_pages(paths: Iterable[Path]) -> None:
    """Give back all pages of these files that this process has mapped; Linux only.

    What is read again comes from the system's page cache, or from the file. A mapping that was
    written to is left alone: its changes would be lost.
    """
    if sys.platform != "linux":
        return
    wanted = {str(path.resolve()) for path in paths}
    madvise = ctypes.CDLL(None).madvise
    for mapping in _mappings():
        if mapping.path in wanted and not mapping.own_bytes:
            length = ctypes.c_size_t(mapping.stop - mapping.start)
            madvise(ctypes.c_void_p(mapping.start), length, MADV_DONTNEED)


def _mappings() -> Iterator[Mapping]:
    """All mappings of this process that are of files."""
    start = stop = 0
    path = ""
    for line in SMAPS.read_text().splitlines():
        words = line.split(maxsplit=5)
        if "-" in words[0] and not words[0].endswith(":"):
            start, stop = (int(address, 16) for address in words[0].split("-"))
            path = words[5] if len(words) > 5 else ""
        elif words[0] == "Anonymous:" and path.startswith("/"):
            yield Mapping(start, stop, path, 1024 * int(words[1]))
