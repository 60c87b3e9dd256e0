"""Steps captured in CUDA graphs, against the same steps run eagerly; on a GPU only."""

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from engine.worker.model.layout import blank_layout, padded
from engine.worker.ports import RaggedLayout
from tests.adapters.attention.flashinfer_cases import Paged
from tests.adapters.attention.flashinfer_on_gpu import FP8, ON_GPU, OnGpu, Shape, check_close

pytestmark = ON_GPU

LLAMA = Shape(32, 8, 128)
LATENTS = [Shape(heads, 1, 576, values_from=64) for heads in (16, 20, 128)]
SHAPES = [
    LLAMA,
    Shape(14, 2, 64),
    Shape(12, 12, 64),
    Shape(71, 1, 64),  # Falcon: more heads than a product has rows
    Shape(16, 4, 256),
    Shape(8, 1, 512),
    Shape(32, 32, 80),
    Shape(64, 8, 64, window=100, has_sinks=True),
    replace(LLAMA, kv_dtype=FP8, scales=(0.5, 2.0)),
    replace(LLAMA, page_size=1),
    replace(LLAMA, dtype=torch.float16),
    *LATENTS,
]
NUM_PAGES = 3000


class Captured(NamedTuple):
    """A graph of one layer on static inputs."""

    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, Tensor, Tensor]
    out: Tensor
    baked: tuple[int, ...]


def capture(gpu: OnGpu, size: int, *, is_mixed: bool = False) -> Captured:
    blank = blank_layout(size, NUM_PAGES, gpu.shape.page_size)
    if is_mixed:
        blank = replace(blank, num_decodes=0)
    inputs = gpu.step(size)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.inference_mode(), torch.cuda.stream(stream):
        for _ in range(2):
            gpu.attention.plan_captured(blank)
            gpu.attend(*inputs)
        baked = gpu.attention.plan_captured(blank)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            out = gpu.attend(*inputs)
    torch.cuda.synchronize()
    return Captured(graph, inputs, out, baked)


def replay(gpu: OnGpu, captured: Captured, step: Paged) -> None:
    """One step of a graph, held against float32 over the cache that it has written."""
    layout = step.layout()
    gpu.fill(layout)
    with torch.inference_mode():
        _replay(gpu, captured, layout)
    count = layout.num_tokens
    expected = gpu.expected(layout, captured.inputs[0][:count])
    check_close(captured.out[:count], expected, gpu.shape.dtype)


def _replay(gpu: OnGpu, captured: Captured, layout: RaggedLayout) -> None:
    size = len(captured.out)
    for static, new in zip(captured.inputs, gpu.step(size), strict=True):
        static.copy_(new)
    wide = padded(layout, size, NUM_PAGES)
    assert gpu.attention.plan_captured(wide) == captured.baked
    captured.out.fill_(torch.nan)
    captured.graph.replay()


def decodes(turn: int, most: int) -> Paged:
    """Between one and `most` requests whose contexts grow with each round."""
    count = 1 + turn % most
    return Paged(tuple((turn * (i + 1) + 3 * i, 1) for i in range(count)), 16, seed=turn)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_graph_is_right_for_200_steps_of_growing_contexts(shape: Shape) -> None:
    gpu = OnGpu(shape, NUM_PAGES)
    captured = capture(gpu, 8)
    for turn in range(200):
        replay(gpu, captured, decodes(turn, most=8))


def test_graphs_of_two_sizes_and_eager_steps_do_not_disturb_each_other() -> None:
    gpu = OnGpu(LLAMA, NUM_PAGES)
    large, small = capture(gpu, 8), capture(gpu, 4)
    for turn in range(60):
        replay(gpu, large if turn % 2 else small, decodes(turn, most=4))
        layout = Paged(((50 + turn, 1), (turn, 20)), 16, seed=turn).layout()
        gpu.fill(layout)
        gpu.attention.plan(layout)
        q, k, v = gpu.step(layout.num_tokens)
        check_close(gpu.run(q, k, v), gpu.expected(layout, q), LLAMA.dtype)


@pytest.mark.parametrize("shape", [LLAMA, Shape(14, 2, 64), *LATENTS[:2]], ids=str)
@pytest.mark.parametrize("size", [64, 256])
def test_a_graph_holds_decodes_and_pieces_of_prompts(shape: Shape, size: int) -> None:
    gpu = OnGpu(shape, NUM_PAGES)
    captured = capture(gpu, size, is_mixed=True)
    decodes = capture(gpu, 8)
    for turn in range(60):
        count = 1 + turn % 40
        rows = tuple((turn * (i + 1) + 3 * i, 1) for i in range(count))
        pieces = ((0, 2 + turn % 9), (16 * turn, 2 + turn % 13))
        replay(gpu, captured, Paged((*rows, *pieces), 16, seed=turn))
        replay(gpu, decodes, Paged(rows[:8], 16, seed=turn))


def test_the_keys_of_long_requests_are_divided_beside_short_ones() -> None:
    gpu = OnGpu(LLAMA, NUM_PAGES)
    captured = capture(gpu, 64)
    for turn, longest in enumerate((8000, 1, 513, 4097)):
        rows = tuple((turn + 7 * i, 1) for i in range(30))
        replay(gpu, captured, Paged(((longest, 1), *rows), 16, seed=turn))


def test_contexts_may_be_far_longer_than_at_the_capture() -> None:
    gpu = OnGpu(LLAMA, NUM_PAGES)
    captured = capture(gpu, 4)
    for length in (1, 8000, 17, 4097):
        replay(gpu, captured, Paged(((length, 1),) * 4, 16, seed=length))
