"""The state slots of one stage: their number, their tensors, and the moves to and from the host."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from engine.step import NO_STATE, BlockMove, Direction, PageKind, StateSlots
from engine.worker.model.kv.host_pool import read_blocks
from engine.worker.model.kv.kv_tensors import untouched_zeros
from engine.worker.ports import (
    BlockMover,
    MovesInFlight,
    RaggedLayout,
    RecurrentShape,
    RecurrentState,
    StateRuns,
    StepStates,
)

BYTES = torch.float32.itemsize


def bytes_per_state(shapes: Sequence[RecurrentShape]) -> int:
    """Bytes of one state slot: the states of these layers."""
    return BYTES * sum(shape.num_elements for shape in shapes)


class RecurrentStates:
    """The states of all recurrent layers of a stage, in `num_slots` slots."""

    def __init__(self, shapes: Sequence[RecurrentShape], num_slots: int) -> None:
        self.num_slots = num_slots
        self.layers = tuple(_zeros(shape, num_slots) for shape in shapes)

    def tensors(self) -> Iterator[Tensor]:
        """All tensors, `[slots, …]` each."""
        for layer in self.layers:
            yield from layer


def _zeros(shape: RecurrentShape, num_slots: int) -> RecurrentState:
    heads = shape.num_value_heads
    return RecurrentState(
        untouched_zeros((num_slots, shape.kernel - 1, shape.channels), torch.float32),
        untouched_zeros((num_slots, heads, shape.key_dim, shape.value_dim), torch.float32),
    )


def step_states(states: RecurrentStates, layout: RaggedLayout) -> StepStates:
    """What a step reads and writes."""
    return StepStates(states.layers, state_runs(layout.states, layout.qo_indptr.tolist()))


def state_runs(slots: Sequence[StateSlots], indptr: Sequence[int]) -> StateRuns:
    """The runs of entries with these slots, whose rows begin and end at `indptr`.

    An entry that reads what the one before it writes continues its run: they are the last token and
    the drafts of one request.
    """
    writes = np.full((indptr[-1], 2), NO_STATE, dtype=np.int64)
    runs: list[list[int]] = []
    before = NO_STATE
    for state, start, stop in zip(slots, indptr, indptr[1:], strict=False):
        if state.source != NO_STATE and state.source == before:
            runs[-1][1] = stop
        else:
            runs.append([start, stop, state.source])
        writes[stop - 1, 0] = before = state.slot
        for num_tokens, slot in state.snapshots:
            row = start + num_tokens - 1
            writes[row, int(row == stop - 1)] = slot
    return StateRuns(np.array(runs, dtype=np.int64), writes)


class StateMover:
    """A `BlockMover` that copies states, and passes moves of KV blocks on to another one."""

    def __init__(self, device: RecurrentStates, host: RecurrentStates, kv: BlockMover) -> None:
        self._device = device
        self._host = host
        self._kv = kv

    def move(self, moves: Sequence[BlockMove]) -> MovesInFlight:
        """Make the copies; moves of blocks and of states are independent of each other."""
        for move in moves:
            if move.kind is PageKind.SNAPSHOT:
                self._copy(move)
        return self._kv.move([move for move in moves if move.kind is PageKind.BLOCK])

    def _copy(self, move: BlockMove) -> None:
        source, at = self._device, read_blocks(move.device, self._device.num_slots, "device state")
        target, to = self._host, read_blocks(move.host, self._host.num_slots, "host state")
        if move.direction is Direction.IN:
            source, target, at, to = target, source, to, at
        for read, write in zip(source.tensors(), target.tensors(), strict=True):
            write.index_copy_(0, to, read.index_select(0, at))
