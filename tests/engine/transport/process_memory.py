"""What of a file is in the memory of this process, and in the system's cache, and how often its
buffers cause faults."""

import ctypes
import mmap
import os
import resource
import sys
from pathlib import Path

from engine.transport.process_memory import SMAPS, keep_heap

SIZE = 1 << 20


def resident(path: Path) -> int:
    """Bytes of the file in this process's memory."""
    total, is_ours = 0, False
    for line in SMAPS.read_text().splitlines():
        words = line.split(maxsplit=5)
        if "-" in words[0] and not words[0].endswith(":"):
            is_ours = len(words) > 5 and words[5] == str(path)
        elif words[0] == "Rss:" and is_ours:
            total += 1024 * int(words[1])
    return total


def cached_pages(path: Path) -> set[int]:
    """The numbers of the file's pages that the system has cached."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapping:
        flags = (ctypes.c_ubyte * -(-len(mapping) // mmap.PAGESIZE))()
        first = ctypes.c_char.from_buffer(mapping)
        address, size = ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(len(mapping))
        assert ctypes.CDLL(None).mincore(address, size, flags) == 0
        del first
        return {number for number, flag in enumerate(flags) if flag & 1}


def frees_cached_pages(folder: Path) -> bool:
    """Whether the system frees single cached pages of files in this folder: not those of a tmpfs,
    nor of a file system that caches larger pieces."""
    path = folder / "probe"
    write_to_disk(path, bytes(64 * mmap.PAGESIZE))
    with path.open("rb") as file:
        at, size = 5 * mmap.PAGESIZE, 20 * mmap.PAGESIZE
        os.posix_fadvise(file.fileno(), at, size, os.POSIX_FADV_DONTNEED)
    return cached_pages(path).isdisjoint(range(5, 25))


def write_to_disk(path: Path, content: bytes) -> None:
    """Write a file page by page, as which it is then cached, and wait: pages that are not on the
    disk stay cached."""
    with path.open("wb", buffering=0) as file:
        for at in range(0, len(content), mmap.PAGESIZE):
            file.write(content[at : at + mmap.PAGESIZE])
        os.fsync(file.fileno())


def page_faults() -> int:
    """Page faults of this process for which nothing was read."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def faults_of_buffers(keeps: bool) -> None:
    """Write the page faults of four buffers of 12 MiB that are allocated and freed 10 times, after
    the first time."""
    if keeps:
        keep_heap()
    before = 0
    for round_number in range(11):
        buffers = [bytearray(12 * SIZE) for _ in range(4)]
        del buffers
        if round_number == 0:
            before = page_faults()
    sys.stdout.write(f"{page_faults() - before}\n")
