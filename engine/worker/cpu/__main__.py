"""Compile all kernels ahead of a first start: `python -m engine.worker.cpu`."""

from engine.worker.cpu.attention import paged_kernels, rope_and_cache_write
from engine.worker.cpu.build import compile_all
from engine.worker.cpu.int8 import FASTEST, Int8Operators
from engine.worker.cpu.thread_pool import NativeThreadPool

if __name__ == "__main__":
    attention = (
        *paged_kernels.KERNELS,
        *paged_kernels.OF_KINDS,
        *rope_and_cache_write.OF_KINDS,
    )
    operators = Int8Operators(NativeThreadPool(1), FASTEST)
    compile_all((*operators.kernels, *attention), lambda what, done, total: None)
