"""Pages of a checkpoint's mapped files that this process does not need any more."""

import sys
from collections.abc import Iterable
from mmap import PAGESIZE
from pathlib import Path
from typing import TYPE_CHECKING

from engine.transport.process_memory import Mapping, drop, mappings

if TYPE_CHECKING:
    from torch import Tensor


def drop_pages(paths: Iterable[Path]) -> None:
    """Give back all pages of these files that this process has mapped; Linux only.

    What is read again comes from the system's page cache, or from the file. A mapping that was
    written to is left alone: its changes would be lost.
    """
    for mapping in _unwritten(paths):
        drop(range(mapping.start, mapping.stop))


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


def _unwritten(paths: Iterable[Path]) -> list[Mapping]:
    """The mappings of these files of which this process has no pages of its own."""
    if sys.platform != "linux":
        return []
    wanted = {str(path.resolve()) for path in paths}
    return [each for each in mappings() if each.path in wanted and not each.own_bytes]
