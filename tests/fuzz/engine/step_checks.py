"""What no step may do, whatever its slots hold: two entries that write one block, or a move beside
the compute that overwrites what an entry reads."""

from array import array
from collections import Counter
from itertools import chain
from typing import TYPE_CHECKING

from engine.step import NO_STATE, BlockMove, BlockTable, Direction, PageKind, Step, StepEntry
from tests.fuzz.engine.wrong import Wrong

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from engine.control.settings import SchedulerSettings


def tables_of(entry: StepEntry) -> tuple[BlockTable, ...]:
    """The entry's table in each layer group."""
    if entry.tables and entry.blocks:
        raise Wrong("an entry has one table and several")
    if entry.tables:
        return entry.tables
    return (BlockTable(0, entry.blocks),) if entry.blocks else ()


def check_step(
    step: Step, in_flight: "Sequence[Step]", settings: "SchedulerSettings", block_size: int
) -> None:
    """Check a step that is submitted while others are in flight."""
    if step.num_tokens > settings.max_batch_tokens:
        raise Wrong(f"a step of {step.num_tokens} tokens")
    if len(step.entries) > settings.max_batch_size:
        raise Wrong(f"a step of {len(step.entries)} entries")
    if len({entry.request_id for entry in step.entries}) < len(step.entries):
        raise Wrong("a request has two entries in a step")
    kinds = [entry.is_decode and entry.sample is not None for entry in step.entries]
    if any(not entry.tokens for entry in step.entries):
        raise Wrong(f"an entry without tokens: {kinds}")
    steps = [step, *in_flight]
    for kind in PageKind:
        _check_copies([m for each in steps for m in each.moves if m.kind is kind])
    if step.entries:
        _check_blocks(step, steps, block_size)
        _check_states(step, steps)


def _check_copies(moves: "Sequence[BlockMove]") -> None:
    """No slot of a lower tier is written, or read to be freed, by two moves in flight."""
    slots = [
        (move.tier, slot)
        for move in moves
        for slot in array("i", move.host)
        if move.direction is Direction.OUT or not move.hashes
    ]
    if len(slots) > len(set(slots)):
        raise Wrong("a slot of a lower tier is in two moves")


def _check_blocks(step: Step, steps: "Sequence[Step]", size: int) -> None:
    """An entry has the blocks it writes to itself; moves beside the step leave them alone, and
    write none that it reads."""
    moving, coming = _beside(steps, PageKind.BLOCK)
    touched: Counter[int] = Counter()
    written: set[int] = set()
    for entry in step.entries:
        stop = entry.start + len(entry.tokens)
        for table in tables_of(entry):
            blocks = array("i", table.blocks)
            if -(-stop // size) > table.first + len(blocks):
                raise Wrong(f"request {entry.request_id} has too few blocks")
            touched.update(blocks)
            own = range(entry.start // size - table.first, -(-stop // size) - table.first)
            written.update(blocks[place] for place in own if place >= 0)
    if any(touched[block] > 1 for block in written):
        raise Wrong("an entry writes a block of another entry")
    if not coming.isdisjoint(touched) or not moving.isdisjoint(written):
        raise Wrong("a move beside the step touches a block of an entry")


def _check_states(step: Step, steps: "Sequence[Step]") -> None:
    """No entry writes a state that another one reads or writes, or that moves beside the step."""
    moving, coming = _beside(steps, PageKind.SNAPSHOT)
    states = [entry.state for entry in step.entries if entry.state is not None]
    written = [slot for state in states for slot in (state.slot, *(s for _, s in state.snapshots))]
    read = {state.source for state in states if state.source not in (NO_STATE, state.slot)}
    if len(written) > len(set(written)) or not read.isdisjoint(written):
        raise Wrong("an entry writes a state of another entry")
    read.update(state.source for state in states)
    if not coming.isdisjoint(read) or not moving.isdisjoint(written):
        raise Wrong("a move beside the step touches a state of an entry")


def _beside(steps: "Iterable[Step]", kind: PageKind) -> tuple[set[int], set[int]]:
    """What moves beside the computing of these steps, and what of it comes in."""
    moves = [
        move for step in steps for move in step.moves if not move.is_awaited and move.kind is kind
    ]
    coming = [move for move in moves if move.direction is Direction.IN]
    return _devices(moves), _devices(coming)


def _devices(moves: "Iterable[BlockMove]") -> set[int]:
    return set(chain.from_iterable([array("i", move.device) for move in moves]))
