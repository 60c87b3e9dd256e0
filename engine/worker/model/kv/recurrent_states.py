"""The state slots of one stage: their number, their tensors, and the moves to and from the host."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from engine.step import BlockMove, Direction, StateSlots
from engine.worker.model.kv.host_pool import read_blocks
from engine.worker.ports import (
    BlockMover,
    RaggedLayout,
    RecurrentShape,
    RecurrentState,
    StateRun,
    StepStates,
)

BYTES = torch.float32.itemsize
NO_SLOTS = StateSlots(0, -1)  # of an entry whose state is not used, in measurements


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
        torch.zeros(num_slots, shape.channels, shape.kernel - 1),
        torch.zeros(num_slots, heads, shape.key_dim, shape.value_dim),
    )


def step_states(states: RecurrentStates, layout: RaggedLayout) -> StepStates:
    """What a step reads and writes. A snapshot ends a run, and the next one continues from it."""
    decodes, others = [], []
    bounds = zip(layout.states, layout.qo_indptr[:-1], layout.qo_indptr[1:], strict=True)
    for number, (state, start, stop) in enumerate(bounds):
        runs = runs_of(state, int(start), int(stop))
        if number < layout.num_decodes:
            decodes.append(runs.pop(0))
        others += runs
    slots = torch.tensor([run.slot for run in decodes], dtype=torch.int64)
    return StepStates(states.layers, tuple(decodes), tuple(others), slots)


def runs_of(state: StateSlots, start: int, stop: int) -> list[StateRun]:
    """The runs of one request."""
    runs, first, source = [], start, state.source
    for num_tokens, slot in state.snapshots:
        runs.append(StateRun(first, start + num_tokens, source, slot))
        first, source = start + num_tokens, slot
    return [*runs, StateRun(first, stop, source, state.slot)]


class StateMover:
    """A `BlockMover` that copies states, and passes moves of KV blocks on to another one."""

    def __init__(self, device: RecurrentStates, host: RecurrentStates, kv: BlockMover) -> None:
        self._device = device
        self._host = host
        self._kv = kv

    @contextmanager
    def moving(self, moves: Sequence[BlockMove]) -> Iterator[tuple[int, ...]]:
        """Make the copies; moves of blocks and of states are independent of each other."""
        for move in moves:
            if move.is_state:
                self._copy(move)
        with self._kv.moving([move for move in moves if not move.is_state]) as unread:
            yield unread

    def _copy(self, move: BlockMove) -> None:
        source, at = self._device, read_blocks(move.device, self._device.num_slots, "device state")
        target, to = self._host, read_blocks(move.host, self._host.num_slots, "host state")
        if move.direction is Direction.IN:
            source, target, at, to = target, source, to, at
        for read, write in zip(source.tensors(), target.tensors(), strict=True):
            write.index_copy_(0, to, read.index_select(0, at))
