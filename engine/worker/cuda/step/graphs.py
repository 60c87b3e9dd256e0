"""CUDA graphs of a stage's steps, one for each captured number of rows.

A step is padded to the next captured size. Decodes only have graphs of their own, whose attention
is a decode kernel's. Steps with pieces of prompts have graphs up to `MAX_MIXED_ROWS` tokens: larger
ones take the GPU longer than their launches take the host. They run eagerly, and so do steps with
pieces far behind the start of a prompt, or with any pieces beside LoRA adapters or in models with
recurrent layers. Decodes with adapters have graphs in which each row reads its own one's weights. A
graph holds embedding and layers; logits and sampling run after it, for the real rows only. A graph
of one of several ranks contains their all-reduces: they replay the same sizes in the same order.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

import numpy as np
from torch import Tensor

from engine.errors import StartupError
from engine.worker.cuda.step.arena import StepArena
from engine.worker.lora.model import NO_SLOT, LoraModel
from engine.worker.model.kv.recurrent_states import NO_RUNS, RecurrentStates, filled, flat
from engine.worker.model.layout import blank_layout, padded
from engine.worker.ports import (
    CapturableAttention,
    Int64s,
    RaggedLayout,
    StageModel,
    StateRuns,
    StepContext,
    StepStates,
)
from engine.worker.streams import Graph, Streams

Progress = Callable[[str, int, int], None]

NUM_WARM_UPS = 2  # forward passes before a capture: lazy initialisation must not be captured
MAX_MIXED_ROWS = 512  # decodes and prompt tokens together; more were not bound by the host
MIXED_STRIDE = 64  # from one such size to the next
MAX_PAIRS = 1 << 18  # (prompt token, key) pairs: a graph's tiles are small, and each reads all keys

logger = logging.getLogger(__name__)


def graph_sizes(most: int) -> tuple[int, ...]:
    """Batch sizes to capture, ascending; the last is `most`."""
    ladder = chain((1, 2, 4), range(8, 64, 8), range(64, 256, 16), range(256, most + 32, 32))
    below = [size for size in ladder if size < most]
    return (*below, most)


def mixed_sizes(max_tokens: int) -> tuple[int, ...]:
    """Rows of the graphs for steps with pieces of prompts, ascending."""
    largest = min(max_tokens, MAX_MIXED_ROWS)
    return (*range(MIXED_STRIDE, largest, MIXED_STRIDE), largest)


class GraphSizes(NamedTuple):
    """The rows of the graphs to capture, ascending."""

    decodes: tuple[int, ...]
    mixed: tuple[int, ...]  # the sizes of steps with pieces of prompts

    @property
    def largest(self) -> int:
        return max((0, *self.decodes, *self.mixed))


class GraphKind(NamedTuple):
    """The steps of a graph: `rows` decodes, or so many tokens of decodes and of prompts."""

    is_decode_only: bool
    rows: int
    has_loras: bool = False

    def __str__(self) -> str:
        what = "decodes" if self.is_decode_only else "tokens with prompts"
        return f"{self.rows} {what}{' and LoRA adapters' * self.has_loras}"


class _More(NamedTuple):
    """What else some layers read, in the arena behind ids and positions."""

    runs: StateRuns | None = None  # those of recurrent layers
    lora_slots: Tensor | None = None  # [size]


class _Captured(NamedTuple):
    graph: Graph
    ids: Tensor  # [size]; like the positions, views of the arena
    positions: Tensor
    more: "_More"
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
    states: RecurrentStates | None = None

    def takes(self, runs: StateRuns) -> bool:
        """Whether recurrent layers launch for these runs what was captured, for single rows: the
        convolution has another launch for rows that do not read a state."""
        return self.states is not None and runs.longest <= self.states.num_inputs

    def __call__(self, ids: Tensor, positions: Tensor, more: "_More") -> Tensor:
        states = None
        if self.states is not None:
            assert more.runs is not None, "recurrent layers have runs"
            states = StepStates(self.states.layers, more.runs)
        context = StepContext(
            positions, self.attention, ids=ids, states=states, lora_slots=more.lora_slots
        )
        if self.received is None:
            return self.model.layers(self.model.embed(ids, positions), context)
        # layers add to their input in place, which a replay must find as it was received
        return self.model.layers(self.received[: len(ids)].clone(), context)


class StepGraphs:
    """Graphs that read the start of an arena: ids of all rows, then their positions, the runs of
    recurrent layers, and the slots of LoRA adapters."""

    def __init__(self, streams: Streams, layers: Layers, arena: StepArena, blank: tuple[int, int]):
        """`blank` is the spare block and the block size."""
        self._streams = streams
        self._layers = layers
        self._arena = arena
        self._blank = blank
        self._captured: dict[GraphKind, _Captured] = {}

    def capture(self, sizes: GraphSizes, progress: Progress, *, needs_all: bool) -> None:
        """Capture all sizes, the largest first: smaller graphs reuse its memory.

        All ranks of a stage capture together. Raises `StartupError` if decodes cannot be captured,
        and with `needs_all` if other steps cannot, which else run eagerly.
        """
        kinds = [GraphKind(False, size) for size in reversed(sizes.mixed)]
        model = self._layers.model
        captures_loras = isinstance(model, LoraModel) and model.has_slots
        for has_loras in (True, False) if captures_loras else (False,):
            kinds += [GraphKind(True, size, has_loras) for size in reversed(sizes.decodes)]
        for done, kind in enumerate(kinds):
            progress("graphs", done, len(kinds))
            try:
                self._captured[kind] = self._capture(kind)
            except (RuntimeError, AssertionError) as error:
                line = next(iter(str(error).splitlines()), "") or type(error).__name__
                line = f"a step of {kind} cannot be captured as a CUDA graph: {line}"
                if (kind.is_decode_only and not kind.has_loras) or needs_all:
                    raise StartupError(
                        f"{line}; --no-cuda-graphs runs steps without graphs"
                    ) from error
                logger.warning("%s; such steps run without a graph", line)
                self._streams.synchronize()
        progress("graphs", len(kinds), len(kinds))

    @property
    def mixed(self) -> tuple[int, ...]:
        """Captured numbers of tokens of steps with pieces of prompts, ascending."""
        return tuple(sorted(kind.rows for kind in self._captured if not kind.is_decode_only))

    def padded(self, layout: RaggedLayout, runs: StateRuns | None) -> RaggedLayout | None:
        """The layout padded to a captured size; None if the step has to run eagerly."""
        if layout.encoded or (layout.lora_segments and self.lora_slots(layout) is None):
            return None
        if runs is not None and not self._layers.takes(runs):
            return None
        if layout.token_types is not None or _num_pairs(layout) > MAX_PAIRS:
            return None
        if layout.rope_positions is not None and layout.rope_positions.ndim > 1:
            return None
        wanted, count = self._kind(layout), layout.num_tokens
        sizes = [kind.rows for kind in self._captured if kind._replace(rows=count) == wanted]
        size = min([size for size in sizes if size >= count], default=None)
        return None if size is None else padded(layout, size, self._blank[0])

    def lora_slots(self, layout: RaggedLayout) -> Int64s | None:
        """The slot of each row's adapter; None if there are no graphs for these adapters."""
        model = self._layers.model
        if not isinstance(model, LoraModel) or not model.has_slots:
            return None
        return model.slots(layout.lora_segments, layout.num_tokens)

    def replay(self, layout: RaggedLayout, hidden: Tensor | None = None) -> Tensor:
        """Plan attention and replay; hidden states `[size, hidden]`, which the next replay of any
        size overwrites. If the plan is not the one that was captured, the step and all later ones
        of its kind run without the graph."""
        kind, layers = self._kind(layout), self._layers
        captured = self._captured[kind]
        if layers.received is not None:
            assert hidden is not None, "later stages receive hidden states"
            layers.received[: len(hidden)].copy_(hidden)
        baked = layers.attention.plan_captured(layout)
        if baked == captured.baked:
            captured.graph.replay()
            return captured.hidden
        logger.warning("attention of %s has another plan than its graph, which is dropped", kind)
        del self._captured[kind]
        layers.attention.plan(layout)
        return layers(captured.ids, captured.positions, captured.more)

    @staticmethod
    def _kind(layout: RaggedLayout) -> GraphKind:
        has_loras = bool(layout.lora_segments)
        return GraphKind(layout.is_decode_only, layout.num_tokens, has_loras)

    def _capture(self, kind: GraphKind) -> _Captured:
        blank = blank_layout(kind.rows, *self._blank)
        if not kind.is_decode_only:
            blank = replace(blank, num_decodes=0)
        runs = None if self._layers.states is None else filled(NO_RUNS, kind.rows)
        arrays = [] if runs is None else list(flat(runs))
        if kind.has_loras:
            arrays.append(np.full(kind.rows, NO_SLOT))
        ids, positions, *on_device = self._arena.put(blank.token_ids, blank.positions, *arrays)
        if runs is not None:
            runs = runs._replace(on_device=(on_device[0], on_device[1]))
        more = _More(runs, on_device[-1] if kind.has_loras else None)
        attention = self._layers.attention
        for _ in range(NUM_WARM_UPS):
            attention.plan_captured(blank)
            self._layers(ids, positions, more)
        baked = attention.plan_captured(blank)
        self._streams.synchronize()
        graph, hidden = self._streams.capture(lambda: self._layers(ids, positions, more))
        return _Captured(graph, ids, positions, more, hidden, baked)


def _num_pairs(layout: RaggedLayout) -> int:
    """The sum over pieces of prompts of their tokens times their keys."""
    count = layout.num_decodes
    new = np.diff(layout.qo_indptr[count:]).astype(np.int64)
    return int(new @ layout.kv_len[count:])
