"""Formats of weights whose conversion from float32 runs on the thread pool.

Quantizing by torch took most of a first start. A weight that the kernels do not take is converted
by the format itself.

The formats of weights and of the KV cache that a CPU computes with.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.errors import StartupError
from engine.worker.cpu.kernel_call import KernelCall
from engine.worker.cpu.kernels.dtypes import HAS_BFLOAT16_PAIRS, has_half
from engine.worker.cpu.kernels.linears.tile_formats import HAS_AMX
from engine.worker.cpu.kernels.quantize import QuantizeOperands, quantize_int4, quantize_int8
from engine.worker.cpu.linears import FORMATS
from engine.worker.cpu.linears.grouped import ELEMENTS_AT_ONCE
from engine.worker.cpu.thread_pool import NativeThreadPool
from engine.worker.device import choose_dtype
from engine.worker.model.kv.kv_tensors import CPU_KV_DTYPES
from engine.worker.ports import LinearFormat, PreferredFormat, Weight
from engine.worker.weights.formats.fp8 import FP8
from engine.worker.weights.formats.int4 import GROUP, INT4, int4_weight
from engine.worker.weights.formats.int8 import INT8, Int8Weight
from engine.worker_settings import Kernels

DTYPES = ("auto", "float32", "float16", "bfloat16")
NO_HALF = "'float16' needs a CPU with F16C"
EXACT = frozenset(("float32", "float16"))  # more precise than bfloat16
MULTIPLIES_BFLOAT16 = HAS_BFLOAT16_PAIRS and not HAS_AMX  # faster than it does float16
PLAIN_ATTENTION = "reference"  # with it, all operators are plain torch


def weight_formats(
    kernels: Kernels, preferred: PreferredFormat, *, is_plain: bool
) -> tuple[tuple[str, ...], str]:
    """The formats in which quantized weights stay as they are stored, and what all others are
    converted to. Raises `StartupError` if the settings name an unknown one.

    "auto" keeps weights of 16 bits as they are. Without kernels, if `is_plain`, all weights are
    float32.
    """
    weights, floats = kernels.weights, kernels.dtype
    if floats not in DTYPES:
        known = ", ".join(DTYPES[1:])
        raise StartupError(f"--dtype {floats!r} is not supported on cpu; known: {known}")
    if floats == "auto":
        floats = "float32" if is_plain else preferred.floats or "float32"
        floats = "float32" if floats == "float16" and not has_half() else floats
    if "float16" in (weights, floats) and not has_half():
        raise StartupError(f"--dtype {NO_HALF}")
    if weights not in ("auto", *FORMATS):
        known = ", ".join(("auto", *FORMATS))
        raise StartupError(f"--weights {weights!r} is not supported on cpu; known: {known}")
    if weights == "auto" and not is_plain:
        if preferred.stored and FP8 not in preferred.stored:
            return preferred.stored, floats
        return (), preferred.format or floats
    weights = floats if weights == "auto" else weights
    if is_plain and weights != "float32":
        raise StartupError(f"weights in {weights} need another attention than {PLAIN_ATTENTION!r}")
    return (), weights


def kv_format(name: str, weights: Sequence[str] = (), *, keeps_kv: bool = True) -> torch.dtype:
    """The dtype of the KV cache by its name; raises `StartupError` if it is not supported.

    "auto" is float16 if the CPU converts it in hardware. With `weights` that are all less precise,
    it is bfloat16 on CPUs that multiply it faster: prompts take two thirds of attention's time on a
    Zen 5. An encoder, without `keeps_kv`, has float32.
    """
    if name == "auto":
        if not (keeps_kv and has_half()):
            return torch.float32
        is_coarse = bool(weights) and EXACT.isdisjoint(weights)
        return torch.bfloat16 if is_coarse and MULTIPLIES_BFLOAT16 else torch.float16
    dtype = choose_dtype("--kv-cache-dtype", name, CPU_KV_DTYPES, "cpu")
    if dtype is torch.float16 and not has_half():
        raise StartupError(f"--kv-cache-dtype {NO_HALF}")
    return dtype


def native_format(pool: NativeThreadPool, format: LinearFormat | None) -> LinearFormat | None:
    """The same format with a native conversion, if there is one."""
    if format is INT8:
        return NativeFormat(pool, format, _to_int8)
    if format is INT4 and has_half():
        return NativeFormat(pool, format, _to_int4)
    return format


def conversion_kernels(format: LinearFormat | None) -> tuple[Callable[..., None], ...]:
    """The kernels that convert weights to the format."""
    if format is INT8:
        return (quantize_int8,)
    return (quantize_int4,) if format is INT4 and has_half() else ()


class NativeFormat:
    """A `LinearFormat` that converts float32 weights by `convert`."""

    def __init__(
        self,
        pool: NativeThreadPool,
        format: LinearFormat,
        convert: Callable[[NativeThreadPool, Tensor], Weight],
    ) -> None:
        self._pool = pool
        self._format = format
        self._convert = convert

    @property
    def name(self) -> str:
        return self._format.name

    @property
    def bits(self) -> float:
        return self._format.bits

    def convert(self, weight: Weight) -> Weight:
        if not isinstance(weight, Tensor) or weight.ndim != 2 or weight.shape[1] % GROUP:
            return self._format.convert(weight)
        with self._pool.awake():
            return self._convert(self._pool, weight)


def _to_int8(pool: NativeThreadPool, weight: Tensor) -> Int8Weight:
    found = Int8Weight(torch.empty(weight.shape, dtype=torch.int8), torch.empty(len(weight)))
    _quantize(pool, quantize_int8, weight, found.values, found.scales)
    return found


def _to_int4(pool: NativeThreadPool, weight: Tensor) -> Weight:
    outputs, inputs = weight.shape
    nibbles = torch.empty((outputs, inputs // 2), dtype=torch.uint8)
    scales = torch.empty((outputs, inputs // GROUP), dtype=torch.float16)
    _quantize(pool, quantize_int4, weight, nibbles, scales)
    return int4_weight(nibbles, scales, inputs)


def _quantize(
    pool: NativeThreadPool,
    kernel: Callable[..., None],
    weight: Tensor,
    values: Tensor,
    scales: Tensor,
) -> None:
    """In float32 a few rows at a time, which stay in the cache."""
    step = max(1, ELEMENTS_AT_ONCE // weight.shape[1])
    for at in range(0, len(weight), step):
        rows = weight[at : at + step].to(torch.float32).contiguous()
        operands = QuantizeOperands(
            x=rows.data_ptr(),
            width=rows.shape[1],
            values=values[at:].data_ptr(),
            scales=scales[at:].data_ptr(),
        )
        KernelCall(pool, kernel, operands).over_rows(len(rows))
