"""Linear layers of the CPU, by the format of their weights as in the setting `weights`."""

from engine.errors import StartupError
from engine.worker.cpu.kernels.tile_formats import HAS_VNNI
from engine.worker.cpu.linears import int4, int8
from engine.worker.cpu.linears.floats import BFLOAT16, FLOAT32
from engine.worker.cpu.linears.packed import CpuLinears

FORMATS = ("float32", "bfloat16", "int8", "int4")


def linears_of(name: str, activation_bits: str = "auto") -> dict[str, CpuLinears]:
    """Float32 linears and those of the format `name`, which may be any of `FORMATS`.

    `activation_bits` is the width of the inputs of quantized weights: "auto", "8" or "14". Raises
    `StartupError` if it is unknown or the CPU lacks VNNI.
    """
    if activation_bits not in ("auto", "8", "14"):
        raise StartupError(
            f"--activation-bits {activation_bits!r} is not supported on cpu; known: auto, 8, 14"
        )
    if activation_bits == "8" and not HAS_VNNI:
        raise StartupError("--activation-bits '8' needs a CPU with VNNI; use auto or 14")
    has_8_bits = HAS_VNNI and activation_bits != "14"
    known: dict[str, CpuLinears] = {
        "float32": FLOAT32,
        "bfloat16": BFLOAT16,
        "int8": int8.WITH_8_BITS if has_8_bits else int8.WITH_14_BITS,
        "int4": int4.WITH_8_BITS if has_8_bits else int4.WITH_14_BITS,
    }
    return {each: known[each] for each in FORMATS if each in ("float32", name)}
