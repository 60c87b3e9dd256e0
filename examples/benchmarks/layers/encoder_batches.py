"""What image encoders would gain from computing tiles of several images together: the linears of
a layer over one tile after the other beside all of them at once, and the attention, which reads
one image.

Prints CPU time of one thread, which other processes on the machine disturb less than elapsed time.

    python -m examples.benchmarks.layers.encoder_batches [--images 2 4 8] [--rounds 7] [--json FILE]
"""

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adapters.models.encoders.vision_transformer import TILE, MixesPatches
from engine.worker.cpu.operators import NativeOperators
from engine.worker.cpu.thread_pool import NativeThreadPool
from engine.worker.weights.checkpoint import Checkpoint

PATCHES = {"SmolVLM2-256M": 1024, "Qwen3.5-0.8B-vision": 4096}  # of one call of the encoder
LAYERS = 2


class Layer(NamedTuple):
    """A layer with random inputs for the tiles of `num_images` images."""

    layer: MixesPatches
    hidden: Tensor
    mixed: Tensor
    qkv: Tensor
    attend: Callable[..., Tensor]

    def linears(self, rows: int) -> None:
        """All but the attention, so many rows at a time."""
        for at in range(0, len(self.hidden), rows):
            part = slice(at, at + rows)
            self.layer.add(self.mixed[part], self.hidden[part])
            self.layer.read(self.hidden[part], self.qkv[part])

    def attention(self, keys: Tensor, rows: int) -> None:
        """The attention of all tiles, so many rows at a time."""
        for at in range(0, len(self.hidden), rows):
            self.attend(self.qkv[at : at + rows, 0], keys, keys)


def seconds(run: Callable[[], None]) -> float:
    began = time.process_time()
    run()
    return time.process_time() - began


def measure(name: str, num_images: int, rounds: int) -> dict[str, float]:
    """Medians in CPU milliseconds for a tile in a layer."""
    checkpoint = Checkpoint.open(f"random:{name}")
    operators = NativeOperators(NativeThreadPool(1))
    weights = checkpoint.open_weights(torch.float32, lambda *_: None)
    encoder: Any = checkpoint.build_encoder(weights, operators)
    heads, width = encoder._num_heads, encoder._shape.width
    rows = num_images * TILE
    qkv = torch.randn(rows, 3, heads, width // heads)
    keys = torch.randn(PATCHES[name], heads, width // heads)
    hidden, mixed, attend = torch.randn(rows, width), torch.randn(rows, width), operators.attend
    layers = [Layer(each, hidden, mixed, qkv, attend) for each in encoder._layers[:LAYERS]]
    kinds = {
        "linears_by_tile": lambda each: each.linears(TILE),
        "linears_together": lambda each: each.linears(rows),
        "attention_by_tile": lambda each: each.attention(keys, TILE),
        "attention_together": lambda each: each.attention(keys, rows),
    }
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(rounds + 1):  # the first one compiles
        for kind, run in kinds.items():
            spent = sum(seconds(partial(run, each)) for each in layers)
            found[kind].append(1e3 * spent / num_images / LAYERS)
    return {kind: round(median(times[1:]), 2) for kind, times in found.items()}


def gain(times: dict[str, float], kinds: tuple[str, ...] = ("linears",)) -> float:
    """The share of the time that these kinds save if they are computed together."""
    whole = times["linears_by_tile"] + times["attention_by_tile"]
    return sum(times[f"{kind}_by_tile"] - times[f"{kind}_together"] for kind in kinds) / whole


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--images", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, dict[int, dict[str, float]]] = {}
    with torch.inference_mode():
        for name in PATCHES:
            for count in options.images:
                times = measure(name, count, options.rounds)
                found.setdefault(name, {})[count] = times
                print(f"{name}, {count} images: {gain(times):.1%} {times}", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
