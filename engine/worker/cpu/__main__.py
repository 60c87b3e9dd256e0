"""Compile all kernels before a first start: `python -m engine.worker.cpu`."""

import sys

from engine.worker.cpu.attention import paged_kernels, rope_and_cache_write
from engine.worker.cpu.build import compile_all
from engine.worker.cpu.kernels.linears.tile_formats import HAS_AMX
from engine.worker.cpu.linears import FORMATS, linears_of
from engine.worker.cpu.linears.packed_store import PackedStore
from engine.worker.cpu.operators import NativeOperators
from engine.worker.cpu.thread_pool import NativeThreadPool


def show_progress(what: str, done: int, total: int) -> None:
    """A counter on one line; only its end if stdout is not a terminal."""
    if sys.stdout.isatty() or done == total:
        end = "\n" if done == total else ""
        sys.stdout.write(f"\rCompiling {what} for this CPU: {done} of {total}{end}")
        sys.stdout.flush()


if __name__ == "__main__":
    attention = (
        *paged_kernels.BY_DTYPE,
        *(paged_kernels.BY_DTYPE_AND_AMX.values() if HAS_AMX else ()),
        paged_kernels.merge_partials,
        *rope_and_cache_write.BY_DTYPE,
    )
    formats = {name: linears_of(name)[name] for name in FORMATS}
    operators = NativeOperators(NativeThreadPool(1), PackedStore(formats))
    compile_all((*operators.kernels, *attention), show_progress)
