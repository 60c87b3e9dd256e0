"""The experts of one layer on the CPU, alone, beside dense linears that read as many bytes.

Tokens choose experts at random. A step reads the weights of the experts that its tokens use; their
bytes over the read rate of one thread are the limit of its time. Both kinds are computed by one
thread in turns, and what is reported is CPU time, which other processes disturb less than elapsed
time.

    python -m examples.benchmarks.layers.expert_speed [--formats int8 int4] [--rows 1 8 32]
        [--json FILE]
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from engine.worker.cpu.kernel_graph import KernelGraph
from engine.worker.cpu.limits import measure_read
from engine.worker.cpu.linears import linears_of
from engine.worker.cpu.linears.experts import ExpertLinear, NativeExperts
from engine.worker.cpu.linears.packed import PackedLinear, PackedWeights
from engine.worker.cpu.operators import NativeOperators
from engine.worker.cpu.pages import WeightPages
from engine.worker.cpu.thread_pool import NativeThreadPool
from engine.worker.ports import Routing
from examples.benchmarks.layers.linear_formats import random_weight

FORMATS = ("float32", "bfloat16", "int8", "int4", "mxfp4")


class Shape(NamedTuple):
    """The sizes of one layer; by default OLMoE-1B-7B's."""

    hidden: int = 2048
    inner: int = 1024
    num_experts: int = 64
    top_k: int = 8


class Sizes(NamedTuple):
    """Bytes of the packed weights of one expert."""

    up: int
    down: int

    @property
    def total(self) -> int:
        return self.up + self.down


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=["int8", "int4", "mxfp4"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32], help="of a step")
    parser.add_argument("--rounds", type=int, default=30, help="of which the median counts")
    parser.add_argument("--hidden", type=int, default=Shape().hidden)
    parser.add_argument("--inner", type=int, default=Shape().inner)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


class Layer:
    """The experts of one format, and dense linears of the same matrices."""

    def __init__(self, pool: NativeThreadPool, name: str, shape: Shape) -> None:
        self.pool, self.shape, self._pages = pool, shape, WeightPages()
        linears = linears_of(name)[name]
        gate_and_up = random_weight(name, 2 * shape.inner, shape.hidden)
        up = self._copies(linears.pack([gate_and_up], self._pages, pool))
        down = linears.pack([random_weight(name, shape.hidden, shape.inner)], self._pages, pool)
        self.packed = up, self._copies(down)
        self.sizes = Sizes(*(_bytes(each[0]) for each in self.packed))
        self.activation = NativeOperators(pool).activation("silu", is_gated=True)
        parts = [
            ExpertLinear(
                pool, linears, each, [torch.zeros(each[0].outputs)] * shape.num_experts, kind
            )
            for kind, each in zip(("expert up", "expert down"), self.packed, strict=True)
        ]
        routing = Routing(shape.top_k, renormalizes=True)
        self.experts = NativeExperts(pool, parts[:1], parts[1:], self.activation, routing)
        self._dense = [
            (PackedLinear(pool, linears, one, None), PackedLinear(pool, linears, other, None))
            for one, other in zip(*self.packed, strict=True)
        ]

    def _copies(self, weights: PackedWeights) -> list[PackedWeights]:
        found = [weights]
        for _ in range(self.shape.num_experts - 1):
            packed = self._pages.take(weights.packed.shape, weights.packed.dtype)
            found.append(replace(weights, packed=packed.copy_(weights.packed)))
        return found

    def dense(self, x: Tensor, experts: list[int]) -> None:
        """All rows through these experts, one dense linear after the other."""
        for up, down in (self._dense[each] for each in experts):
            down(self.activation(up(x)))

    def record(self, compute: Callable[[], object]) -> KernelGraph:
        with self.pool.recording() as graph:
            compute()
        return graph


def _bytes(weights: PackedWeights) -> int:
    parts = weights.packed, weights.scale, weights.offset
    return sum(part.nbytes for part in parts if part is not None)


def measure(layer: Layer, rows: int, rounds: int, read_rate: float) -> dict[str, float]:
    """Medians over rounds, each with other rows and experts."""
    shape, random = layer.shape, torch.Generator().manual_seed(rows)
    x, logits = torch.randn(rows, shape.hidden), torch.zeros(rows, shape.num_experts)
    experts = layer.record(lambda: layer.experts(x, logits))
    used, times, dense_times, shares = [], [], [], []
    for _ in range(rounds):
        logits.normal_(generator=random)
        x.normal_(generator=random)
        count = len(set(logits.topk(shape.top_k).indices.flatten().tolist()))
        others = torch.randperm(shape.num_experts, generator=random)[:count].tolist()
        dense = layer.record(partial(layer.dense, x, others))
        seconds = _seconds(layer.pool, experts)
        used.append(count)
        times.append(seconds)
        dense_times.append(_seconds(layer.pool, dense))
        shares.append(count * layer.sizes.total / read_rate / seconds)
    return {
        "experts_used": _median(used),
        "milliseconds": 1e3 * _median(times),
        "share_of_read_rate": _median(shares),
        "dense_milliseconds": 1e3 * _median(dense_times),
        "time_of_dense": _median([a / b for a, b in zip(times, dense_times, strict=True)]),
    }


def _seconds(pool: NativeThreadPool, graph: KernelGraph) -> float:
    began = time.thread_time()
    pool.replay(graph)
    return time.thread_time() - began


def _median(values: list[int] | list[float]) -> float:
    return sorted(values)[len(values) // 2]


def main() -> None:
    options = parse()
    pool, shape = NativeThreadPool(1), Shape(hidden=options.hidden, inner=options.inner)
    load, rates = os.getloadavg()[0], [measure_read(1).rate]
    layers = {name: Layer(pool, name, shape) for name in options.formats}
    rates.append(measure_read(1).rate)
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name, layer in layers.items():
        found[name] = {}
        for rows in options.rows:
            row = found[name][str(rows)] = measure(layer, rows, options.rounds, max(rates))
            print(
                f"{name:9} {rows:3} rows, {row['experts_used']:.0f} experts: "
                f"{row['milliseconds']:.2f} ms, {row['share_of_read_rate']:.0%} of the read rate, "
                f"{row['time_of_dense']:.2f} × dense"
            )
    if options.json:
        figures = {
            "layer": shape._asdict(),
            "threads": 1,
            "clock": "CPU time of the thread",
            "read_bytes_per_second": max(rates),
            "load": [round(load, 1), round(os.getloadavg()[0], 1)],
            "by_format_and_rows": found,
        }
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
