"""The limits of this machine's cores and memory, measured by the kernels of `kernels.limits`."""

# mypy: disable-error-code="no-untyped-call"
import ctypes
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from numba import cfunc

from engine.worker.cpu.build import KERNEL
from engine.worker.cpu.kernels.limits import (
    CHAINS,
    PEAKS,
    PeakOperands,
    ReadOperands,
    make_peak_kernel,
    make_read_kernel,
)
from engine.worker.cpu.kernels.vectors import LANES
from engine.worker.cpu.pages import WeightPages
from engine.worker.cpu.thread_pool import NativeThreadPool

READ_BYTES = 1 << 30  # far more than any cache
WINDOW_BYTES = 128 << 20  # of one measurement; the next one reads other memory
CHUNK_BYTES = 256 << 10
STREAMS_AND_PREFETCH = ((1, 512), (2, 0), (2, 512), (4, 0), (4, 2048))
REPEATS = 8
PEAK_ITERATIONS = 20_000
CHUNKS_PER_THREAD = 4


class Peak(NamedTuple):
    """The best rate, bytes or operations per second, and how it was reached."""

    rate: float
    by: str


def measure_read(threads: int) -> Peak:
    """Bytes per second read from memory: the best pattern and number of threads."""
    memory = WeightPages(slab_bytes=READ_BYTES).take((READ_BYTES,), torch.uint8).fill_(1)
    total = torch.zeros(1, dtype=torch.int64)
    kernels = {each: _compile(make_read_kernel(*each)) for each in STREAMS_AND_PREFETCH}
    pools = [NativeThreadPool(count) for count in sorted({1, max(1, threads // 2), threads})]
    best, window = Peak(0.0, ""), 0
    for pool in pools * REPEATS:
        for (streams, ahead), kernel in kernels.items():
            start = memory.data_ptr() + window * WINDOW_BYTES
            window = (window + 1) % (READ_BYTES // WINDOW_BYTES - 1)
            operands = ReadOperands(address=start, chunk_bytes=CHUNK_BYTES, total=total.data_ptr())
            seconds = seconds_of(pool, kernel.address, operands, WINDOW_BYTES // CHUNK_BYTES)
            by = f"{streams} streams, prefetch {ahead} bytes, {pool.threads} threads"
            best = max(best, Peak(WINDOW_BYTES / seconds, by))
    return best


def measure_peaks(threads: int) -> dict[str, Peak]:
    """Operations per second of dot products from registers, by the format of weights."""
    pool, total = NativeThreadPool(threads), torch.zeros(1, dtype=torch.int64)
    found = {}
    for name, (add, products) in PEAKS.items():
        kernel = _compile(make_peak_kernel(add))
        operands = PeakOperands(iterations=PEAK_ITERATIONS, total=total.data_ptr())
        chunks = CHUNKS_PER_THREAD * threads
        seconds = min(
            seconds_of(pool, kernel.address, operands, chunks) for _ in range(4 * REPEATS)
        )
        work = chunks * PEAK_ITERATIONS * CHAINS * LANES * products * 2
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
