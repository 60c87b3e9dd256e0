"""The page tables of a step for FlashInfer's `plan`, copied to pinned memory.

A layout already has the tables; this module widens and stages them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from adapters.attention.flashinfer.ports import DeviceEvent
from engine.worker.cuda.step.graphs import mixed_sizes
from engine.worker.ports import Int32s, RaggedLayout, StepLimits

ALIGN = 16  # bytes; alignment of the tables in an arena
WIDTH = 32  # a captured batch size exceeds the largest step by less than this
PIECES = 12  # tables of a step in an arena, at most
DTYPES = {np.dtype(np.int32): torch.int32, np.dtype(np.int64): torch.int64}


@dataclass(frozen=True, slots=True)
class TableSizes:
    """Upper bounds of a step's tables; a page that requests share counts once for each.

    A captured step has up to `rows` requests, of which padding has one page each.
    """

    requests: int
    tokens: int
    pages: int
    rows: int

    @classmethod
    def of(cls, limits: StepLimits, page_size: int) -> "TableSizes":
        requests = -(-limits.max_requests // WIDTH) * WIDTH
        per_request = -(-limits.max_model_len // page_size)
        # Token shares may be rounded up once for each request.
        rows = max(requests, mixed_sizes(limits.max_tokens)[-1])
        return cls(requests, limits.max_tokens + requests, requests * per_request, rows)

    @property
    def arena_bytes(self) -> int:
        """Bytes for the slots of a step and all tables, of as many requests as rows."""
        words = self.pages + self.rows + 5 * (max(self.rows, self.tokens) + 2)
        return 4 * words + 8 * self.tokens + PIECES * ALIGN


@dataclass(frozen=True, slots=True)
class PageTables:
    """Tables of one launch of N requests, on the host. Lengths include the step's new tokens."""

    qo_indptr: Int32s  # [N + 1]
    kv_indptr: Int32s  # [N + 1]
    kv_len: Int32s  # [N]
    kv_last_page_len: Int32s  # [N]

    @classmethod
    def of(cls, layout: RaggedLayout) -> "PageTables":
        return cls(layout.qo_indptr, layout.kv_indptr, layout.kv_len, layout.kv_last_page_len)

    @property
    def num_rows(self) -> int:
        return int(self.qo_indptr[-1])

    @property
    def num_pages(self) -> int:
        return int(self.kv_indptr[-1])

    @property
    def max_rows(self) -> int:
        """The largest number of new tokens of a request."""
        return int(np.diff(self.qo_indptr).max())

    def widened(self, size: int) -> "PageTables":
        """The tables with empty requests behind the others, up to `size`."""
        count = size - len(self.kv_len)
        assert count >= 0, "more requests than the tables of a graph have"
        return PageTables(
            np.pad(self.qo_indptr, (0, count), "edge"),
            np.pad(self.kv_indptr, (0, count), "edge"),
            np.pad(self.kv_len, (0, count)),
            np.pad(self.kv_last_page_len, (0, count), constant_values=1),
        )


class PageTableArena:
    """Pinned memory for the tables of one step; enter it to fill it.

    Entering waits until the device has copied the previous contents.
    """

    def __init__(self, memory: Tensor, event: DeviceEvent) -> None:
        self._memory = memory  # [bytes] uint8
        self._used = 0
        self._event = event

    def __enter__(self) -> "PageTableArena":
        self._event.synchronize()
        self._used = 0
        return self

    def __exit__(self, *_: object) -> None:
        self._event.record()

    def put(self, values: NDArray[np.int32] | NDArray[np.int64]) -> Tensor:
        """Copy the values to pinned memory."""
        taken = self.take(values.nbytes)
        taken.numpy()[:] = np.ascontiguousarray(values).view(np.uint8)
        return taken.view(DTYPES[values.dtype])

    def take(self, num_bytes: int) -> Tensor:
        """Pinned memory that is copied to the device before this arena is filled again, uint8."""
        start = -(-self._used // ALIGN) * ALIGN
        end = start + num_bytes
        assert end <= len(self._memory), "the step is larger than its limits"
        self._used = end
        return self._memory[start:end]


class PageTableArenas:
    """Arenas used in rotation: the host fills one while the device copies from others."""

    def __init__(self, arenas: Sequence[PageTableArena]) -> None:
        self._arenas = arenas
        self._next = 0

    def next(self) -> PageTableArena:
        """The least recently used arena."""
        arena = self._arenas[self._next]
        self._next = (self._next + 1) % len(self._arenas)
        return arena
