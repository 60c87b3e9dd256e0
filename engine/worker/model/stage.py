"""A stage: the layers that this worker holds, their KV, and the attention over it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from engine.worker.model.kv.recurrent_states import RecurrentStates, step_states
from engine.worker.ports import (
    AttentionBackend,
    Int64s,
    RaggedLayout,
    StageModel,
    StepContext,
)

ANY_ROW: Int64s = np.zeros(1, dtype=np.int64)


class ReplaysLayers(Protocol):
    """Runs the layers of some steps as recorded before."""

    def run(self, layout: RaggedLayout, hidden: Tensor | None) -> Tensor | None:
        """Hidden states `[tokens, hidden]`; None if the layers have to run as usual."""
        ...


@dataclass(frozen=True, slots=True)
class Stage:
    """Runs one step through the layers. The first stage embeds, the last one has the head."""

    model: StageModel
    attention: AttentionBackend
    put: Callable[[Int64s], Tensor] = torch.from_numpy  # copies to the device, without waiting
    gather: Callable[[Tensor], Tensor | None] | None = None  # logits of all ranks, to rank 0
    states: RecurrentStates | None = None  # with recurrent layers
    graphs: ReplaysLayers | None = None

    def run(self, layout: RaggedLayout, hidden: Tensor | None = None) -> Tensor:
        """Hidden states `[tokens, hidden]` for the next stage.

        `hidden` comes from the previous stage and is None on the first one.
        """
        return self._run(layout, hidden, None)

    def logits(self, layout: RaggedLayout, hidden: Tensor | None = None) -> Tensor | None:
        """`[sampled rows, vocab]` in float32, on rank 0 only; only on the last stage."""
        return self.head(self.read(layout, hidden)[: len(layout.sampled_rows)])

    def head(self, hidden: Tensor) -> Tensor | None:
        """Logits `[rows, vocab]` in float32 of rows that `read` returned.

        All ranks of the stage call this together; ranks other than 0 get None.
        """
        part = self.model.logits(hidden)
        return part if self.gather is None else self.gather(part)

    def read(
        self,
        layout: RaggedLayout,
        hidden: Tensor | None = None,
        keep: Callable[[Tensor], None] | None = None,
    ) -> Tensor:
        """Hidden states that the result needs: `[sampled, then scored, then pooled rows, hidden]`.

        A step has sampled or pooled rows, not both. With `keep` those of all rows are computed, and
        it is called with them.
        """
        rows = layout.sampled_rows
        if len(layout.scored_rows) or len(layout.pooled.rows):
            rows = np.concatenate((rows, layout.scored_rows, layout.pooled.rows))
        most = max(len(layout.sampled_rows), len(layout.pooled.rows))  # each in ascending order
        is_all = most == len(rows) == layout.num_tokens
        if keep is not None:
            every = self._run(layout, hidden, None)
            keep(every)
            return every if is_all else every.index_select(0, self.put(rows))
        if not len(rows):  # a piece of a prompt, of which the last layer has to write KV only
            return self._run(layout, hidden, self.put(ANY_ROW))[:0]
        return self._run(layout, hidden, None if is_all else self.put(rows))

    def _run(self, layout: RaggedLayout, hidden: Tensor | None, rows: Tensor | None) -> Tensor:
        found = None if self.graphs is None else self.graphs.run(layout, hidden)
        if found is not None:
            return found if rows is None else found.index_select(0, rows)
        positions = self.put(layout.positions)
        ids = None
        if hidden is None:
            types = None if layout.token_types is None else self.put(layout.token_types)
            ids = self.put(layout.token_ids)
            hidden = self.model.embed(ids, positions, types)
        self.attention.plan(layout)
        step = None if self.states is None else step_states(self.states, layout)
        loras = layout.lora_segments
        context = StepContext(positions, self.attention, rows, loras=loras, states=step, ids=ids)
        return self.model.layers(hidden, context)
