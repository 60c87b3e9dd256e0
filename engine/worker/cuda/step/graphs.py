"""CUDA graphs of decode-only steps of a stage, one for each captured batch size.

A step is padded to the next captured size. Steps with prefill run eagerly: their kernels take
longer than their launches. So do steps with rows of LoRA adapters, whose segments vary. A graph
holds embedding and layers; logits and sampling run after it, for the real rows only. A graph of
one of several ranks contains their all-reduces: they replay the same sizes in the same order.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from torch import Tensor

from engine.errors import StartupError
from engine.worker.cuda.step.arena import StepArena
from engine.worker.model.layout import blank_layout, padded
from engine.worker.ports import CapturableAttention, RaggedLayout, StageModel, StepContext
from engine.worker.streams import Graph, Streams

Progress = Callable[[str, int, int], None]

NUM_WARM_UPS = 2  # forward passes before a capture: lazy initialisation must not be captured


def graph_sizes(most: int) -> tuple[int, ...]:
    """Batch sizes to capture, ascending; the last is `most`."""
    ladder = chain((1, 2, 4), range(8, 64, 8), range(64, 256, 16), range(256, most + 32, 32))
    below = [size for size in ladder if size < most]
    return (*below, most)


class _Captured(NamedTuple):
    graph: Graph
    hidden: Tensor  # [size, hidden], written by each replay
    baked: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Layers:
    """The captured function: ids and positions to hidden states, after attention was planned.

    A later stage reads the hidden states of the previous one in `received` instead of embedding.
    """

    model: StageModel
    attention: CapturableAttention
    received: Tensor | None = None  # [most rows, hidden]

    def __call__(self, ids: Tensor, positions: Tensor) -> Tensor:
        context = StepContext(positions, self.attention, ids=ids)
        if self.received is None:
            return self.model.layers(self.model.embed(ids, positions), context)
        # layers add to their input in place, which a replay must find as it was received
        return self.model.layers(self.received[: len(ids)].clone(), context)


class DecodeGraphs:
    """Graphs that read the start of an arena: `size` ids, then `size` positions."""

    def __init__(self, streams: Streams, layers: Layers, arena: StepArena, blank: tuple[int, int]):
        """`blank` is the spare block and the block size."""
        self._streams = streams
        self._layers = layers
        self._arena = arena
        self._blank = blank
        self._captured: dict[int, _Captured] = {}

    @property
    def sizes(self) -> tuple[int, ...]:
        """Captured batch sizes, ascending."""
        return tuple(sorted(self._captured))

    def capture(self, most: int, progress: Progress) -> None:
        """Capture all sizes up to `most`, the largest first: smaller graphs reuse its memory.

        All ranks of a stage capture together. Raises `StartupError` if a step cannot be captured.
        """
        sizes = graph_sizes(most)
        for done, size in enumerate(reversed(sizes)):
            progress("graphs", done, len(sizes))
            try:
                self._captured[size] = self._capture(size)
            except (RuntimeError, AssertionError) as error:
                line = next(iter(str(error).splitlines()), "") or type(error).__name__
                raise StartupError(
                    f"a decode step of {size} requests cannot be captured as a CUDA graph: {line}; "
                    "--no-cuda-graphs runs steps without graphs"
                ) from error
        progress("graphs", len(sizes), len(sizes))

    def padded(self, layout: RaggedLayout) -> RaggedLayout | None:
        """The layout padded to a captured size; None if the step has to run eagerly."""
        if not layout.is_decode_only or layout.lora_segments or layout.states:
            return None
        if layout.encoded or (layout.rope_positions is not None and layout.rope_positions.ndim > 1):
            return None
        size = next((size for size in self.sizes if size >= layout.num_requests), None)
        return None if size is None else padded(layout, size, self._blank[0])

    def replay(self, layout: RaggedLayout, hidden: Tensor | None = None) -> Tensor:
        """Plan attention and replay; hidden states `[size, hidden]`, which the next replay of any
        size overwrites."""
        layers, captured = self._layers, self._captured[layout.num_requests]
        if layers.received is not None:
            assert hidden is not None, "later stages receive hidden states"
            layers.received[: len(hidden)].copy_(hidden)
        layers.attention.plan_captured(layout)
        assert layers.attention.baked(layout.num_requests) == captured.baked, (
            f"the plan for {layout.num_requests} rows is not the one that was captured"
        )
        captured.graph.replay()
        return captured.hidden

    def _capture(self, size: int) -> _Captured:
        blank = blank_layout(size, *self._blank)
        ids, positions = self._arena.put(blank.token_ids, blank.positions)
        attention = self._layers.attention
        for _ in range(NUM_WARM_UPS):
            attention.plan_captured(blank)
            self._layers(ids, positions)
        attention.plan_captured(blank)
        self._streams.synchronize()
        graph, hidden = self._streams.capture(lambda: self._layers(ids, positions))
        return _Captured(graph, hidden, attention.baked(size))
