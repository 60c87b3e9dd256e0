"""A device that remembers of which tokens the KV in each slot is: what a wrong schedule would read.

A step is carried out when its result is wanted, in the order of submission: moves, then compute.
"""

from array import array
from collections.abc import Iterable

from engine.iteration import Iteration
from engine.request import Request, State
from engine.step import LAST_TOKEN, BlockMove, Direction, Step, StepEntry

Tier = dict[int, tuple[int, ...]]  # by slot: all tokens up to the one whose KV is there


class RememberingDevice:
    """Asserts that attention sees the KV of the tokens before, and that moves harm nobody."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._device: Tier = {}
        self._host: Tier = {}

    def forget(self) -> None:
        """The worker died."""
        self._device.clear()
        self._host.clear()

    def run(self, iteration: Iteration) -> None:
        """Carry out the oldest step in flight, except for requests that are leaving."""
        for move in iteration.step.moves:
            self._copy(move)
        for entry, request in zip(iteration.step.entries, iteration.requests, strict=True):
            if request.state is State.RUNNING:
                self._compute(entry, request)

    def _copy(self, move: BlockMove) -> None:
        size = self._block_size
        for device, host in zip(array("i", move.device), array("i", move.host), strict=True):
            for offset in range(size):
                source, target = self._device, self._host
                at, to = device * size + offset, host * size + offset
                if move.direction is Direction.IN:
                    source, target, at, to = target, source, to, at
                target[to] = source.get(at, ())

    def _compute(self, entry: StepEntry, request: Request) -> None:
        """Attend to all tokens before, whose KV must be there, and write the new ones."""
        size = self._block_size
        table = array("i", entry.blocks)
        stop = entry.start + len(entry.tokens)
        slots = [table[i // size] * size + i % size for i in range(stop)]
        known = request.tokens(0, request.num_tokens)
        tokens = known[entry.start : stop]
        assert entry.tokens == tokens or (entry.tokens == (LAST_TOKEN,) and stop == len(known))
        for position, slot in enumerate(slots):
            if position < entry.start:
                assert self._device[slot] == known[: position + 1]
            else:
                self._device[slot] = known[: position + 1]


def check_moves(newest: Step, in_flight: Iterable[Iteration], block_size: int) -> None:
    """Moves that are not awaited may run beside the newest step, and those before too."""
    steps = [newest, *[iteration.step for iteration in in_flight]]
    beside = [move for step in steps for move in step.moves if not move.is_awaited]
    moving = {block for move in beside for block in array("i", move.device)}
    coming = {
        block
        for move in beside
        if move.direction is Direction.IN
        for block in array("i", move.device)
    }
    host = [block for step in steps for move in step.moves for block in array("i", move.host)]
    assert len(host) == len(set(host)), "a host block moves twice"
    for entry in newest.entries:
        end = entry.start + len(entry.tokens)
        touched = array("i", entry.blocks)[: -(-end // block_size)]
        assert not coming & set(touched), "a block is read before it is there"
        assert not moving & set(touched[entry.start // block_size :]), "written while it moves"
