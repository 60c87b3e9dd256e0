"""Pages of a checkpoint's mapped files, and how they are given back."""

import mmap
import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from engine.transport.process_memory import MAPS, drop, mappings, populate
from engine.worker.ports import Weight

PAGE = mmap.PAGESIZE
LARGEST_PIECE = 2 << 20  # a huge page


class FileMapping(NamedTuple):
    """A mapping of a file from `offset` on."""

    addresses: range
    path: Path
    offset: int
    inode: int


def file_mappings(files: Sequence[Path]) -> list[FileMapping]:
    """Where this process has mapped these files; Linux only."""
    names, found = {str(path.resolve()) for path in files}, []
    if not names or not MAPS.exists():
        return []
    for line in MAPS.read_text().splitlines():
        addresses, _, offset, _, inode, *path = line.split(maxsplit=5)
        if path and path[0] in names:
            run = range(*(int(address, 16) for address in addresses.split("-")))
            found.append(FileMapping(run, Path(path[0]), int(offset, 16), int(inode)))
    return found


class CachedRun(NamedTuple):
    """Addresses of a part of a mapped file."""

    mapping: FileMapping
    start: int
    stop: int


class CachedPages:
    """Reads a checkpoint's mapped files, and gives back the memory in which the system cached them.

    It is then used for what is allocated next. Memory that was not used before can be expensive: on
    a virtual machine whose host takes free memory back, up to 2.5 s per GiB.
    """

    def __init__(self, files: Sequence[Path] = (), *, frees: bool = True) -> None:
        """The files are mapped already. Without `frees` nothing is given back."""
        self._files = files
        self._frees = frees
        self._starts = dict[int, int]()  # runs that were given back: their start by their end
        self._stops = dict[int, int]()  # their end by their start

    @cached_property
    def _mappings(self) -> list[FileMapping]:
        return file_mappings(self._files)

    def read(self, weight: Weight) -> list[CachedRun]:
        """The parts of the files in which a weight is, which are read now."""
        tensors = [weight] if isinstance(weight, Tensor) else weight.tensors.values()
        runs = [
            CachedRun(mapping, each.data_ptr(), each.data_ptr() + each.nbytes)
            for each in tensors
            for mapping in self._mappings
            if each.is_contiguous() and each.data_ptr() in mapping.addresses
        ]
        for _, start, stop in runs:
            populate(range(start, stop))
        return runs

    def free(self, runs: Iterable[CachedRun]) -> None:
        """Free whole pages, which are read again from the disk if that is ever needed.

        The system frees only what it has cached as one piece, of up to `LARGEST_PIECE`, and nothing
        that another process has mapped. So neighbours are freed again together.
        """
        for mapping, start, stop in runs if self._frees else ():
            first, last = self._starts.pop(start, start), self._stops.pop(stop, stop)
            self._stops[first], self._starts[last] = last, first
            first, last = max(first, start - LARGEST_PIECE), min(last, stop + LARGEST_PIECE)
            pages = range(-(-first // PAGE) * PAGE, last // PAGE * PAGE)
            if pages:
                drop(pages)
                with suppress(OSError), mapping.path.open("rb") as file:  # or it was removed
                    at = mapping.offset + pages.start - mapping.addresses.start
                    os.posix_fadvise(file.fileno(), at, len(pages), os.POSIX_FADV_DONTNEED)


def drop_pages(views: Iterable[Tensor]) -> None:
    """Give back all pages of the mapped files that these tensors are views of; Linux only.

    What is read again comes from the system's page cache, or from the file. A mapping that was
    written to is left alone: its changes would be lost. The tensors keep the files mapped
    meanwhile. Mappings of others are not touched: when one ends, another thread may get its
    addresses before they are dropped.
    """
    if sys.platform != "linux":
        return
    held = [(view, view.untyped_storage().data_ptr()) for view in views]
    for mapping in mappings():
        is_ours = any(mapping.start <= address < mapping.stop for _, address in held)
        if is_ours and not mapping.own_bytes:
            drop(range(mapping.start, mapping.stop))
