"""A device that remembers which tokens the KV in each slot belongs to, and the outputs of requests.

It shows what a wrong schedule would read. A step runs when its result is committed, in the order of
submission: moves, then compute.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import replace

from engine.iteration import Iteration
from engine.request import Request, State
from engine.step import (
    LAST_TOKEN,
    NO_STATE,
    BlockMove,
    BlockTable,
    Direction,
    Page,
    PageKind,
    StateSlots,
    Step,
    StepEntry,
    Tier,
)
from engine.worker.sampling.outputs import OutputMemory

# By slot: the layer group, and all tokens up to the one whose KV is there.
Memory = dict[int, tuple[int, ...]]


def tables_of(entry: StepEntry) -> tuple[BlockTable, ...]:
    """The entry's table in each layer group."""
    assert not (entry.tables and entry.blocks), "one or the other"
    return entry.tables or (BlockTable(0, entry.blocks),)


class RememberingDevice:
    """Asserts that attention reads the KV of the tokens before, that no move overwrites KV in use,
    and that penalties read the request's prompt and output."""

    def __init__(self, block_size: int, windows: Sequence[int | None] = (None,)) -> None:
        self._block_size = block_size
        self._windows = windows
        self._device: Memory = {}
        self._states: Memory = {}
        self._below: dict[tuple[Tier, PageKind], Memory] = {
            (tier, kind): {} for tier in Tier for kind in PageKind
        }
        self._outputs = OutputMemory()
        self.unreadable: set[int] = set()  # slots of the disk and of a shared store
        self.num_loaded = 0  # blocks and states of prefixes

    def forget(self) -> None:
        """The worker died."""
        self._outputs = OutputMemory()
        self._device.clear()
        self._states.clear()
        for (tier, _), memory in self._below.items():
            if tier is Tier.HOST:
                memory.clear()

    def run(self, iteration: Iteration) -> tuple[Page, ...]:
        """Carry out the oldest step in flight, except for requests with KV that cannot be read, and
        for those that are leaving behind an unknown token or a row that had no result."""
        unread = tuple(page for move in iteration.step.moves for page in self._copy(move))
        failed = {load.request for load in iteration.loads if load.page in unread}
        for entry, request in zip(iteration.step.entries, iteration.requests, strict=True):
            stays = request.state is State.RUNNING or _leaves_kv(entry, request)
            if stays and request not in failed:
                self._compute(entry, request)
        self._check_outputs(iteration)
        return unread

    def _check_outputs(self, iteration: Iteration) -> None:
        """What the worker reads is the whole output, though most steps carry one token of it."""
        entries = [
            entry if entry.tokens != (LAST_TOKEN,) else entry._replace(tokens=_last(entry, request))
            for entry, request in zip(iteration.step.entries, iteration.requests, strict=True)
            if request.state is State.RUNNING
        ]
        running = [request for request in iteration.requests if request.state is State.RUNNING]
        step = self._outputs.complete(replace(iteration.step, entries=tuple(entries)))
        for entry, request in zip(step.entries, running, strict=True):
            sample = entry.sample
            if sample is None or not sample.reads_output:
                continue
            is_repetition = request.spec.sampling.repetition_penalty != 1.0
            assert sample.output == tuple(request.output)
            assert sample.prompt == (request.spec.prompt if is_repetition else ())
            assert sample.grammar == request.spec.grammar

    def _copy(self, move: BlockMove) -> list[Page]:
        size = self._block_size if move.kind is PageKind.BLOCK else 1
        unread = []
        for device, host in zip(array("i", move.device), array("i", move.host), strict=True):
            is_in = move.direction is Direction.IN
            self.num_loaded += is_in and bool(move.hashes)
            is_lost = is_in and move.tier is not Tier.HOST and host in self.unreadable
            is_lost &= bool(move.hashes)
            if is_lost:
                unread.append(Page(move.kind, device))
            for offset in range(size):
                source = self._device if move.kind is PageKind.BLOCK else self._states
                target = self._below[move.tier, move.kind]
                at, to = device * size + offset, host * size + offset
                if is_in:
                    source, target, at, to = target, source, to, at
                target[to] = () if is_lost else source.get(at, ())
        return unread

    def _compute(self, entry: StepEntry, request: Request) -> None:
        """Attend to all tokens before, whose KV must be there, and write the new ones."""
        stop = entry.start + len(entry.tokens)
        known = request.tokens(0, request.num_tokens)
        tokens = known[entry.start : stop]
        assert entry.tokens == tokens or (entry.tokens == (LAST_TOKEN,) and stop == len(known))
        for group, table in enumerate(tables_of(entry)):
            self._compute_group(entry.start, known[:stop], table, group)
        if entry.state is not None:
            self._compute_state(entry.start, known[:stop], entry.state)

    def _compute_state(self, start: int, known: tuple[int, ...], state: StateSlots) -> None:
        """Read the state after the tokens before, and write the new one and the snapshots."""
        if state.source == NO_STATE:
            assert start == 0, "a state of zeros behind tokens"
        else:
            assert self._states[state.source] == known[:start]
        for num_tokens, slot in state.snapshots:
            assert 0 < num_tokens <= len(known) - start
            self._states[slot] = known[: start + num_tokens]
        self._states[state.slot] = known

    def _compute_group(
        self, start: int, known: tuple[int, ...], table: BlockTable, group: int
    ) -> None:
        """The same in one layer group. KV of different groups is different."""
        size, window = self._block_size, self._windows[group]
        blocks = array("i", table.blocks)
        first = 0 if window is None else max(0, start - window + 1)
        for position in range(first, len(known)):
            slot = blocks[position // size - table.first] * size + position % size
            assert position // size >= table.first, "a block inside the window was given back"
            if position < start:
                assert self._device[slot] == (group, *known[: position + 1])
            else:
                self._device[slot] = (group, *known[: position + 1])


def _leaves_kv(entry: StepEntry, request: Request) -> bool:
    """Whether the KV of a request that was aborted in flight stays in the cache, for a retry."""
    stop = entry.start + len(entry.tokens)
    return (
        request.state is State.LEAVING
        and entry.start == request.num_computed
        and stop <= request.num_tokens
    )


def _last(entry: StepEntry, request: Request) -> tuple[int]:
    """The token that the worker sampled last for an entry which was planned before it was known."""
    known = request.tokens(0, request.num_tokens)
    return (known[entry.start] if entry.start < len(known) else 0,)


def check_moves(newest: Step, in_flight: Iterable[Iteration], block_size: int) -> None:
    """Moves that are not awaited may run beside the newest step, and those before too."""
    steps = [newest, *[iteration.step for iteration in in_flight]]
    _check_states(newest, steps)
    beside = [
        move
        for step in steps
        for move in step.moves
        if not move.is_awaited and move.kind is PageKind.BLOCK
    ]
    moving = {block for move in beside for block in array("i", move.device)}
    coming = {
        block
        for move in beside
        if move.direction is Direction.IN
        for block in array("i", move.device)
    }
    for kind in PageKind:
        moves = [move for step in steps for move in step.moves if move.kind is kind]
        below = [
            (move.tier, block)
            for move in moves
            for block in array("i", move.host)
            if move.direction is Direction.OUT or not move.hashes
        ]
        assert len(below) == len(set(below)), "a block of a lower tier moves twice"
    for entry in newest.entries:
        end = entry.start + len(entry.tokens)
        for table in tables_of(entry):
            touched = array("i", table.blocks)[: -(-end // block_size) - table.first]
            written = touched[entry.start // block_size - table.first :]
            assert not coming & set(touched), "a block is read before it is there"
            assert not moving & set(written), "written while it moves"


def _check_states(newest: Step, steps: Iterable[Step]) -> None:
    """No entry writes a state that another entry reads or writes, or that moves beside the step."""
    moves = [move for step in steps for move in step.moves if not move.is_awaited]
    moves = [move for move in moves if move.kind is PageKind.SNAPSHOT]
    moving = {slot for move in moves for slot in array("i", move.device)}
    coming = {s for m in moves if m.direction is Direction.IN for s in array("i", m.device)}
    states = [entry.state for entry in newest.entries if entry.state is not None]
    written = [slot for state in states for slot in (state.slot, *(s for _, s in state.snapshots))]
    assert len(written) == len(set(written)), "two entries write one state"
    for state in states:
        assert state.source == state.slot or state.source not in written, "read and written"
    assert not moving & set(written), "written while it moves"
    assert not coming & {state.source for state in states}, "read before it is there"
