"""Memory of a process: what it can still use, what its start has used and serving does not need
(code of libraries, freed heap), and the heap that steps use again and again."""

import ctypes
import os
import resource
import sys
from array import array
from collections.abc import Iterator
from contextlib import suppress
from mmap import PAGESIZE
from pathlib import Path
from typing import BinaryIO, NamedTuple

SMAPS, MAPS, PAGEMAP = (Path("/proc/self") / name for name in ("smaps", "maps", "pagemap"))
PRESENT, SWAPPED, FILE = 1 << 63, 1 << 62, 1 << 61  # bits of a page in pagemap
ENTRY_BYTES = 8  # a page's entry in pagemap
MADV_DONTNEED, MADV_HUGEPAGE, MADV_POPULATE_READ = 4, 14, 22  # linux/mman.h
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # numbers of glibc's malloc.h
KEPT_BYTES = 128 << 20
LARGEST_HEAP_BLOCK = 32 << 20  # the most that glibc allows; larger blocks are mappings


class Mapping(NamedTuple):
    """A run of addresses, and its pages that are copies of our own."""

    start: int
    stop: int
    path: str
    own_bytes: int


def available_bytes() -> int:
    """Bytes of memory that this process can still use: free in the system, within its cgroup and
    within its address space (`ulimit -v`)."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        free = int(fields["MemAvailable"].split()[0]) * 1024
    else:
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and (most := limit.read_text().strip()) != "max":
        free = min(free, max(0, int(most) - int(used.read_text())))
    address_space, mapped = resource.getrlimit(resource.RLIMIT_AS)[0], Path("/proc/self/statm")
    if address_space != resource.RLIM_INFINITY and mapped.exists():
        pages = int(mapped.read_text().split()[0])
        free = min(free, max(0, address_space - pages * PAGESIZE))
    return free


def drop_library_pages() -> None:
    """Give back the code of all shared libraries, of which serving runs little; Linux only.

    Imports and the loading of kernels have read 100 MiB of torch's and LLVM's code. What runs again
    is mapped again, without reading the file.
    """
    if sys.platform != "linux":
        return
    with suppress(OSError), PAGEMAP.open("rb") as pagemap:
        for line in MAPS.read_text().splitlines():
            words = line.split(maxsplit=5)
            if len(words) < 6 or ".so" not in Path(words[5]).suffixes:
                continue
            start, stop = (int(address, 16) for address in words[0].split("-"))
            if not _has_own_pages(pagemap, start, stop):
                drop(range(start, stop))


def _has_own_pages(pagemap: BinaryIO, start: int, stop: int) -> bool:
    """Whether pages of a mapped file have been written to, by Documentation/admin-guide/mm/pagemap.
    smaps says it too, and takes four times as long: it counts all pages of the process."""
    pagemap.seek(start // PAGESIZE * ENTRY_BYTES)
    found = array("Q")
    found.frombytes(pagemap.read((stop - start) // PAGESIZE * ENTRY_BYTES))
    is_known = len(found) == (stop - start) // PAGESIZE
    own = (page for page in found if page & SWAPPED or page & (PRESENT | FILE) == PRESENT)
    return not is_known or any(own)


def trim_heap() -> None:
    """Give back what was allocated and freed, as by packing weights: 250 MiB; glibc only."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


def keep_heap() -> None:
    """Keep up to `KEPT_BYTES` of freed heap, the first 32 MiB of them in huge pages; glibc only.

    The layers of each prompt allocate and free the same buffers. By default glibc may return them
    to the system each time: up to 16,000 page faults in a prompt of 128 tokens, and 40 ms.
    """
    library = ctypes.CDLL(None)
    if sys.platform != "linux" or not hasattr(library, "mallopt"):
        return
    library.mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
    library.mallopt(M_MMAP_THRESHOLD, LARGEST_HEAP_BLOCK)
    library.malloc.restype = ctypes.c_void_p
    size = LARGEST_HEAP_BLOCK - PAGESIZE
    block = library.malloc(ctypes.c_size_t(size))
    if block is None:
        return
    start = -(-block // PAGESIZE) * PAGESIZE
    length = (block + size - start) // PAGESIZE * PAGESIZE
    library.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), MADV_HUGEPAGE)
    library.free(ctypes.c_void_p(block))


def drop(pages: range) -> None:
    """Give back pages of a mapped file, which must not have been written to."""
    madvise = ctypes.CDLL(None).madvise
    madvise(ctypes.c_void_p(pages.start), ctypes.c_size_t(len(pages)), MADV_DONTNEED)


def populate(addresses: range) -> None:
    """Read a part of a mapped file and map its pages, which is faster than page by page. Systems
    that cannot do it ignore it."""
    if sys.platform == "linux":
        start = addresses.start // PAGESIZE * PAGESIZE
        size = ctypes.c_size_t(addresses.stop - start)
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), size, MADV_POPULATE_READ)


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
