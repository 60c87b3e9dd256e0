"""CUDA graphs of one stage of several: hidden states come from the previous stage, or go to the
next one.

A graph contains the all-reduces of the stage's ranks, which replay the same sizes in the same
order. Sending, receiving and gathering logits stay outside.
"""

import torch
from torch import Tensor

from engine.worker.cuda.step.arena import StepArena
from engine.worker.cuda.step.graphs import DecodeGraphs
from engine.worker.model.layout import padded
from engine.worker.ports import RaggedLayout


class StageGraphs:
    """Replays the layers of decode-only steps; a `ReplaysLayers`."""

    def __init__(
        self,
        graphs: DecodeGraphs,
        arena: StepArena,
        received: Tensor | None,
        spare_block: int,
        *,
        is_last: bool,
    ) -> None:
        """`received` `[most rows, hidden]` is where the graphs read the hidden states of the
        previous stage; None on the first stage."""
        self._graphs = graphs
        self._arena = arena
        self._received = received
        self._spare_block = spare_block
        self._is_last = is_last

    def run(self, layout: RaggedLayout, hidden: Tensor | None) -> Tensor | None:
        """Hidden states of all rows; None if the step has to run eagerly."""
        size = self._graphs.size_for(layout)
        if size is None:
            return None
        wide = padded(layout, size, self._spare_block)
        self._arena.put(wide.token_ids, wide.positions)
        if self._received is not None:
            assert hidden is not None, "later stages receive hidden states"
            self._received[: len(hidden)].copy_(hidden)
        self._graphs.plan(wide)
        found = self._graphs.replay(size)[: layout.num_requests]
        # what is sent must not be overwritten by the next replay
        return found if self._is_last else found.clone(memory_format=torch.contiguous_format)
