"""The formats of weights that the CPU has linears for, by their names in the setting `weights`."""

from engine.worker.cpu.int8 import Int8Linears, Rounding
from engine.worker.cpu.operators import FLOATS, CpuLinears

FORMATS = ("float32", "int8")


def linears(activations: Rounding, name: str) -> dict[str, CpuLinears]:
    """The linears of floats and of the format `name`, with these activations where it is int8."""
    known: dict[str, CpuLinears] = {"float32": FLOATS, "int8": Int8Linears(activations)}
    return {each: known[each] for each in FORMATS if each in ("float32", name)}
