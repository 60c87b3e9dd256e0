"""Operators that quantize float weights, for tests of int8 linears."""

from engine.worker.cpu.linears.int8 import FASTEST, Int8Linears
from engine.worker.cpu.linears.packed_store import PackedStore
from engine.worker.cpu.operators import NativeOperators
from engine.worker.cpu.thread_pool import NativeThreadPool


def int8_operators(pool: NativeThreadPool, linears: Int8Linears = FASTEST) -> NativeOperators:
    """All linears in int8: float weights are quantized."""
    return NativeOperators(pool, PackedStore({"float32": linears, "int8": linears}))
