"""Kernel calls recorded once and replayed by one native call, without any Python between them.

Theory of operation. Layers are Python that fills in operands and runs kernels, and for steps of
one shape these calls are the same each time: the same kernels over the same addresses. While a
graph is recorded each call is copied to the graph with its operands instead of running; all run
when the recording ends. Outputs are written to the graph's memory, which stays allocated. Replayed
later, after new inputs were written where the recorded ones were, the calls write new outputs where
the recorded ones were: the idea of a CUDA graph. So whatever a recorded call points to must stay
where it is: weights do, and every intermediate tensor has to be allocated with
`NativeThreadPool.empty`.

A kernel that converts the rows which the call before it wrote, such as those of a norm, becomes one
call with it.
"""

import ctypes
from functools import cached_property
from math import prod

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
MAX_AHEAD_BYTES = 512 << 10  # half of a core's L2 cache
# Prefetched before a step's first kernel; more than 4 MiB made no difference on Zen 5 (32 MiB L3).
MAX_FIRST_BYTES = 8 << 20
MAX_GAP_BYTES = 4096  # between weights that are prefetched together


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


class KernelGraph:
    """Recorded calls in order, and everything that must outlive them."""

    def __init__(self, memory: KernelOutputs) -> None:
        self._memory = memory
        self._calls: list[tuple[int, int, int]] = []
        self._weights: list[Tensor | None] = []  # that each call reads
        self._operands: list[ctypes.Structure] = []
        self._last_rows: ctypes.Structure | None = None  # operands of the last call if over rows
        self._outputs: list[Tensor] = []
        self._table: NDArray[np.int64] = np.empty((0, 5), dtype=np.int64)

    def __len__(self) -> int:
        return len(self._calls)

    def take(self, kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory for an output, as in `KernelOutputs.take`; stays allocated with the graph."""
        taken = self._memory.take(kind, shape, dtype)
        self._outputs.append(taken)
        return taken

    def add(
        self, function: int, operands: ctypes.Structure, chunks: int, weights: Tensor | None = None
    ) -> None:
        """Record a call with a copy of its operands, and the weights that it reads."""
        copied = type(operands).from_buffer_copy(operands)
        self._operands.append(copied)
        self._calls.append((function, ctypes.addressof(copied), chunks))
        self._weights.append(weights)
        self._last_rows = None

    def add_rows(
        self, function: int, operands: ctypes.Structure, chunks: int, *, joins: bool
    ) -> None:
        """Record a call over rows. One that `joins` reads only those rows of the last call's
        outputs that it writes itself: both become one call if they have the same rows."""
        before = self._last_rows
        if not joins or before is None or before.rows != operands.rows:
            self.add(function, operands, chunks)
            self._last_rows = self._operands[-1]
            return
        first, first_operands, _ = self._calls.pop()
        self._weights.pop()
        second = type(operands).from_buffer_copy(operands)
        self._operands.append(second)
        joined = JoinedOperands(
            first=first,
            first_operands=first_operands,
            second=function,
            second_operands=ctypes.addressof(second),
            rows=operands.rows,
            rows_per_chunk=operands.rows_per_chunk,
        )
        before.rows_per_chunk = second.rows_per_chunk = 1
        self.add(kernel(run_joined).address, joined, chunks)

    @cached_property
    def first_weights(self) -> tuple[int, int]:
        """Start and end of the weights that are read first, as far as one lies behind the other."""
        start = end = 0
        for each in self._weights:
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
            for call, weights in zip(reversed(self._calls), reversed(self._weights), strict=True):
                rows.append((*call, *ahead))
                if weights is not None:
                    start = weights.data_ptr()
                    ahead = start, start + min(weights.nbytes, MAX_AHEAD_BYTES)
            self._table = np.array(rows[::-1], dtype=np.int64)
        return self._table
