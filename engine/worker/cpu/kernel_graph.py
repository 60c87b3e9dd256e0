"""Kernel calls recorded once and replayed by one native call, without any Python between them.

Theory of operation. Layers are Python that fills in operands and runs kernels, and from step to
step these calls are the same but for the number of rows: the same kernels over the same addresses.
While a graph is recorded each call is copied to the graph with its operands instead of running.
Outputs are written to the graph's memory, which stays allocated. Replayed after inputs were written
where the recorded ones were, the calls write outputs where the recorded ones were: the idea of a
CUDA graph. So whatever a recorded call points to must stay where it is: weights do, and every
intermediate tensor has to be allocated with `NativeThreadPool.empty`. What torch computes or
allocates meanwhile is not in the graph, which then must not be replayed (`TorchWatch`).

Each call over rows is recorded with a function that fits its operands to another number of rows. So
a graph of the most rows serves steps of all sizes (`resize`), unless some of its calls have another
number of rows than the step, or a fixed number of chunks. It cannot be recorded with one row: torch
may give a tensor with one row any stride from row to row.

A kernel that converts the rows which the call before it wrote, such as those of a norm, becomes one
call with it.
"""

import ctypes
from collections.abc import Callable
from functools import cached_property
from math import prod
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.worker.cpu.build import kernel
from engine.worker.cpu.kernels.joined import JoinedOperands, run_joined
from engine.worker.cpu.operands import make_reader, operands


@operands
class Call(ctypes.Structure):
    """One recorded kernel call."""

    kernel: int  # address
    operands: int  # address
    chunks: int
    ahead: int  # address of what the next linear reads first
    ahead_end: int


read_call = make_reader(Call)
CHUNKS = 2  # column of a table of calls
MAX_AHEAD_BYTES = 512 << 10  # half of a core's L2 cache
# Prefetched before a step's first kernel; more than 4 MiB made no difference on Zen 5 (32 MiB L3).
MAX_FIRST_BYTES = 8 << 20
MAX_GAP_BYTES = 4096  # between weights that are prefetched together


Fit: TypeAlias = Callable[[Any, int], int]


class KernelOutputs:
    """One buffer per kind of output, shared by all graphs of a thread pool.

    Sharing is safe because one graph is replayed at a time, and no kernel reads the output of an
    earlier call of its own kind.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def take(self, kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor at the start of its kind's buffer.

        A buffer that is too small is replaced; tensors in the old one keep it alive.
        """
        num_bytes = prod(shape) * dtype.itemsize
        buffer = self._buffers.get(kind)
        if buffer is None or len(buffer) < num_bytes:
            buffer = torch.empty(1 << max(num_bytes - 1, 63).bit_length(), dtype=torch.uint8)
            self._buffers[kind] = buffer
        return buffer[:num_bytes].view(dtype).view(shape)


class _RecordedCall(NamedTuple):
    """A call; `fit` sets its operands for a number of rows and returns the number of chunks."""

    function: int  # address of the kernel
    operands: ctypes.Structure
    chunks: int
    weights: Tensor | None  # the weights that it reads
    fit: Fit | None  # None for a fixed number of chunks
    has_row_chunks: bool  # whether its chunks have `rows_per_chunk` rows


class KernelGraph:
    """Recorded calls in order, and everything that must outlive them."""

    def __init__(self, memory: KernelOutputs, rows: int) -> None:
        """`rows` is the number of rows of the step; 0 if it will not be resized."""
        self._memory = memory
        self._rows = rows
        self._calls: list[_RecordedCall] = []
        self._outputs: list[Tensor | ctypes.Structure] = []  # and operands of joined calls
        self._table: NDArray[np.int64] = np.empty((0, 5), dtype=np.int64)
        self.is_resizable = rows > 1

    def __len__(self) -> int:
        return len(self._calls)

    def take(self, kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory for an output, as in `KernelOutputs.take`; stays allocated with the graph."""
        with torch._C.DisableTorchFunction():  # it stays allocated: nothing for a `TorchWatch`
            taken = self._memory.take(kind, shape, dtype)
        self._outputs.append(taken)
        return taken

    def add(
        self, function: int, operands: ctypes.Structure, chunks: int, weights: Tensor | None = None
    ) -> None:
        """Record a call with a copy of its operands, and the weights that it reads."""
        copied = type(operands).from_buffer_copy(operands)
        self._calls.append(_RecordedCall(function, copied, chunks, weights, None, False))
        self.is_resizable = False

    def add_rows(
        self,
        function: int,
        operands: ctypes.Structure,
        rows: int,
        fit: Fit,
        weights: Tensor | None = None,
        *,
        has_row_chunks: bool = False,
    ) -> None:
        """Record a call over rows with a copy of its operands, and the weights that it reads."""
        copied = type(operands).from_buffer_copy(operands)
        chunks = fit(copied, rows)
        call = _RecordedCall(function, copied, chunks, weights, fit, has_row_chunks)
        self._calls.append(call)
        self.is_resizable &= rows == self._rows

    def add_row_chunks(
        self, function: int, operands: Any, rows: int, fit: Fit, *, joins: bool
    ) -> None:
        """Record a call with `rows_per_chunk` rows in each chunk. One that `joins` reads only those
        rows of the last call's outputs that it writes itself: both become one call if they have the
        same rows."""
        before = self._calls[-1] if self._calls else None
        if not joins or before is None or not before.has_row_chunks or before.operands.rows != rows:
            self.add_rows(function, operands, rows, fit, has_row_chunks=True)
            return
        first: Any = self._calls.pop().operands
        second = type(operands).from_buffer_copy(operands)
        first.rows_per_chunk = second.rows_per_chunk = 1
        self._outputs += first, second
        joined = JoinedOperands(
            first=before.function,
            first_operands=ctypes.addressof(first),
            second=function,
            second_operands=ctypes.addressof(second),
        )

        def fit_both(operands: Any, rows: int) -> int:
            first.rows = second.rows = rows
            return fit(operands, rows)

        self.add_rows(kernel(run_joined).address, joined, rows, fit_both)

    def resize(self, rows: int) -> None:
        """Fit all calls to a step of so many rows, at most those that were recorded."""
        assert self.is_resizable, "its calls have other rows"
        self.table()[:, CHUNKS] = [
            0 if call.fit is None else call.fit(call.operands, rows) for call in self._calls
        ]

    @cached_property
    def first_weights(self) -> tuple[int, int]:
        """Start and end of the weights that are read first, as far as one lies behind the other."""
        start = end = 0
        for call in self._calls:
            each = call.weights
            if each is None:
                continue
            begin = each.data_ptr()
            if end and not end <= begin <= end + MAX_GAP_BYTES:
                break
            start, end = start or begin, begin + each.nbytes
            if end - start > MAX_FIRST_BYTES:
                break
        return start, min(end, start + MAX_FIRST_BYTES)

    def table(self) -> NDArray[np.int64]:
        """The calls as an array of `Call`, int64 `[calls, 5]`."""
        if len(self._table) != len(self._calls):
            rows, ahead = [], self.first_weights  # after the last linear: of the next step
            for call in reversed(self._calls):
                rows.append((call.function, ctypes.addressof(call.operands), call.chunks, *ahead))
                if call.weights is not None:
                    start = call.weights.data_ptr()
                    ahead = start, start + min(call.weights.nbytes, MAX_AHEAD_BYTES)
            self._table = np.array(rows[::-1], dtype=np.int64).reshape(-1, 5)
        return self._table
