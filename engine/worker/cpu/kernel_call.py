"""A kernel with its operands, as Python calls it."""

import ctypes
from collections.abc import Callable
from functools import cached_property
from typing import Any, Generic, TypeVar

from torch import Tensor

from engine.worker.cpu.build import kernel
from engine.worker.ports import ThreadPool

CHUNKS_PER_THREAD = 4

T = TypeVar("T", bound=ctypes.Structure)


class KernelCall(Generic[T]):
    """Runs one kernel on `operands`, whose fields the caller updates between calls.

    While a graph is recorded a call runs when the graph is replayed.
    """

    def __init__(
        self,
        pool: ThreadPool,
        function: Callable[..., None],
        operands: T,
        weights: Tensor | None = None,
        fit: Callable[[T, int], int] | None = None,
    ) -> None:
        """`weights` are those that the kernel reads from memory in every call. `fit` makes operands
        those of a call over so many rows and returns the number of its chunks; by default rows are
        shared out evenly."""
        self.operands = operands
        self._weights = weights
        self._pool = pool
        self._function = function
        self._address = ctypes.addressof(operands)
        self._has_row_chunks = fit is None
        self._fit = fit or self._share_out

    @cached_property
    def _kernel(self) -> int:
        """The kernel's address. It is compiled when it is first called, unless it was before."""
        address: int = kernel(self._function).address
        return address

    def __call__(self, chunks: int) -> None:
        if self._pool.graph is not None:
            self._pool.graph.add(self._kernel, self.operands, chunks, self._weights)
        else:
            self._pool.run(self._kernel, self._address, chunks)

    def over_rows(self, rows: int, *, joins: bool = False) -> None:
        """Run over so many rows.

        A call that `joins` reads no other rows of the outputs of the call before it than it writes
        itself, so a graph may run both as one call.
        """
        graph = self._pool.graph
        if graph is None:
            if chunks := self._fit(self.operands, rows):
                self._pool.run(self._kernel, self._address, chunks)
        elif self._has_row_chunks:
            graph.add_row_chunks(self._kernel, self.operands, rows, self._fit, joins=joins)
        else:
            graph.add_rows(self._kernel, self.operands, rows, self._fit, self._weights)

    def _share_out(self, operands: T, rows: int) -> int:
        return share_out(operands, rows, self._pool.threads)


def share_out(operands: Any, rows: int, threads: int) -> int:
    """Set `rows` and `rows_per_chunk`, so that each thread has a few chunks; returns their
    number."""
    share = -(-rows // (threads * CHUNKS_PER_THREAD))
    operands.rows, operands.rows_per_chunk = rows, share
    return -(-rows // share)
