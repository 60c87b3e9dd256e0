"""Pages of a checkpoint's mapped files that this process does not need any more."""

import sys
from collections.abc import Iterable

from torch import Tensor

from engine.transport.process_memory import drop, mappings


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
