"""Times products of few rows by our kernel in several tilings, and by torch.

    python -m examples.benchmarks.gpu.products [--rows 16 64 128] [--json FILE]

The products are those of a layer of Llama-3.1-8B. Each follows a norm, as in a step; `TIMES` copies
of a weight, which do not stay in the L2 cache, are multiplied in one CUDA graph. A tiling's time is
that of norm and product together; torch's is with the gate of a gated product, and without scales
of fp8. `engine.worker.cuda.kernels.tiling` chooses from what this prints, and its test holds it to
the page's JSON.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from engine.worker.cuda.kernels.tiling import Tiling

TIMES = 8
REPEATS = 3
SECONDS = 4e-3  # of a measurement
HIDDEN, INNER = 4096, 14336
SMALL_16: list[tuple[int, ...]] = [
    (16, 64, 128, 2, 4, 4),
    (16, 64, 128, 4, 4, 5),
    (16, 128, 128, 4, 4, 4),
]
SMALL_64: list[tuple[int, ...]] = [
    (64, 64, 128, 1, 4, 4),
    (64, 64, 128, 2, 4, 4),
    (64, 64, 64, 4, 4, 5),
]
SMALL_64 += [(64, 128, 128, 4, 4, 4), (64, 256, 64, 8, 8, 5)]
SMALL_8_BIT: list[tuple[int, ...]] = [
    (16, 64, 256, 2, 4, 3),
    (16, 64, 256, 4, 4, 3),
    (16, 64, 128, 4, 4, 4),
]
MORE_8_BIT: list[tuple[int, ...]] = [(64, 64, 128, splits, 4, 5) for splits in (1, 2, 4)]
TILINGS: dict[tuple[str, int], list[tuple[int, ...]]] = {
    ("wide", 16): [(16, 64, 128, 1, 4, 4), (16, 128, 128, 1, 8, 3)],
    ("wide", 64): [(64, 128, 64, 1, 4, 4), (64, 128, 128, 1, 4, 3), (64, 256, 64, 1, 8, 5)],
    ("wide", 128): [(128, 128, 64, 1, 8, 4), (128, 256, 64, 1, 8, 4)],
    ("gated", 16): [(16, 128, 128, 1, 8, 3), (16, 64, 128, 1, 4, 3)],
    ("gated", 64): [(64, 64, 64, 1, 4, 4), (64, 64, 128, 1, 4, 3), (64, 128, 64, 1, 8, 4)],
    ("gated", 128): [(128, 128, 64, 1, 8, 4), (128, 64, 64, 1, 8, 5)],
    ("small", 16): SMALL_16,
    ("small", 64): SMALL_64,
    ("small", 128): [(128, 64, 64, 2, 4, 6), (128, 128, 64, 4, 8, 6)],
    ("wide fp8", 16): [(16, 64, 256, 1, 4, 3), (16, 64, 128, 1, 4, 4), (16, 128, 128, 1, 4, 4)],
    ("wide fp8", 64): [(64, 64, 128, 1, 4, 5), (64, 128, 128, 1, 4, 4)],
    ("small fp8", 16): SMALL_8_BIT,
    ("small fp8", 64): MORE_8_BIT,
}


@dataclass(frozen=True, slots=True)
class Product:
    """A weight `[outputs, width]`, and what follows its product."""

    name: str
    outputs: int
    width: int
    dtype: str = "bfloat16"
    is_added: bool = False  # to the residual
    is_gated: bool = False

    @property
    def kind(self) -> str:
        wide = "gated" if self.is_gated else "wide" if self.outputs >= 16384 else "small"
        return f"{wide} fp8" if self.dtype != "bfloat16" else wide


FP8 = "float8_e4m3fn"
PRODUCTS = [
    Product("qkv", 6144, HIDDEN),
    Product("o", HIDDEN, HIDDEN, is_added=True),
    Product("gate and up, gated", 2 * INNER, HIDDEN, is_gated=True),
    Product("down", HIDDEN, INNER, is_added=True),
    Product("head", 128256, HIDDEN),
    Product("qkv", 6144, HIDDEN, FP8),
    Product("o", HIDDEN, HIDDEN, FP8, is_added=True),
    Product("gate and up", 2 * INNER, HIDDEN, FP8),
    Product("down", HIDDEN, INNER, FP8, is_added=True),
]


def seconds(work: Callable[[], object], at_least: float) -> float:
    """The time of a CUDA graph of `work`, the fastest of some; `at_least` is a guess of it."""
    import torch

    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    graph.replay()
    count, found = max(2, int(SECONDS / at_least)), []
    for _ in range(REPEATS):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in "ab")  # type: ignore[no-untyped-call]
        began.record()
        for _ in range(count):
            graph.replay()
        ended.record()
        ended.synchronize()
        found.append(began.elapsed_time(ended) * 1e-3 / count)
    return float(min(found))


class Operands:
    """Of a product with some rows on the GPU: copies of the weight, and what its kernels take."""

    def __init__(self, product: Product, rows: int) -> None:
        import torch

        self.product, self.half = product, torch.bfloat16
        dtype = getattr(torch, product.dtype)
        self.weights = [
            (0.02 * self._noise(product.outputs, product.width)).to(dtype)
            for _ in range(2 if product.outputs > 2 * INNER else TIMES)
        ]
        self.x, self.hidden = self._noise(rows, product.width).to(dtype), self._noise(rows, HIDDEN)
        self.norm, self.normed = self._noise(HIDDEN), torch.empty_like(self.hidden)
        self.scales = torch.ones(rows, 1, device="cuda"), torch.ones(product.outputs, 1).cuda()
        self.out = self._noise(rows, product.outputs)
        self.gated = self._noise(rows, product.outputs // 2)

    def by_torch(self, weight: Any) -> None:
        """The product alone in 8 bits, else with what follows it."""
        import torch

        from engine.worker.cuda.kernels import rows as kernels

        if self.x.dtype != self.half:
            scales = self.scales[0], self.scales[1].t()
            torch._scaled_mm(self.x, weight.t(), *scales, out_dtype=self.half)
        elif self.product.is_added:
            self.out.addmm_(self.x, weight.t())
        else:
            y = torch.nn.functional.linear(self.x, weight)
            if self.product.is_gated:
                kernels.gated("silu", y, self.gated)

    def by_ours(self, tiling: Tiling, weight: Any) -> None:
        """With what follows it."""
        from engine.worker.cuda.kernels import gemm

        if self.product.is_gated:
            gemm.gated_product("silu", self.x, weight, tiling)
            return
        epilogue = gemm.Epilogue(add_to=self.out if self.product.is_added else None)
        if self.x.dtype != self.half:
            epilogue = epilogue._replace(x_scales=self.scales[0], weight_scales=self.scales[1])
        gemm.product(self.x, weight, tiling, self.half, epilogue)

    def microseconds(self, run: Callable[[Any], None]) -> float:
        """Of a norm and a product."""
        from engine.worker.cuda.kernels import rows as kernels

        def work() -> None:
            for weight in self.weights:
                kernels.rms_norm(self.hidden, self.norm, 1e-5, self.normed)
                run(weight)

        count = len(self.weights)
        return round(seconds(work, count * self.weights[0].nbytes / 5e12) / count * 1e6, 2)

    def _noise(self, *sizes: int) -> Any:
        import torch

        return torch.randn(sizes, device="cuda", dtype=self.half)


def measure(product: Product, rows: int, tilings: Sequence[Tiling]) -> dict[str, float]:
    """Microseconds of torch and of each tiling."""
    operands = Operands(product, rows)
    found = {"torch": operands.microseconds(operands.by_torch)}
    for each in tilings:
        found[str(each)] = operands.microseconds(partial(operands.by_ours, each))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="+", type=int, default=[16, 64, 128])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    import torch

    found: dict[str, Any] = {}
    for product in PRODUCTS:
        for rows in arguments.rows:
            if (product.kind, rows) not in TILINGS:
                continue
            tilings = [Tiling(*each) for each in TILINGS[product.kind, rows]]
            times = measure(product, rows, tilings)
            of = {"rows": rows, "outputs": product.outputs, "width": product.width}
            of |= {"dtype": product.dtype, "is_gated": product.is_gated}
            name = f"{product.name}: {rows} rows, {product.dtype}"
            found[name] = {**of, "microseconds": times}
            print(name, times, flush=True)
    device = torch.cuda.get_device_name()
    if arguments.json:
        result = {"device": device, "torch": torch.__version__, "products": found}
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
