"""CachedCopies: the moves that copy cached blocks and snapshots to the tiers below and back."""

from array import array
from typing import TYPE_CHECKING

from engine.iteration import Load, Save
from engine.kv.prefix import name_in_group
from engine.kv.saved_blocks import StoreNames
from engine.step import BlockMove, Direction, ReadAhead, Tier

if TYPE_CHECKING:
    from collections.abc import Collection, Container, Iterable, Sequence

    from engine.iteration import Iteration
    from engine.kv.ledger import KVLedger
    from engine.kv.saved_blocks import LowerTiers
    from engine.request import Request

BLOCKS_PER_STATE = 16  # saved blocks for one saved snapshot, which is about as large


class CachedCopies:
    """Orders saves and loads in the plan being made, and ends them when their step returns.

    Copies are made while their blocks are cached. A load is awaited: its blocks are filled before
    the step computes, and are published like computed ones when the step has returned.
    """

    def __init__(self, ledger: "KVLedger", moves: list[BlockMove]) -> None:
        """`moves` are those of the plan being made."""
        self._ledger = ledger
        self._moves = moves
        self.saves: list[Save] = []
        self.loads: list[Load] = []

    def save(self, most: int) -> None:
        """Order copies of at most so many cached blocks to the tiers below, and of a snapshot for
        each `BLOCKS_PER_STATE` of them, beside the step being planned."""
        saves = self._ledger.pool.begin_save(most)
        if (states := self._ledger.states) is not None:
            snapshots = states.pool.begin_save(max(1, most // BLOCKS_PER_STATE))
            saves += [save._replace(is_state=True) for save in snapshots]
        self.saves += saves
        for tier, is_state in dict.fromkeys((save.tier, save.is_state) for save in saves):
            mine = [save for save in saves if (save.tier, save.is_state) == (tier, is_state)]
            blocks, slots = [save.block for save in mine], [save.slot for save in mine]
            hashes = [save.block_hash for save in mine]
            move = _move(Direction.OUT, tier, blocks, slots, hashes, is_awaited=False)
            self._moves.append(move._replace(is_state=is_state))

    def load(
        self, request: "Request", wanted: "Iterable[tuple[int, bytes]]", *, is_state: bool = False
    ) -> int:
        """Order awaited moves that fill device blocks with the contents of these names, up to the
        first one that no tier has; returns their number."""
        by_tier: dict[Tier, list[tuple[int, int, bytes]]] = {}
        num_loaded = 0
        lower = self._ledger.below.of(is_state=is_state)
        for block, name in wanted:
            found = lower.begin_load(name)
            if found is None:
                break
            tier, slot = found
            by_tier.setdefault(tier, []).append((block, slot, name))
            self.loads.append(Load(request, tier, block, name, is_state))
            num_loaded += 1
        for tier, copies in by_tier.items():
            blocks, slots, hashes = zip(*copies, strict=True)
            move = _move(Direction.IN, tier, blocks, slots, hashes, is_awaited=True)
            self._moves.append(move._replace(is_state=is_state))
        return num_loaded

    def ahead(
        self, request: "Request", names: "Sequence[bytes]", state_names: "Sequence[bytes]"
    ) -> ReadAhead | None:
        """Those of these names of blocks and snapshots that only the disk has; None if there are
        none. They may be replaced before the request loads them."""
        ledger = self._ledger
        blocks = _only_on_disk(names, ledger.prefixes, ledger.below.blocks)
        states: tuple[tuple[int, bytes], ...] = ()
        if ledger.states is not None:
            states = _only_on_disk(state_names, ledger.states.snapshots, ledger.below.states)
        return ReadAhead(request.request_id, blocks, states) if blocks or states else None

    def unknown(self, hashes: "Sequence[bytes]") -> StoreNames:
        """The names of blocks and snapshots of a prompt that are not on the device and, as far as
        is known, in no tier below."""
        ledger, (lower, states_lower) = self._ledger, self._ledger.below
        groups = range(len(ledger.groups))
        names = [name_in_group(one, group) for group in groups for one in hashes]
        blocks = [name for name in names if name not in ledger.prefixes and not lower.has(name)]
        states: list[bytes] = []
        if ledger.states is not None:
            snapshots = ledger.states.snapshots
            names = [name_in_group(one, ledger.states.group) for one in hashes]
            states = [one for one in names if one not in snapshots and not states_lower.has(one)]
        return StoreNames(blocks, states)

    def finish_saves(self, iteration: "Iteration", *, is_complete: bool) -> None:
        """A step has returned, or will not return."""
        blocks = [save for save in iteration.saves if not save.is_state]
        self._ledger.pool.finish_save(blocks, is_complete=is_complete)
        if (states := self._ledger.states) is not None:
            snapshots = [save for save in iteration.saves if save.is_state]
            states.pool.finish_save(snapshots, is_complete=is_complete)

    def finish_loads(
        self,
        iteration: "Iteration",
        unread: "Container[int]" = (),
        unread_states: "Container[int]" = (),
    ) -> "Collection[Request]":
        """A step has returned, or will not return: what it read may be replaced. Returns the
        requests with blocks or states that it could not read; these copies are dropped."""
        failed: dict[Request, None] = {}
        for request, tier, block, name, is_state in iteration.loads:
            is_readable = block not in (unread_states if is_state else unread)
            lower = self._ledger.below.of(is_state=is_state)
            lower.finish_load(tier, name, is_readable=is_readable)
            if not is_readable:
                failed[request] = None
        return failed


def _only_on_disk(
    names: "Iterable[bytes]", on_device: "Container[bytes]", lower: "LowerTiers"
) -> tuple[tuple[int, bytes], ...]:
    disk, host = lower[Tier.DISK], lower.get(Tier.HOST, ())
    slots = ((disk.slot_of(name), name) for name in names)
    return tuple(
        (slot, name)
        for slot, name in slots
        if slot is not None and name not in on_device and name not in host
    )


def _move(
    direction: Direction,
    tier: Tier,
    device: "Sequence[int]",
    slots: "Sequence[int]",
    hashes: "Sequence[bytes]",
    *,
    is_awaited: bool,
) -> BlockMove:
    """A move of cached blocks, which have hashes."""
    tables = array("i", device).tobytes(), array("i", slots).tobytes()
    return BlockMove(direction, *tables, is_awaited, tier, b"".join(hashes))
