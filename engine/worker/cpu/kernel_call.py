"""A kernel with its operands, as Python calls it."""

import ctypes
from collections.abc import Callable
from typing import Generic, TypeVar

from torch import Tensor

from engine.worker.cpu.build import kernel
from engine.worker.ports import ThreadPool

CHUNKS_PER_THREAD = 4

T = TypeVar("T", bound=ctypes.Structure)


class KernelCall(Generic[T]):
    """Runs one kernel on `operands`, whose fields the caller updates between calls.

    While a graph is recorded a call runs when the recording ends.
    """

    def __init__(
        self,
        pool: ThreadPool,
        function: Callable[..., None],
        operands: T,
        weights: Tensor | None = None,
    ) -> None:
        """`weights` are those that the kernel reads from memory in every call."""
        self.operands = operands
        self._weights = weights
        self._pool = pool
        self._kernel: int = kernel(function).address
        self._address = ctypes.addressof(operands)

    def __call__(self, chunks: int) -> None:
        if self._pool.graph is not None:
            self._pool.graph.add(self._kernel, self.operands, chunks, self._weights)
        else:
            self._pool.run(self._kernel, self._address, chunks)

    def over_rows(self, rows: int, *, joins: bool = False) -> None:
        """Run over all rows in chunks of `rows_per_chunk`, a few for each thread.

        A call that `joins` reads no other rows of the outputs of the call before it than it writes
        itself, so a graph may run both as one call.
        """
        share = -(-rows // (self._pool.threads * CHUNKS_PER_THREAD))
        self.operands.rows, self.operands.rows_per_chunk = rows, share
        chunks = -(-rows // share)
        if self._pool.graph is not None and self._weights is None:
            self._pool.graph.add_rows(self._kernel, self.operands, chunks, joins=joins)
        else:
            self(chunks)
