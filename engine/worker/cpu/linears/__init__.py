"""Linear layers of the CPU, by the format of their weights as in the setting `weights`."""

from collections.abc import Callable, Sequence

from engine.errors import StartupError
from engine.worker.cpu.kernels.linears.tile_formats import HAS_VNNI
from engine.worker.cpu.linears import int8
from engine.worker.cpu.linears.floats import BFLOAT16, FLOAT16, FLOAT32
from engine.worker.cpu.linears.grouped import grouped_linears
from engine.worker.cpu.linears.packed import CpuLinears
from engine.worker.weights.formats import LAYOUTS

FORMATS = (
    "float32",
    "float16",
    "bfloat16",
    "int8",
    "int4",
)  # any weights may be converted to these


def linears_of(*formats: str, activation_bits: str = "auto") -> dict[str, CpuLinears]:
    """Float32 linears and those of `formats`, which are names in `FORMATS` or `LAYOUTS`.

    `activation_bits` is the width of the inputs of quantized weights: "auto", "8" or "14". Raises
    `StartupError` if it is unknown or the CPU lacks VNNI.
    """
    if activation_bits not in ("auto", "8", "14"):
        raise StartupError(
            f"activation_bits {activation_bits!r} is not supported on cpu; known: auto, 8, 14"
        )
    if activation_bits == "8" and not HAS_VNNI:
        raise StartupError("activation_bits '8' needs a CPU with VNNI; use auto or 14")
    bits = 8 if HAS_VNNI and activation_bits != "14" else 14
    return {name: _linears(name, bits) for name in dict.fromkeys(("float32", *formats))}


def _linears(name: str, activation_bits: int) -> CpuLinears:
    if name in LAYOUTS:
        return grouped_linears(LAYOUTS[name], activation_bits)
    known: dict[str, CpuLinears] = {
        "float32": FLOAT32,
        "float16": FLOAT16,
        "bfloat16": BFLOAT16,
        "int8": int8.WITH_8_BITS if activation_bits == 8 else int8.WITH_14_BITS,
    }
    return known[name]


def grouped_kernels() -> dict[str, Callable[..., None]]:
    """The kernels of weights in groups that a function makes, in all layouts, by name."""
    linears = [grouped_linears(each, bits) for each in LAYOUTS.values() for bits in (8, 14)]
    kernels = [kernel for each in linears for kernel in (each.kernel, *each.packing_kernels)]
    return {kernel.__qualname__: kernel for kernel in kernels}


def describe(linears: Sequence[CpuLinears]) -> str:
    """Formats as reports show them: "int4+q6_k (8-bit activations, VNNI)"."""
    parts = [each.description.partition(" ") for each in linears]
    return "+".join(name for name, _, _ in parts) + (f" {parts[0][2]}" if parts[0][2] else "")
