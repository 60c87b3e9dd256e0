"""The limits of this machine's cores and memory, measured by the kernels of `kernels.limits`."""

# mypy: disable-error-code="no-untyped-call"
import ctypes
import time
from collections.abc import Callable
from itertools import cycle
from statistics import median
from typing import Any, NamedTuple

import torch
from numba import cfunc

from engine.worker.cpu.build import KERNEL
from engine.worker.cpu.kernels.limits import (
    PEAKS,
    PeakOperands,
    ReadOperands,
    make_peak_kernel,
    make_read_kernel,
)
from engine.worker.cpu.pages import WeightPages
from engine.worker.cpu.thread_pool import NativeThreadPool

READ_BYTES = 1 << 30  # far more than any cache
WINDOW_BYTES = 128 << 20  # bytes of one measurement; the next one reads other memory
CHUNK_BYTES = 256 << 10
STREAMS_AND_PREFETCH = ((1, 512), (2, 0), (2, 512), (4, 0), (4, 2048))
REPEATS = 8
NUM_WHOLE_READS = 3  # the fastest patterns of the windows take turns in reads of a step's bytes
PEAK_ITERATIONS = 20_000
CHUNKS_PER_THREAD = 4


class Peak(NamedTuple):
    """The best rate, bytes or operations per second, and how it was reached."""

    rate: float
    by: str


class Pattern(NamedTuple):
    """One way to read memory: streams and prefetch of each thread, and the threads."""

    streams: int
    ahead: int  # bytes
    pool: NativeThreadPool

    def __str__(self) -> str:
        threads = self.pool.threads
        return f"{self.streams} streams, prefetch {self.ahead} bytes, {threads} threads"


class PlainReads:
    """Streaming reads of memory that does nothing else, in the patterns that are fastest here."""

    def __init__(self, threads: int) -> None:
        """Allocates `READ_BYTES` and measures windows of it in all patterns."""
        self._memory = WeightPages(slab_bytes=READ_BYTES).take((READ_BYTES,), torch.uint8).fill_(1)
        self._total = torch.zeros(1, dtype=torch.int64)
        self._kernels = {each: _compile(make_read_kernel(*each)) for each in STREAMS_AND_PREFETCH}
        self._at = 0  # where the next read begins
        rates = self._measure_windows(threads)
        best = max(rates, key=lambda each: max(rates[each]))
        self.best_window = Peak(max(rates[best]), str(best))
        fastest = sorted(rates, key=lambda each: median(rates[each]), reverse=True)
        self._turns = cycle(fastest[:NUM_WHOLE_READS])

    def seconds(self, num_bytes: int) -> float:
        """Elapsed seconds of one read of so many bytes; patterns take turns from call to call."""
        return self._read(next(self._turns), num_bytes)

    def _measure_windows(self, threads: int) -> dict[Pattern, list[float]]:
        pools = [NativeThreadPool(count) for count in sorted({1, max(1, threads // 2), threads})]
        patterns = [Pattern(*each, pool) for pool in pools for each in self._kernels]
        rates: dict[Pattern, list[float]] = {each: [] for each in patterns}
        for _ in range(REPEATS):
            for each in patterns:
                rates[each].append(WINDOW_BYTES / self._read(each, WINDOW_BYTES))
        return rates

    def _read(self, pattern: Pattern, num_bytes: int) -> float:
        """Read from where the last read ended; at the end of the memory begin again."""
        kernel, seconds = self._kernels[pattern.streams, pattern.ahead].address, 0.0
        left = -(-num_bytes // CHUNK_BYTES)
        while left:
            chunks = min(left, (READ_BYTES - self._at) // CHUNK_BYTES)
            operands = ReadOperands(
                address=self._memory.data_ptr() + self._at,
                chunk_bytes=CHUNK_BYTES,
                total=self._total.data_ptr(),
            )
            seconds += seconds_of(pattern.pool, kernel, operands, chunks)
            self._at = (self._at + chunks * CHUNK_BYTES) % READ_BYTES
            left -= chunks
        return seconds


def measure_read(threads: int) -> Peak:
    """Bytes per second read from memory: the best window of the best pattern."""
    return PlainReads(threads).best_window


def measure_peaks(threads: int) -> dict[str, Peak]:
    """Operations per second of dot products from registers, by the format of weights.

    Formats with the same instruction have the same limit.
    """
    pool, total = NativeThreadPool(threads), torch.zeros(1, dtype=torch.int64)
    found: dict[str, Peak] = {}
    for name, products in PEAKS.items():
        same = next((each for each in found if PEAKS[each] == products), None)
        if same is not None:
            found[name] = found[same]
            continue
        kernel = _compile(make_peak_kernel(products))
        operands = PeakOperands(iterations=PEAK_ITERATIONS, total=total.data_ptr())
        chunks = CHUNKS_PER_THREAD * threads
        seconds = min(
            seconds_of(pool, kernel.address, operands, chunks) for _ in range(4 * REPEATS)
        )
        work = chunks * PEAK_ITERATIONS * products.per_iteration * 2
        found[name] = Peak(work / seconds, "products of registers")
    return found


def _compile(function: Callable[..., None]) -> Any:
    """The compiled kernel, which is not cached: only measurements run it."""
    return cfunc(KERNEL, nogil=True, error_model="numpy")(function)


def seconds_of(
    pool: NativeThreadPool, kernel: int, operands: ctypes.Structure, chunks: int
) -> float:
    """Elapsed seconds of one run of a kernel."""
    with pool.awake():
        began = time.perf_counter()
        pool.run(kernel, ctypes.addressof(operands), chunks)
        return time.perf_counter() - began
