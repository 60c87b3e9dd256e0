"""How fast memory is read in pages of 4 KiB and in huge pages, anonymous and of a file.

    python -m examples.benchmarks.layers.page_sizes OUT [--repeats 32] [--realtime]

The same kernel reads each kind of memory in turn, with all threads. Medians and best rates go to
OUT/page_sizes.json. Needs Linux; `collapsed` says which kinds of memory got huge pages.
"""

# mypy: disable-error-code="no-untyped-call"
import argparse
import ctypes
import json
import mmap
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch
from numba import cfunc

from engine.worker.cpu.build import KERNEL
from engine.worker.cpu.kernels.limits import ReadOperands, make_read_kernel
from engine.worker.cpu.limits import CHUNK_BYTES, seconds_of
from engine.worker.cpu.thread_pool import NativeThreadPool
from examples.benchmarks.layers.thread_counts import realtime
from examples.benchmarks.server.start_time import cpu_name

NUM_BYTES, WINDOW_BYTES = 512 << 20, 128 << 20  # of each kind of memory, and of one measurement
PATTERNS = ((1, 4096), (2, 512))  # streams and bytes of prefetch; the better one counts
MADV_HUGEPAGE, MADV_COLLAPSE = 14, 25  # linux/mman.h


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--repeats", type=int, default=32)
    parser.add_argument("--realtime", action="store_true", help="priority over other processes")
    options = parser.parse_args()
    before = os.getloadavg()[0]
    with tempfile.TemporaryFile(dir=Path.home()) as file:
        memory, collapsed = kinds_of_memory(file.fileno())
        with realtime(options.realtime):
            rates = measure(memory, options.repeats)
    figures = {"cpu": cpu_name(), "load": before, "collapsed": collapsed, "rates": rates}
    options.out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(figures, indent=1)
    (options.out / "page_sizes.json").write_text(text + "\n")
    print(text)


def kinds_of_memory(file: int) -> tuple[dict[str, mmap.mmap], dict[str, bool]]:
    """The kinds of memory, and which of those that may have huge pages got them."""
    os.posix_fallocate(file, 0, NUM_BYTES)
    shared = os.memfd_create("pages")
    os.ftruncate(shared, NUM_BYTES)
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = {
        "anonymous": mmap.mmap(-1, NUM_BYTES, flags=private),
        "anonymous, huge": mmap.mmap(-1, NUM_BYTES, flags=private),
        "shared, huge": mmap.mmap(shared, NUM_BYTES),
        "file": mmap.mmap(file, NUM_BYTES),
        "file, huge": mmap.mmap(file, NUM_BYTES),
    }
    for name, each in memory.items():
        if name.endswith("huge"):
            advise(each, MADV_HUGEPAGE)
        torch.frombuffer(each, dtype=torch.uint8).fill_(1)
    huge = {name: each for name, each in memory.items() if name.endswith("huge")}
    return memory, {name: advise(each, MADV_COLLAPSE) for name, each in huge.items()}


def advise(mapping: mmap.mmap, advice: int) -> bool:
    """Whether the system takes the advice."""
    start, size = ctypes.c_void_p(address_of(mapping)), ctypes.c_size_t(len(mapping))
    return int(ctypes.CDLL(None).madvise(start, size, advice)) == 0


def address_of(mapping: mmap.mmap) -> int:
    return torch.frombuffer(mapping, dtype=torch.uint8, count=1).data_ptr()


def measure(memory: Mapping[str, mmap.mmap], repeats: int) -> dict[str, Any]:
    """The median and the best GB/s of each kind of memory, by the better pattern."""
    pool = NativeThreadPool(len(os.sched_getaffinity(0)))
    kernels = [cfunc(KERNEL, nogil=True)(make_read_kernel(*each)) for each in PATTERNS]
    total = torch.zeros(1, dtype=torch.int64)
    found: dict[str, list[list[float]]] = {name: [[] for _ in kernels] for name in memory}
    for number in range(repeats):
        window = number % (NUM_BYTES // WINDOW_BYTES) * WINDOW_BYTES
        for name, each in memory.items():
            for rates, kernel in zip(found[name], kernels, strict=True):
                operands = ReadOperands(
                    address=address_of(each) + window,
                    chunk_bytes=CHUNK_BYTES,
                    total=total.data_ptr(),
                )
                chunks = WINDOW_BYTES // CHUNK_BYTES
                seconds = seconds_of(pool, kernel.address, operands, chunks)
                rates.append(WINDOW_BYTES / seconds / 1e9)
    return {
        name: {
            "median": round(max(median(each) for each in rates), 1),
            "best": round(max(max(each) for each in rates), 1),
        }
        for name, rates in found.items()
    }


if __name__ == "__main__":
    main()
