"""The state slots of one stage: their number, their tensors, and the moves to and from the host."""

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from engine.step import NO_STATE, BlockMove, Direction, PageKind, StateSlots
from engine.worker.model.kv.host_pool import read_blocks
from engine.worker.model.kv.kv_tensors import untouched_zeros
from engine.worker.model.kv.leaving import AfterLeaving, Leaving
from engine.worker.ports import (
    BlockMover,
    Int64s,
    MovesInFlight,
    RaggedLayout,
    RecurrentShape,
    StateRuns,
)
from engine.worker.ports.recurrent import num_elements
from engine.worker.transfers import Transfers

BYTES = torch.float32.itemsize
NO_RUN = (0, 0, NO_STATE)  # without rows
NO_RUNS = StateRuns(np.zeros((0, 3), dtype=np.int64), np.zeros((0, 2), dtype=np.int64))


def bytes_per_state(shapes: Sequence[RecurrentShape]) -> int:
    """Bytes of one state slot: the states of these layers."""
    return BYTES * sum(num_elements(shape) for shape in shapes)


def host_zeros(sizes: tuple[int, ...]) -> Tensor:
    """Zeros in float32 in host memory."""
    return untouched_zeros(sizes, torch.float32)


class RecurrentStates:
    """The states of all recurrent layers of a stage, in `num_slots` slots."""

    def __init__(
        self,
        shapes: Sequence[RecurrentShape],
        num_slots: int,
        zeros: Callable[[tuple[int, ...]], Tensor] = host_zeros,
    ) -> None:
        self.num_slots = num_slots
        self.layers = tuple(
            tuple(zeros((num_slots, *sizes)) for sizes in shape.state_sizes) for shape in shapes
        )

    @property
    def num_inputs(self) -> int:
        """Inputs of convolutions in a state: behind so many rows, those of a run do not read it."""
        return min((layer[0].shape[1] for layer in self.layers), default=sys.maxsize)

    def tensors(self) -> Iterator[Tensor]:
        """All tensors, `[slots, …]` each."""
        for layer in self.layers:
            yield from layer


def runs_of(layout: RaggedLayout) -> StateRuns:
    """The runs of a step."""
    return state_runs(layout.states, layout.qo_indptr.tolist())


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


def filled(runs: StateRuns, num_rows: int) -> StateRuns:
    """With rows behind the others that are runs of their own and write nothing, and then empty
    runs: so many of both."""
    count, rows = len(runs.runs), len(runs.writes)
    more = np.array([NO_RUN], dtype=np.int64).repeat(num_rows - count, axis=0)
    more[: num_rows - rows, 0] = np.arange(rows, num_rows)
    more[: num_rows - rows, 1] = np.arange(rows, num_rows) + 1
    nothing = np.full((num_rows - rows, 2), NO_STATE, dtype=np.int64)
    return StateRuns(np.concatenate((runs.runs, more)), np.concatenate((runs.writes, nothing)))


def flat(runs: StateRuns) -> tuple[Int64s, Int64s]:
    """The numbers of `StateRuns.on_device`."""
    return runs.runs.reshape(-1), runs.writes.reshape(-1)


class StateMover:
    """A `BlockMover` that copies states, and passes moves of KV blocks on to another one.

    Copies run between the compute of the steps, in their order; those to the host are written there
    when they are waited for, or before the next one back.
    """

    def __init__(
        self, device: RecurrentStates, host: RecurrentStates, kv: BlockMover, transfers: Transfers
    ) -> None:
        self._device = device
        self._host = host
        self._kv = kv
        self._transfers = transfers
        self._leaving = Leaving()

    def move(self, moves: Sequence[BlockMove]) -> MovesInFlight:
        """Begin the copies; moves of blocks and of states are independent of each other."""
        for move in moves:
            if move.kind is PageKind.SNAPSHOT:
                self._copy(move)
        moving = self._kv.move([move for move in moves if move.kind is PageKind.BLOCK])
        return AfterLeaving(self._leaving, (moving,))

    def _copy(self, move: BlockMove) -> None:
        rows = read_blocks(move.device, self._device.num_slots, "device state")
        slots = read_blocks(move.host, self._host.num_slots, "host state")
        at = self._transfers.put(rows.numpy())
        pairs = list(zip(self._device.tensors(), self._host.tensors(), strict=True))
        if move.direction is Direction.OUT:
            copies = self._transfers.fetch(*(tensor.index_select(0, at) for tensor, _ in pairs))
            self._leaving.add(copies, partial(_fill, [host for _, host in pairs], slots))
            return
        self._leaving.wait()
        for tensor, host in pairs:
            tensor.index_copy_(0, at, self._transfers.put(host.index_select(0, slots).numpy()))


def _fill(tensors: Sequence[Tensor], rows: Tensor, contents: Sequence[Tensor]) -> None:
    for tensor, content in zip(tensors, contents, strict=True):
        tensor.index_copy_(0, rows, content)
