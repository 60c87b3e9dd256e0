"""SavedBlocks: which KV blocks, by hash, have a copy in a tier below the device. Integers only.
`LowerTiers` are all of these tiers, the fastest first.

A copy is made while its block is still cached on the device, by a move beside an iteration, so
that evicting the block later costs nothing. Requests find copies as they find cached blocks.
"""

from collections import OrderedDict
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from engine.step import HASH_BYTES, Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator

    from engine.kv.prefix_index import PrefixListener


class SavedBlocks:
    """Allocates slots of a tier for copies; the least recently used copy makes room.

        free ──begin_save──▶ being written ──finish_save──▶ saved ──pin──▶ being read
          ▲                                                  │  ▲             │ unpin
          └──────────── replaced, least recently used ───────┘  └─────────────┘

    `free` are the tier's free slots; another owner of the tier may share this list.
    """

    @classmethod
    def of_size(cls, num_slots: int) -> "SavedBlocks":
        """A tier of so many free slots, which no other owner shares."""
        return cls(list(range(num_slots - 1, -1, -1)))

    def __init__(self, free: list[int]) -> None:
        self._free = free
        self.num_slots = len(free)  # at first, where another owner shares the list
        self._saved: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._written: dict[bytes, int] = {}
        self._pins: dict[bytes, int] = {}  # loads in flight
        self.num_drops = 0
        self.version = 0  # changes whenever the copies change
        self.on_change: Callable[[bytes, bool], object] | None = None  # with True when saved

    def __contains__(self, block_hash: object) -> bool:
        return block_hash in self._saved

    def __len__(self) -> int:
        return len(self._saved)

    @property
    def num_written(self) -> int:
        """Slots that a step in flight writes."""
        return len(self._written)

    @property
    def num_replaceable(self) -> int:
        """Slots of copies that no step in flight reads."""
        return len(self._saved) - len(self._pins)

    def slots(self) -> "Iterator[int]":
        """All slots that are not free."""
        yield from self._saved.values()
        yield from self._written.values()

    def slot_of(self, block_hash: bytes) -> int | None:
        """The slot of a copy; None if there is none."""
        return self._saved.get(block_hash)

    def has_or_writes(self, block_hash: bytes) -> bool:
        """Whether there is a copy, or will be when the steps in flight return."""
        return block_hash in self._saved or block_hash in self._written

    def restore(self, copies: "Iterable[tuple[int, bytes]]") -> None:
        """Copies that exist already, by their slots, which are free. A second copy of a block is
        not kept."""
        self.version += 1
        for slot, block_hash in copies:
            self._saved.setdefault(block_hash, slot)
        taken = set(self._saved.values())
        self._free[:] = [slot for slot in self._free if slot not in taken]

    def learn(self, names: "Iterable[bytes]") -> None:
        """The tier, which others write to, has these copies."""
        for name in names:
            if not self.has_or_writes(name) and self.begin_save(name) is not None:
                self.finish_save(name, is_complete=True)

    def begin_save(self, block_hash: bytes) -> int | None:
        """The slot for a new copy; None if every slot is in use by a step in flight."""
        assert not self.has_or_writes(block_hash), "a block is saved once"
        if not self._free and not self.make_room(1):
            return None
        slot = self._written[block_hash] = self._free.pop()
        return slot

    def finish_save(self, block_hash: bytes, *, is_complete: bool) -> None:
        """The step that wrote the copy has returned; a copy that is not complete is dropped."""
        slot = self._written.pop(block_hash, None)
        if slot is None:  # reset meanwhile
            return
        if is_complete:
            self._saved[block_hash] = slot
            self.version += 1
            self._report(block_hash, is_saved=True)
        else:
            self._free.append(slot)

    def pin(self, block_hash: bytes) -> int:
        """The slot of a copy that a step is going to read; until `unpin` it is not replaced."""
        self._saved.move_to_end(block_hash)
        self._pins[block_hash] = self._pins.get(block_hash, 0) + 1
        return self._saved[block_hash]

    def unpin(self, block_hash: bytes, *, is_readable: bool = True) -> None:
        """The step that read the copy has returned; a copy that could not be read is dropped."""
        left = self._pins.pop(block_hash, 0) - 1
        if left > 0:
            self._pins[block_hash] = left
        elif not is_readable and block_hash in self._saved:
            self._drop(block_hash)

    def make_room(self, num_slots: int) -> bool:
        """Replace copies until so many slots are free; False if too many are being read."""
        short = num_slots - len(self._free)
        if short > 0:
            replaceable = (one for one in self._saved if one not in self._pins)
            for block_hash in list(islice(replaceable, short)):
                self._drop(block_hash)
        return len(self._free) >= num_slots

    def abandon(self) -> None:
        """No step in flight will return: copies being written are not complete."""
        self._free.extend(self._written.values())
        self._written.clear()
        self._pins.clear()

    def clear(self) -> None:
        """All copies are lost. The caller makes the slots free."""
        self.num_drops += len(self._saved)
        self.version += 1
        self._saved.clear()
        self._written.clear()
        self._pins.clear()

    def check(self) -> None:
        """Assert that every slot is in exactly one state, if no other owner has any."""
        slots = sorted([*self._free, *self.slots()])
        assert slots == list(range(self.num_slots)), "a slot of a tier is lost or owned twice"
        assert self._pins.keys() <= self._saved.keys(), "a copy is read that is not saved"

    def _drop(self, block_hash: bytes) -> None:
        self._free.append(self._saved.pop(block_hash))
        self.num_drops += 1
        self.version += 1
        self._report(block_hash, is_saved=False)

    def _report(self, block_hash: bytes, *, is_saved: bool) -> None:
        if self.on_change is not None:
            self.on_change(block_hash, is_saved)


class LowerTiers(dict[Tier, SavedBlocks]):
    """The tiers in which cached blocks, or snapshots, are saved, the fastest first."""

    @classmethod
    def of(cls, host: SavedBlocks | None, disk: SavedBlocks, store: SavedBlocks) -> "LowerTiers":
        """Those of the tiers that have slots."""
        tiers = {Tier.HOST: host, Tier.DISK: disk, Tier.STORE: store}
        return cls({tier: one for tier, one in tiers.items() if one is not None and one.num_slots})

    @property
    def version(self) -> int:
        """Changes whenever the copies change."""
        return sum([copies.version for copies in self.values()])

    @property
    def num_drops(self) -> int:
        """Copies that were dropped so far."""
        return sum([copies.num_drops for copies in self.values()])

    def has(self, block_hash: bytes) -> bool:
        """Whether a tier has a copy of the block."""
        return any(block_hash in copies for copies in self.values())

    def without(self, block_hash: bytes) -> list[tuple[Tier, SavedBlocks]]:
        """The tiers that neither have a copy of the block nor get one from a step in flight."""
        return [pair for pair in self.items() if not pair[1].has_or_writes(block_hash)]

    def begin_load(self, block_hash: bytes) -> tuple[Tier, int] | None:
        """The fastest tier with a copy, and its slot, which stays until `finish_load`."""
        for tier, copies in self.items():
            if block_hash in copies:
                return tier, copies.pin(block_hash)
        return None

    def finish_load(self, tier: Tier, block_hash: bytes, *, is_readable: bool) -> None:
        """The step that read the copy has returned. A copy that is not readable is dropped."""
        self[tier].unpin(block_hash, is_readable=is_readable)

    def abandon(self) -> None:
        """No step in flight will return; what outlives the worker is kept."""
        for tier, copies in self.items():
            if tier is not Tier.HOST:
                copies.abandon()

    def restore_disk(self, hashes: bytes) -> None:
        """The disk tier has these contents from earlier: `HASH_BYTES` for each slot, zeros for an
        unused one."""
        slots = (hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES))
        if Tier.DISK in self:
            self[Tier.DISK].restore((slot, one) for slot, one in enumerate(slots) if any(one))

    def listen(self, listener: "PrefixListener") -> None:
        """Report to `listener` which copies this server has; those of a shared store are not its
        own."""
        for tier, copies in self.items():
            if tier is not Tier.STORE:
                copies.on_change = partial(listener.copied, tier)


class StoreNames(NamedTuple):
    """Names of blocks and of snapshots that a shared store may have."""

    blocks: list[bytes]
    states: list[bytes]


class TiersBelow(NamedTuple):
    """The tiers below the device: those of blocks, and those of snapshots of recurrent layers."""

    blocks: LowerTiers
    states: LowerTiers

    def of(self, *, is_state: bool) -> LowerTiers:
        """Those of snapshots, or of blocks."""
        return self.states if is_state else self.blocks

    def learn(self, tier: Tier, found: "Container[bytes]", names: "StoreNames") -> None:
        """Of these names, a tier that others write to has `found`."""
        self.blocks[tier].learn(name for name in names.blocks if name in found)
        if tier in self.states:
            self.states[tier].learn(name for name in names.states if name in found)

    def restore_disk(self, hashes: bytes, state_hashes: bytes = b"") -> None:
        """The disk tier has these blocks and snapshots from earlier (`LowerTiers.restore_disk`)."""
        self.blocks.restore_disk(hashes)
        self.states.restore_disk(state_hashes)
