"""The forward pass of one step on the device: by a captured CUDA graph if there is one, else
eagerly."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from torch import Tensor

from engine.worker.cuda.sampling.last_tokens import Source
from engine.worker.cuda.step.arena import StepArena
from engine.worker.cuda.step.graphs import DecodeGraphs
from engine.worker.model.layout import padded
from engine.worker.ports import AttentionBackend, Int64s, RaggedLayout, StageModel, StepContext


class _Inputs(NamedTuple):
    ids: Tensor
    positions: Tensor
    rows: Tensor


class Forward:
    """Submits the layers of a step to the device without waiting. For models of a single stage."""

    def __init__(
        self,
        model: StageModel,
        attention: AttentionBackend,
        arena: StepArena,
        graphs: DecodeGraphs | None,
        spare_block: int,
    ) -> None:
        self._model = model
        self._attention = attention
        self._arena = arena
        self._graphs = graphs
        self._spare_block = spare_block

    @staticmethod
    def capacity(max_tokens: int, max_requests: int) -> int:
        """The arena's size in int64: ids, positions, output rows, and rows whose token is on the
        device."""
        return 2 * max(max_tokens, max_requests) + max_tokens + 3 * max_requests

    def run(self, layout: RaggedLayout, source: Source, begin: Callable[[], object]) -> Tensor:
        """Hidden states `[sampled rows, then scored rows, hidden]`, valid until the next step.

        `begin` is called right before the layers are submitted.
        """
        size = None if self._graphs is None else self._graphs.size_for(layout)
        if self._graphs is None or size is None:
            return self._run_eagerly(layout, source, begin)
        wide = padded(layout, size, self._spare_block)
        inputs = self._put(wide, source)
        self._graphs.plan(wide)
        begin()
        hidden = self._graphs.replay(size)
        rows = _rows(layout)
        if np.array_equal(rows, np.arange(layout.num_requests)):
            return hidden[: len(rows)]
        return hidden.index_select(0, inputs.rows)

    def _run_eagerly(
        self, layout: RaggedLayout, source: Source, begin: Callable[[], object]
    ) -> Tensor:
        inputs = self._put(layout, source)
        self._attention.plan(layout)
        begin()
        hidden = self._model.embed(inputs.ids, inputs.positions)
        rows = _rows(layout)
        is_all = np.array_equal(rows, np.arange(layout.num_tokens))
        wanted = None if is_all or not len(rows) else inputs.rows
        context = StepContext(
            inputs.positions,
            self._attention,
            wanted,
            loras=layout.lora_segments,
            ids=inputs.ids,
        )
        return self._model.layers(hidden, context)[: len(rows)]

    def _put(self, layout: RaggedLayout, source: Source) -> _Inputs:
        """The inputs of the layers; tokens that only the device knows are copied there."""
        held = layout.last_token_rows if source.ids is not None else source.places[:0]
        places = source.places if source.ids is not None else source.places[:0]
        ids, positions, rows, last_token_rows, held_places = self._arena.put(
            layout.token_ids, layout.positions, _rows(layout), held, places
        )
        if source.ids is not None:
            ids.index_copy_(0, last_token_rows, source.ids.index_select(0, held_places))
        return _Inputs(ids, positions, rows)


def _rows(layout: RaggedLayout) -> Int64s:
    return np.concatenate((layout.sampled_rows, layout.scored_rows))
