"""The linears of a model in each weight format of the CPU, alone: time by rows of a step.

Prints CPU time of one thread, which other processes on the machine disturb less than elapsed time;
with several threads, elapsed time.

    python -m examples.benchmarks.layers.linear_formats [--formats int8 q4_k] [--rows 1 8 32]
        [--threads 2]
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.worker.cpu.kernel_graph import KernelGraph
from engine.worker.cpu.linears import FORMATS, linears_of
from engine.worker.cpu.linears.packed import PackedLinear, PackedWeights
from engine.worker.cpu.pages import WeightPages
from engine.worker.cpu.thread_pool import NativeThreadPool
from engine.worker.ports import Weight
from engine.worker.weights.formats import LAYOUTS
from engine.worker.weights.formats.grouped import GroupedWeight, GroupLayout, Groups

HIDDEN, INNER, LAYERS, VOCABULARY = 768, 2048, 12, 32000
SHAPES = [(3 * HIDDEN, HIDDEN), (HIDDEN, HIDDEN), (2 * INNER, HIDDEN), (HIDDEN, INNER)]
HEAD = VOCABULARY, HIDDEN
ELEMENTS = LAYERS * sum(outputs * size for outputs, size in SHAPES) + VOCABULARY * HIDDEN


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=25, help="of which the fastest counts")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32], help="of a step")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--formats", nargs="+", choices=[*FORMATS, *LAYOUTS], default=[*FORMATS, "q4_k", "q6_k"]
    )
    return parser.parse_args()


def random_weight(name: str, outputs: int, inputs: int) -> Weight:
    """A weight that is stored in the format, or floats that are converted to it."""
    if name in FORMATS:
        return torch.randn(outputs, inputs) / 50
    layout = LAYOUTS[name]
    return GroupedWeight(
        layout, random_tensors(layout, outputs, inputs), inputs, lambda tensors: Groups(**tensors)
    )


def random_tensors(layout: GroupLayout, outputs: int, inputs: int) -> dict[str, Tensor]:
    """The fields of `Groups` that the layout has."""
    blocks, groups = inputs // layout.block, inputs // layout.group
    most, dtype = 1 << layout.bits, torch.uint8
    tensors = {
        "steps": torch.randint(most, (outputs, inputs), dtype=dtype),
        "scales": torch.rand(outputs, blocks).half(),
    }
    if layout.has_minimums:
        tensors["minimums"] = torch.rand(outputs, blocks).half()
    named = {"factors": layout.has_factors, "zeros": layout.has_zeros}
    named["minimum_factors"] = layout.has_factors and layout.has_minimums
    small = torch.randint(64, (outputs, groups), dtype=torch.int8)
    return tensors | {field: small for field, has_it in named.items() if has_it}


@dataclass(frozen=True)
class Linears:
    """The linears of a model in one format, each with memory of its own."""

    pool: NativeThreadPool
    parts: Sequence[PackedLinear]
    inputs: Sequence[int]

    @classmethod
    def make(cls, pool: NativeThreadPool, name: str) -> "Linears":
        pages, linears = WeightPages(), linears_of(name)[name]
        packed = [
            linears.pack([random_weight(name, *shape)], pages, pool) for shape in (*SHAPES, HEAD)
        ]
        copies = [_copy(each, pages) for _ in range(LAYERS - 1) for each in packed[:-1]]
        parts = [
            PackedLinear(pool, linears, each, None) for each in (*packed[:-1], *copies, packed[-1])
        ]
        return cls(pool, parts, [size for _, size in (*SHAPES * LAYERS, HEAD)])

    def record(self, x: dict[int, Tensor]) -> KernelGraph:
        """All of them in one graph; `x` are the inputs by their width."""
        with self.pool.recording() as graph:
            for part, size in zip(self.parts, self.inputs, strict=True):
                part(x[size])
        return graph


def _copy(weights: PackedWeights, pages: WeightPages) -> PackedWeights:
    packed = pages.take(weights.packed.shape, weights.packed.dtype)
    return replace(weights, packed=packed.copy_(weights.packed))


def main() -> None:
    options = parse()
    pool = NativeThreadPool(options.threads)
    clock = time.thread_time if options.threads == 1 else time.perf_counter
    print(f"{ELEMENTS:,} matrix elements, {options.threads} threads")
    with pool.awake():
        for name in options.formats:
            linears = Linears.make(pool, name)
            for rows in options.rows:
                x = {size: torch.randn(rows, size) for size in (HIDDEN, INNER)}
                graph = linears.record(x)
                seconds = []
                for _ in range(options.rounds):
                    began = clock()
                    pool.replay(graph)
                    seconds.append(clock() - began)
                rate = 2 * rows * ELEMENTS / min(seconds) / 1e9
                print(f"{name:9} {rows:3} rows {1e3 * min(seconds):8.2f} ms {rate:6.0f} GFLOP/s")


if __name__ == "__main__":
    main()
