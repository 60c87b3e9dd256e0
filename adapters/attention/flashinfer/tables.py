"""The page tables of a step as FlashInfer's `plan` takes them, on the host and in pinned memory.

A layout has them already, under FlashInfer's names; what is left is to cut them in two for a split
launch and to bring them where the device can fetch them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from adapters.attention.flashinfer.ports import CudaEvent
from engine.worker.model.layout import Int32s, RaggedLayout
from engine.worker.ports import StepLimits

ALIGN = 16  # bytes, between the pieces of an arena
WIDTH = 32  # graphs are for at most so many requests more than a step can have
PIECES = 12  # put in an arena for a step, at most
DTYPES = {np.dtype(np.int32): torch.int32, np.dtype(np.int64): torch.int64}


@dataclass(frozen=True, slots=True)
class TableSizes:
    """The most that the tables of any step have; pages that requests share count for each."""

    requests: int
    tokens: int
    pages: int

    @classmethod
    def of(cls, limits: StepLimits, page_size: int) -> "TableSizes":
        requests = -(-limits.max_requests // WIDTH) * WIDTH
        per_request = -(-limits.max_model_len // page_size)
        # A step that shares its tokens out evenly may round up for each request.
        return cls(requests, limits.max_tokens + requests, requests * per_request)

    @property
    def arena_bytes(self) -> int:
        """Of all tables of a step, a split one too, and its slots."""
        words = self.pages + 4 * (self.requests + 2)
        return 4 * words + 8 * self.tokens + PIECES * ALIGN


@dataclass(frozen=True, slots=True)
class PageTables:
    """Of N requests in one launch; all on the host. Lengths count the tokens of this step too."""

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
    def most_rows(self) -> int:
        """Of one request."""
        return int(np.diff(self.qo_indptr).max())

    def split(self, count: int) -> tuple["PageTables", "PageTables"]:
        """The first `count` requests and the others, each with indices from 0 on."""
        first = PageTables(
            self.qo_indptr[: count + 1],
            self.kv_indptr[: count + 1],
            self.kv_len[:count],
            self.kv_last_page_len[:count],
        )
        rest = PageTables(
            self.qo_indptr[count:] - self.qo_indptr[count],
            self.kv_indptr[count:] - self.kv_indptr[count],
            self.kv_len[count:],
            self.kv_last_page_len[count:],
        )
        return first, rest


class PageTableArena:
    """Pinned memory for the tables of one step: entered while they are filled in and handed on.

    It is entered anew only when the device has fetched what was handed on before.
    """

    def __init__(self, memory: Tensor, event: CudaEvent) -> None:
        self._memory = memory  # [bytes] uint8
        self._bytes: NDArray[np.uint8] = memory.numpy()
        self._used = 0
        self._event = event

    def __enter__(self) -> "PageTableArena":
        self._event.synchronize()
        self._used = 0
        return self

    def __exit__(self, *_: object) -> None:
        self._event.record()

    def put(self, values: NDArray[np.int32] | NDArray[np.int64]) -> Tensor:
        """The same values in pinned memory."""
        start = -(-self._used // ALIGN) * ALIGN
        end = start + values.nbytes
        assert end <= len(self._bytes), "the step is larger than its limits"
        self._used = end
        self._bytes[start:end] = np.ascontiguousarray(values).view(np.uint8)
        return self._memory[start:end].view(DTYPES[values.dtype])


class PageTableArenas:
    """Some arenas in turn, so that the host fills one while the device fetches from others."""

    def __init__(self, arenas: Sequence[PageTableArena]) -> None:
        self._arenas = arenas
        self._next = 0

    def next(self) -> PageTableArena:
        """The one that was used the longest time ago."""
        arena = self._arenas[self._next]
        self._next = (self._next + 1) % len(self._arenas)
        return arena
