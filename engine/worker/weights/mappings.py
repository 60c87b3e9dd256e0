"""Pages of a checkpoint's mapped files that this process does not need any more."""

import sys
from collections.abc import Iterable
from pathlib import Path

from engine.transport.process_memory import Mapping, drop, mappings


def drop_pages(paths: Iterable[Path]) -> None:
    """Give back all pages of these files that this process has mapped; Linux only.

    What is read again comes from the system's page cache, or from the file. A mapping that was
    written to is left alone: its changes would be lost.
    """
    for mapping in _unwritten(paths):
        drop(range(mapping.start, mapping.stop))


def _unwritten(paths: Iterable[Path]) -> list[Mapping]:
    """The mappings of these files of which this process has no pages of its own."""
    if sys.platform != "linux":
        return []
    wanted = {str(path.resolve()) for path in paths}
    return [each for each in mappings() if each.path in wanted and not each.own_bytes]
