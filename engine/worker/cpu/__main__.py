"""Compile all kernels ahead of a first start: `python -m engine.worker.cpu`."""

import sys

from engine.worker.cpu.attention import paged_kernels, rope_and_cache_write
from engine.worker.cpu.build import compile_all
from engine.worker.cpu.int8 import FASTEST
from engine.worker.cpu.linear_formats import linears
from engine.worker.cpu.operators import NativeOperators
from engine.worker.cpu.thread_pool import NativeThreadPool


def show_progress(what: str, done: int, total: int) -> None:
    """A counter on one line; only its end where stdout is not a terminal."""
    if sys.stdout.isatty() or done == total:
        end = "\n" if done == total else ""
        sys.stdout.write(f"\rCompiling {what} for this CPU: {done} of {total}{end}")
        sys.stdout.flush()


if __name__ == "__main__":
    attention = (
        *paged_kernels.KERNELS,
        *paged_kernels.OF_KINDS,
        *rope_and_cache_write.OF_KINDS,
    )
    operators = NativeOperators(NativeThreadPool(1), linears(FASTEST, "int8"))
    compile_all((*operators.kernels, *attention), show_progress)
