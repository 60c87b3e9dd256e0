"""Times each kernel of a worker's steps where it runs: in whole steps, on all threads.

Each call of a kernel is replaced by a call of `run_timed`, which runs it and notes the time of
every chunk. So a call's time is split into that of its chunks, and that in which threads wait for
the last chunk, or for the next call.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
import ctypes
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from numba import cfunc, njit, types
from numpy.typing import NDArray

from engine.worker.cpu.attention.paged_kernels import AttentionOperands
from engine.worker.cpu.attention.rope_and_cache_write import RopeWriteOperands
from engine.worker.cpu.build import KERNEL, _kernels
from engine.worker.cpu.intrinsics import call_kernel, int64s
from engine.worker.cpu.kernel_graph import KernelGraph
from engine.worker.cpu.kernels.elementwise import ActivationOperands, NormOperands
from engine.worker.cpu.kernels.joined import JoinedOperands
from engine.worker.cpu.kernels.linears.linear import InputOperands, LinearOperands
from engine.worker.cpu.kernels.recurrence import ScanOperands
from engine.worker.cpu.kernels.sampling import ArgmaxOperands
from engine.worker.cpu.operands import make_reader, operands
from engine.worker.cpu.thread_pool import NativeThreadPool

MONOTONIC = 1  # the clock of `time.monotonic_ns`
ROW = 8  # int64 of a thread's times: a cache line
NAMES: dict[Any, str] = {
    ActivationOperands: "activation",
    ArgmaxOperands: "argmax",
    NormOperands: "norm",
    RopeWriteOperands: "RoPE and cache write",
}

_clock = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.int64))


@operands
class TimedOperands(ctypes.Structure):
    """A kernel call whose chunks are timed, each after running `before` times untimed."""

    kernel: int
    operands: int
    before: int
    times: int  # int64 [threads, ROW]: nanoseconds in chunks, end of the last chunk, scratch


_timed_operands = make_reader(TimedOperands)


@njit(inline="always")
def _now(at):
    """Nanoseconds; 16 bytes at `at` are overwritten."""
    _clock(MONOTONIC, at)
    found = int64s(at, 2)
    return found[0] * 1_000_000_000 + found[1]


def run_timed(operands, chunk, thread):
    """A chunk of `TimedOperands`."""
    a = _timed_operands(operands)
    for _ in range(a.before):
        call_kernel(a.kernel, a.operands, chunk, thread)
    at = a.times + thread * ROW * 8
    began = _now(at + 16)
    call_kernel(a.kernel, a.operands, chunk, thread)
    times = int64s(at, 2)
    times[1] = _now(at + 16)
    times[0] += times[1] - began


class Call(NamedTuple):
    """One timed call: elapsed seconds, and those of its chunks, as a mean of all threads."""

    name: str
    seconds: float
    busy: float
    elements: int  # of a linear's weights
    rows: int  # that a linear multiplies them by
    states: int  # numbers of a recurrent layer's state


class KernelTimer:
    """Times the kernels of a pool that only `RecordedDecoder` and layers run."""

    def __init__(self, pool: NativeThreadPool) -> None:
        self._pool, self._plain_run, self._plain_replay = pool, pool.run, pool.replay
        self._timed = cfunc(KERNEL, nogil=True)(run_timed)
        self._kinds: dict[int, type[ctypes.Structure]] = {}  # of operands, by kernel
        self._calls: list[Call] = []
        self._before = 0

    @contextmanager
    def timing(self, *, in_cache: bool = False) -> Iterator[list[Call]]:
        """Time the kernels that are called inside the block. `in_cache` times the second of two
        runs of each chunk, whose memory the first has read; results are wrong then."""
        self._before, self._calls = int(in_cache), []
        pool: Any = self._pool
        pool.run, pool.replay = self._run, self._replay
        try:
            yield self._calls
        finally:
            pool.run, pool.replay = self._plain_run, self._plain_replay

    def _run(self, kernel: int, address: int, chunks: int) -> None:
        kind = self._kinds.get(kernel)
        known = {} if kind is None else {address: kind.from_address(address)}
        times = np.zeros((1, self._pool.threads, ROW), dtype=np.int64)
        timed = TimedOperands(kernel, address, self._before, times.ctypes.data)
        began = time.monotonic_ns()
        self._plain_run(self._timed.address, ctypes.addressof(timed), chunks)
        self._keep([(kernel, address)], known, times, began)

    def _replay(self, graph: KernelGraph) -> None:
        joined = [each for each in graph._outputs if isinstance(each, ctypes.Structure)]
        known = {
            ctypes.addressof(each): each
            for each in [*joined, *(call.operands for call in graph._calls)]
        }
        table = graph.table().copy()
        calls = [(int(kernel), int(address)) for kernel, address, *_ in table]
        pairs = [*calls]
        for both in (each for each in known.values() if isinstance(each, JoinedOperands)):
            pairs += (both.first, both.first_operands), (both.second, both.second_operands)
        self._kinds |= {kernel: type(known[at]) for kernel, at in pairs}
        times = np.zeros((len(table), self._pool.threads, ROW), dtype=np.int64)
        timed = (TimedOperands * len(table))(
            *(
                TimedOperands(kernel, address, self._before, here.ctypes.data)
                for (kernel, address), here in zip(calls, times, strict=True)
            )
        )
        table[:, 0] = self._timed.address
        table[:, 1] = ctypes.addressof(timed) + ctypes.sizeof(TimedOperands) * np.arange(len(table))
        self._pool._first_weights = graph.first_weights
        began = time.monotonic_ns()
        self._pool._replay(self._pool._control, int(table.ctypes.data), len(table))
        self._keep(calls, known, times, began)

    def _keep(
        self,
        calls: list[tuple[int, int]],
        known: dict[int, Any],
        times: NDArray[np.int64],
        began: int,
    ) -> None:
        """Note calls of a kernel and its operands, both addresses."""
        for (kernel, address), here in zip(calls, times, strict=True):
            ended, busy = int(here[:, 1].max()), float(here[:, 0].mean())
            if ended == 0:  # without chunks
                continue
            nanoseconds, began = ended - began, ended
            found = known.get(address)
            elements = rows = states = 0
            if isinstance(found, LinearOperands):
                elements, rows = found.inputs * found.outputs, found.rows
            elif isinstance(found, ScanOperands):
                states = found.heads * found.key_dim * found.value_dim
            name, own = name_of(kernel, address, known), (nanoseconds * 1e-9, busy * 1e-9)
            self._calls.append(Call(name, *own, elements, rows, states))


def name_of(kernel: int, address: int, known: dict[int, Any]) -> str:
    """What a call computes, by its operands or, as with recurrent layers, by its kernel."""
    found = known.get(address)
    if isinstance(found, LinearOperands):
        return f"linear {found.inputs} → {found.outputs}"
    if isinstance(found, InputOperands):
        return f"conversion of {found.width}"
    if isinstance(found, AttentionOperands):
        return "attention" if found.tables else "merge of attention"
    if isinstance(found, JoinedOperands):
        first = name_of(found.first, found.first_operands, known)
        return f"{first}, {name_of(found.second, found.second_operands, known)}"
    names = {made.address: function.__name__ for function, made in _kernels.items()}
    return NAMES.get(type(found)) or names[kernel].replace("_", " ")
