"""Operators that quantize float weights, for tests of int8 linears."""

from engine.worker.cpu.int8 import FASTEST, Int8Linears, Rounding
from engine.worker.cpu.operators import NativeOperators
from engine.worker.cpu.thread_pool import NativeThreadPool


def int8_operators(team: NativeThreadPool, rounding: Rounding = FASTEST) -> NativeOperators:
    """All linears in int8, unless some of their weights are floats and some are not."""
    linears = Int8Linears(rounding)
    return NativeOperators(team, {"float32": linears, "int8": linears})
