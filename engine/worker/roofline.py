"""The measured limits of this machine: bytes read per second, and operations per second.

Run in a process of its own, `python -m engine.worker.roofline DEVICE THREADS`, so that neither a
model nor another measurement disturbs it; prints one line of JSON. On a CPU the limits are those of
the hardware (`engine.worker.cpu.limits`), on a GPU the rates of PyTorch's copies and products.

On a CPU each line of standard input is then a number of bytes: they are read from memory, and the
elapsed seconds are printed. Memory of a virtual machine is faster at some times than at others, so
a step is compared with reads of as many bytes right before and after it.
"""

# mypy: disable-error-code="no-untyped-call"
import argparse
import json
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from engine.worker.cpu.limits import Peak, PlainReads, measure_peaks

REPEATS = 3
GPU_SQUARE = 8192  # rows and columns of the matrices
GPU_COPY_BYTES = 4 << 30


def main() -> None:
    """Measure what the command line names, and print. On a CPU `read` is in bytes/s, the others in
    operations/s by the format of linear weights."""
    parser = argparse.ArgumentParser(description="The machine's limits; podway bench starts it.")
    parser.add_argument("device")
    parser.add_argument("threads", type=int)
    arguments = parser.parse_args()
    if arguments.device != "cpu":
        _print(on_gpu(arguments.device))
        return
    reads = PlainReads(arguments.threads)
    _print({"read": reads.best_window, **measure_peaks(arguments.threads)})
    for line in sys.stdin:
        _print(reads.seconds(int(line)))


def _print(found: object) -> None:
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


def on_gpu(device: str) -> dict[str, Peak]:
    """`read` in bytes/s (in and out of a copy), and operations/s by the format of weights.

    `fp8` is there only if the GPU supports it.
    """
    place = torch.device("cuda" if device == "auto" else device)
    place = torch.device("cuda", place.index or 0)
    torch.cuda.set_device(place)
    limits = {"read": _gpu_copy(place)}
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        limits[str(dtype).removeprefix("torch.")] = _gpu_product(dtype, place)
    limits["int4"] = limits["bfloat16"]  # what codes of 4 bits are multiplied as
    return limits | _eight_bits_on_gpu(place)


def _gpu_copy(place: torch.device) -> Peak:
    source = torch.empty(GPU_COPY_BYTES, dtype=torch.uint8, device=place)
    target = torch.empty_like(source)
    rate = _rate(2 * GPU_COPY_BYTES, lambda: target.copy_(source), _gpu_seconds)
    return Peak(rate, "a device copy")


def _gpu_product(dtype: torch.dtype, place: torch.device) -> Peak:
    a, b = (torch.randn(GPU_SQUARE, GPU_SQUARE, device=place).to(dtype) for _ in range(2))
    return Peak(_rate(2 * GPU_SQUARE**3, lambda: torch.mm(a, b), _gpu_seconds), "torch.mm")


def _eight_bits_on_gpu(place: torch.device) -> dict[str, Peak]:
    size, operations = GPU_SQUARE, 2 * GPU_SQUARE**3
    a, b = (
        torch.randint(-127, 128, (size, size), dtype=torch.int8, device=place) for _ in range(2)
    )
    rate = _rate(operations, lambda: torch._int_mm(a, b.t()), _gpu_seconds)  # as linears
    limits = {"int8": Peak(rate, "torch._int_mm")}
    if torch.cuda.get_device_capability(place) >= (8, 9):
        x, weight = (torch.randn(size, size, device=place).to(torch.float8_e4m3fn) for _ in "ab")
        one = torch.ones((), device=place)

        def product() -> Tensor:
            return torch._scaled_mm(x, weight.t(), one, one, out_dtype=torch.bfloat16)

        limits["fp8"] = Peak(_rate(operations, product, _gpu_seconds), "torch._scaled_mm")
    return limits


def _rate(
    amount: int,
    way: Callable[[], object],
    seconds: Callable[[Callable[[], object]], float],
) -> float:
    way()
    return amount / min(seconds(way) for _ in range(REPEATS))


def _gpu_seconds(way: Callable[[], object]) -> float:
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    way()
    ended.record()
    ended.synchronize()
    return float(began.elapsed_time(ended)) / 1e3


if __name__ == "__main__":
    main()
