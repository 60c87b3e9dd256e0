"""Linear layers of the CPU, by the format of their weights as in the setting `weights`."""

from engine.worker.cpu.linears.floats import BFLOAT16, FLOAT32
from engine.worker.cpu.linears.int8 import Int8Linears
from engine.worker.cpu.linears.packed import CpuLinears

FORMATS = ("float32", "bfloat16", "int8")


def linears_of(int8: Int8Linears, name: str) -> dict[str, CpuLinears]:
    """Float32 linears and those of the format `name`, which may be any of `FORMATS`."""
    known: dict[str, CpuLinears] = {"float32": FLOAT32, "bfloat16": BFLOAT16, "int8": int8}
    return {each: known[each] for each in FORMATS if each in ("float32", name)}
