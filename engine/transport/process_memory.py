"""Memory of a process that its start has used and serving does not need: code of libraries, and
freed heap."""

import ctypes
import sys
from collections.abc import Iterator
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


def drop_library_pages() -> None:
    """Give back the code of all shared libraries, of which serving runs little; Linux only.

    Imports and the loading of kernels have read 100 MiB of torch's and LLVM's code. What runs again
    is mapped again, without reading the file.
    """
    if sys.platform != "linux":
        return
    for mapping in mappings():
        if ".so" in Path(mapping.path).suffixes and not mapping.own_bytes:
            drop(range(mapping.start, mapping.stop))


def trim_heap() -> None:
    """Give back what was allocated and freed, as by packing weights: 250 MiB; glibc only."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


def drop(pages: range) -> None:
    """Give back pages of a mapped file, which must not have been written to."""
    madvise = ctypes.CDLL(None).madvise
    madvise(ctypes.c_void_p(pages.start), ctypes.c_size_t(len(pages)), MADV_DONTNEED)


def mappings() -> Iterator[Mapping]:
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
