"""Memory that a start has used and serving does not need: pages of files, and freed heap."""

import ctypes
import sys
from collections.abc import Iterable, Iterator
from mmap import MADV_DONTNEED, PAGESIZE
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

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
    for mapping in _unwritten(paths):
        drop(range(mapping.start, mapping.stop))


def drop_library_pages() -> None:
    """Give back the code of all shared libraries, of which serving runs little; Linux only.

    Imports and the loading of kernels have read 100 MiB of torch's and LLVM's code. What runs again
    is mapped again, without reading the file.
    """
    if sys.platform != "linux":
        return
    for mapping in _mappings():
        if ".so" in Path(mapping.path).suffixes and not mapping.own_bytes:
            drop(range(mapping.start, mapping.stop))


def trim_heap() -> None:
    """Give back what was allocated and freed, as by packing weights: 250 MiB; glibc only."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


def file_pages(tensors: Iterable["Tensor"], paths: Iterable[Path]) -> list[range]:
    """The addresses of those pages of mapped files that hold nothing but one of these tensors.

    Empty for tensors that are not views of these files.
    """
    found = []
    for tensor in tensors:
        start, stop = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        pages = range(-(-start // PAGESIZE) * PAGESIZE, stop // PAGESIZE * PAGESIZE)
        if any(each.start <= start and stop <= each.stop for each in _unwritten(paths)):
            found.append(pages)
    return found


def drop(pages: range) -> None:
    """Give back pages of a mapped file, which must not have been written to."""
    madvise = ctypes.CDLL(None).madvise
    madvise(ctypes.c_void_p(pages.start), ctypes.c_size_t(len(pages)), MADV_DONTNEED)


def _unwritten(paths: Iterable[Path]) -> list[Mapping]:
    """The mappings of these files of which this process has no pages of its own."""
    if sys.platform != "linux":
        return []
    wanted = {str(path.resolve()) for path in paths}
    return [each for each in _mappings() if each.path in wanted and not each.own_bytes]


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
