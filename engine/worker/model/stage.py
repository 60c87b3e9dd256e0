"""A stage: the layers that this worker holds, their KV, and the attention over it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from engine.worker.model.kv.recurrent_states import RecurrentStates, filled, flat, runs_of
from engine.worker.ports import (
    AddedRows,
    AttentionBackend,
    EncodedRows,
    Encoding,
    Int64s,
    RaggedLayout,
    StageModel,
    StateRuns,
    StepContext,
    StepStates,
)
from engine.worker.sampling.last_tokens import NO_ROWS, NOTHING_CONTINUED, Continued

ANY_ROW: Int64s = np.zeros(1, dtype=np.int64)


class ReplaysLayers(Protocol):
    """Runs the layers of some steps as recorded before."""

    @property
    def mixed(self) -> tuple[int, ...]:
        """The numbers of tokens of recorded steps with pieces of prompts, ascending."""

    def padded(self, layout: RaggedLayout, runs: StateRuns | None) -> RaggedLayout | None:
        """The layout with as many rows as a recording has; None if the layers have to run as
        usual. `runs` are those of recurrent layers."""

    def lora_slots(self, layout: RaggedLayout) -> Int64s | None:
        """The slots of LoRA adapters that a recording reads behind ids, positions and runs."""

    def replay(self, layout: RaggedLayout, hidden: Tensor | None) -> Tensor:
        """Hidden states of a padded layout, whose ids and positions were copied to the device; the
        next replay overwrites them. `hidden` comes from the previous stage."""


def put_each(put: Callable[[Int64s], Tensor]) -> Callable[..., list[Tensor]]:
    """Copies arrays to the device one by one, without a place that they share."""
    return lambda *arrays: [put(array) for array in arrays]


PUT_ON_HOST = put_each(torch.from_numpy)


class HoldsEncodings(Protocol):
    """The encoded images of a worker."""

    def encoding(self, number: int) -> Encoding | None:
        """The encoding of an image; None if it failed. Raises `ValueError` for an unknown one."""


class _Inputs(NamedTuple):
    """The inputs of the layers on the device."""

    ids: Tensor
    positions: Tensor
    rows: Tensor
    types: Tensor
    runs: StateRuns | None


@dataclass(frozen=True, slots=True)
class Stage:
    """Runs one step through the layers. The first stage embeds, the last one has the head."""

    model: StageModel
    attention: AttentionBackend
    put: Callable[..., list[Tensor]] = PUT_ON_HOST  # to the device, without waiting
    gather: Callable[[Tensor], Tensor | None] | None = None  # logits of all ranks, to rank 0
    states: RecurrentStates | None = None  # with recurrent layers
    graphs: ReplaysLayers | None = None
    images: HoldsEncodings | None = None  # set if the model has an image encoder

    def run(
        self,
        layout: RaggedLayout,
        hidden: Tensor | None = None,
        continued: Continued = NOTHING_CONTINUED,
    ) -> Tensor:
        """Hidden states `[tokens, hidden]` for the next stage.

        `hidden` comes from the previous stage and is None on the first one, which reads the tokens
        of `continued` entries on the device.
        """
        return self._run(layout, hidden, NO_ROWS, continued, is_kept=True)

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
        continued: Continued = NOTHING_CONTINUED,
    ) -> Tensor:
        """Hidden states that the result needs: `[sampled, then scored, then pooled rows, hidden]`.

        A step has sampled or pooled rows, not both.
        """
        rows = _needed_rows(layout)
        if not len(rows):  # a piece of a prompt, of which the last layer has to write KV only
            return self._run(layout, hidden, ANY_ROW, continued)[:0]
        return self._run(layout, hidden, NO_ROWS if _is_all(rows, layout) else rows, continued)

    def read_all(
        self,
        layout: RaggedLayout,
        hidden: Tensor | None = None,
        continued: Continued = NOTHING_CONTINUED,
    ) -> tuple[Tensor, Tensor]:
        """The hidden states that `read` returns, and those of all rows, which no later step
        overwrites before it has been collected."""
        every = self._run(layout, hidden, NO_ROWS, continued, is_kept=True)
        rows = _needed_rows(layout)
        if _is_all(rows, layout):
            return every, every
        (places,) = self.put(rows)
        return every.index_select(0, places), every

    def _run(
        self,
        layout: RaggedLayout,
        hidden: Tensor | None,
        rows: Int64s,
        continued: Continued,
        *,
        is_kept: bool = False,
    ) -> Tensor:
        """Hidden states of these rows, of all if there are none. They are `is_kept` while later
        steps run."""
        runs = None if self.states is None else runs_of(layout)
        wide = None if self.graphs is None else self.graphs.padded(layout, runs)
        inputs = self._put(layout, wide or layout, rows, continued, runs)
        wanted = inputs.rows if len(rows) else None
        if self.graphs is not None and wide is not None:
            replayed = self.graphs.replay(wide, hidden)[: layout.num_tokens]
            if wanted is not None:
                return replayed.index_select(0, wanted)
            if is_kept:
                return replayed.clone(memory_format=torch.contiguous_format)
            return replayed
        if hidden is None:
            types = None if layout.token_types is None else inputs.types
            hidden = self.model.embed(inputs.ids, inputs.positions, types)
        added = () if not layout.encoded else self._insert(hidden, layout.encoded)
        self.attention.plan(layout)
        context = StepContext(
            inputs.positions,
            self.attention,
            wanted,
            loras=layout.lora_segments,
            states=self._states(inputs.runs),
            ids=inputs.ids,
            added=added,
        )
        return self.model.layers(hidden, context)

    def _insert(self, hidden: Tensor, encoded: tuple[EncodedRows, ...]) -> tuple[AddedRows, ...]:
        """Replace embeddings by the rows of encoded images that the tokens stand for; returns what
        is added behind the first layers. Stages without the encoder do nothing."""
        if self.images is None:
            return ()
        rows: list[Int64s] = []
        added: list[tuple[Tensor, ...]] = []
        for image, start, first, count in encoded:
            encoding = self.images.encoding(image)
            if encoding is None:  # the entry's request fails
                continue
            if first + count > len(encoding.embeddings):
                raise ValueError(f"image {image} has {len(encoding.embeddings)} rows")
            hidden[start : start + count] = encoding.embeddings[first : first + count]
            rows.append(np.arange(start, start + count))
            added.append(tuple(each[first : first + count] for each in encoding.added))
        if not any(added):
            return ()
        (places,) = self.put(np.concatenate(rows))
        return tuple(
            AddedRows(places, torch.cat(of_layer)) for of_layer in zip(*added, strict=True)
        )

    def _put(
        self,
        layout: RaggedLayout,
        wide: RaggedLayout,
        rows: Int64s,
        continued: Continued,
        runs: StateRuns | None,
    ) -> _Inputs:
        """Copy the inputs of the layers; tokens that only the device knows are copied there."""
        types = NO_ROWS if layout.token_types is None else layout.token_types
        rope = wide.positions if wide.rope_positions is None else wide.rope_positions
        turned = rope.reshape(-1)  # there may be three of each
        arrays = [wide.token_ids, turned]  # and others that graphs read
        if runs is not None:
            runs = runs if wide is layout else filled(runs, wide.num_tokens)
            arrays += flat(runs)
        if layout.lora_segments and self.graphs is not None and wide is not layout:
            slots = self.graphs.lora_slots(wide)
            arrays += () if slots is None else (slots,)
        first = len(arrays)
        arrays += (rows, types)
        known, held, numbers = continued.on_device()
        if known is not None:
            arrays += (layout.last_token_rows[numbers], held)
        ids, positions, *others = self.put(*arrays)
        wanted, token_types, *places = others[first - 2 :]
        if runs is not None:
            runs = runs._replace(on_device=(others[0], others[1]))
        if known is not None:
            ids.index_copy_(0, places[0], known.index_select(0, places[1]))
        return _Inputs(ids, positions.view(rope.shape), wanted, token_types, runs)

    def _states(self, runs: StateRuns | None) -> StepStates | None:
        if self.states is None or runs is None:
            return None
        return StepStates(self.states.layers, runs)


def _needed_rows(layout: RaggedLayout) -> Int64s:
    """The rows that the result of a step reads."""
    if len(layout.scored_rows) or len(layout.pooled.rows):
        return np.concatenate((layout.sampled_rows, layout.scored_rows, layout.pooled.rows))
    return layout.sampled_rows


def _is_all(rows: Int64s, layout: RaggedLayout) -> bool:
    """Whether these are all rows in their order."""
    most = max(len(layout.sampled_rows), len(layout.pooled.rows))  # each in ascending order
    return most == len(rows) == layout.num_tokens
