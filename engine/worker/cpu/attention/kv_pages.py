"""The pages of the KV cache as kernels see them."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from typing import NamedTuple

from numba import njit

from engine.worker.cpu.intrinsics import int64s


class KVPages(NamedTuple):
    """The pages of one KV head of a layer, and which of them a request has."""

    base: int
    scales: int
    page_bytes: int  # between pages of a head
    scale_bytes: int
    block_size: int
    table: int  # block ids, int64
    num_pages: int


@njit(inline="always")
def page_at(pages, number):
    """Address of page `number` of the request; of the last one for numbers beyond it."""
    block = int64s(pages.table + min(number, pages.num_pages - 1) * 8, 1)[0]
    return pages.base + block * pages.page_bytes
