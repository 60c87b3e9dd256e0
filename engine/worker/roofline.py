"""What this machine can do at best, measured: bytes read a second, multiplications of matrices.

Run as a process of its own, `python -m engine.worker.roofline DEVICE THREADS`, since what is
measured should meet neither a model nor another measurement; one line of JSON comes out. A limit
is the best that any library at hand reaches, and says which one that was.
"""

# mypy: disable-error-code="no-untyped-call"
import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from engine.worker.cpu.linears.int8 import FASTEST
from engine.worker.cpu.pages import WeightPages
from engine.worker.cpu.thread_pool import NativeThreadPool

REPEATS = 3
CPU_SQUARE = 1536  # rows and columns of the matrices
CPU_READ_BYTES = 512 << 20
GPU_SQUARE = 8192
GPU_COPY_BYTES = 4 << 30


class MeasuredLimit(NamedTuple):
    """The best rate, bytes or floating point (or whole number) operations a second, and whose."""

    rate: float
    by: str


def main() -> None:
    """Measure what the command line names, and print."""
    parser = argparse.ArgumentParser(description="The machine's limits; podway bench starts it.")
    parser.add_argument("device")
    parser.add_argument("threads", type=int)
    arguments = parser.parse_args()
    measure = on_cpu if arguments.device == "cpu" else on_gpu
    sys.stdout.write(json.dumps(measure(arguments.device, arguments.threads)) + "\n")


def on_cpu(device: str, threads: int) -> dict[str, MeasuredLimit]:
    """`read` in bytes/s, `float32` and `int8` in operations/s."""
    torch.set_num_threads(threads)
    return {
        "read": _best(CPU_READ_BYTES, _cpu_reads(CPU_READ_BYTES)),
        "float32": _best(2 * CPU_SQUARE**3, _float_products(CPU_SQUARE)),
        "int8": _best(2 * CPU_SQUARE**3, _int8_products(CPU_SQUARE, threads)),
    }


def on_gpu(device: str, threads: int) -> dict[str, MeasuredLimit]:
    """`read` (of a copy, bytes in and out), `bfloat16`, `float16`, `float32`, and `int8` and `fp8`
    where the GPU has them."""
    place = torch.device("cuda" if device == "auto" else device)
    torch.cuda.set_device(place)
    limits = {"read": _gpu_copy(place)}
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        limits[str(dtype).removeprefix("torch.")] = _gpu_product(dtype, place)
    return limits | _eight_bits_on_gpu(place)


def _gpu_copy(place: torch.device) -> MeasuredLimit:
    source = torch.empty(GPU_COPY_BYTES, dtype=torch.uint8, device=place)
    target = torch.empty_like(source)
    rate = _rate(2 * GPU_COPY_BYTES, lambda: target.copy_(source), _gpu_seconds)
    return MeasuredLimit(rate, "a device copy")


def _gpu_product(dtype: torch.dtype, place: torch.device) -> MeasuredLimit:
    a, b = (torch.randn(GPU_SQUARE, GPU_SQUARE, device=place).to(dtype) for _ in range(2))
    return MeasuredLimit(_rate(2 * GPU_SQUARE**3, lambda: torch.mm(a, b), _gpu_seconds), "torch.mm")


def _cpu_reads(num_bytes: int) -> Mapping[str, Callable[[], object]]:
    rows = 8192
    matrix = torch.ones(rows, num_bytes // 4 // rows)
    vector = torch.ones(matrix.shape[1])
    return {"torch.mv": lambda: torch.mv(matrix, vector), "torch.sum": matrix.sum}


def _float_products(size: int) -> Mapping[str, Callable[[], object]]:
    a, b = torch.randn(size, size), torch.randn(size, size)
    out = torch.empty(size, size)
    return {"torch.mm": lambda: torch.mm(a, b, out=out)}


def _int8_products(size: int, threads: int) -> Mapping[str, Callable[[], object]]:
    """oneDNN's through torch, where torch has it, and the one that workers use."""
    pool = NativeThreadPool(threads)
    x, weight = torch.randn(size, size), torch.randn(size, size)
    linear = FASTEST.linear(pool, WeightPages(), [weight], None)

    def ours() -> Tensor:
        with pool.awake():
            return linear(x)

    found: dict[str, Callable[[], object]] = {"Podway's linear": ours}
    if hasattr(torch.ops.onednn, "qlinear_prepack"):
        found["oneDNN"] = _onednn_product(size)
    return found


def _onednn_product(size: int) -> Callable[[], object]:
    """8-bit inputs and weights with a scale for each output, a result in float32."""
    weight = torch.randint(-127, 128, (size, size), dtype=torch.int8)
    packed = torch.ops.onednn.qlinear_prepack(weight, [size, size])
    x = torch.randint(0, 256, (size, size), dtype=torch.uint8)
    scales, zeros = torch.ones(size), torch.zeros(size, dtype=torch.int32)
    result: tuple[object, ...] = 1.0, 0, torch.float32, "none", [], ""

    def product() -> object:
        return torch.ops.onednn.qlinear_pointwise(x, 0.1, 128, packed, scales, zeros, None, *result)

    return product


def _eight_bits_on_gpu(place: torch.device) -> dict[str, MeasuredLimit]:
    size, operations = GPU_SQUARE, 2 * GPU_SQUARE**3
    a, b = (
        torch.randint(-127, 128, (size, size), dtype=torch.int8, device=place) for _ in range(2)
    )
    rate = _rate(operations, lambda: torch._int_mm(a, b.t()), _gpu_seconds)  # as linears
    limits = {"int8": MeasuredLimit(rate, "torch._int_mm")}
    if torch.cuda.get_device_capability(place) >= (8, 9):
        x, weight = (torch.randn(size, size, device=place).to(torch.float8_e4m3fn) for _ in "ab")
        one = torch.ones((), device=place)

        def product() -> Tensor:
            return torch._scaled_mm(x, weight.t(), one, one, out_dtype=torch.bfloat16)

        limits["fp8"] = MeasuredLimit(_rate(operations, product, _gpu_seconds), "torch._scaled_mm")
    return limits


def _best(amount: int, ways: Mapping[str, Callable[[], object]]) -> MeasuredLimit:
    """The fastest of several ways to do the same amount of work."""
    found = [MeasuredLimit(_rate(amount, way, _cpu_seconds), name) for name, way in ways.items()]
    return max(found, key=lambda limit: limit.rate)


def _rate(
    amount: int,
    way: Callable[[], object],
    seconds: Callable[[Callable[[], object]], float],
) -> float:
    way()
    return amount / min(seconds(way) for _ in range(REPEATS))


def _cpu_seconds(way: Callable[[], object]) -> float:
    began = time.perf_counter()
    way()
    return time.perf_counter() - began


def _gpu_seconds(way: Callable[[], object]) -> float:
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    way()
    ended.record()
    ended.synchronize()
    return float(began.elapsed_time(ended)) / 1e3


if __name__ == "__main__":
    main()
