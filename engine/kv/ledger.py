"""KVLedger: which request holds which KV blocks. Integers only; the tensors live in the workers.

A slot is the KV memory of one token in all layers of all stages (Orca, section 4.2); a block is a
fixed run of slots. Every device block is free, held by requests, cached, or moving (held only by
requests that are being swapped, or being saved): free + held + cached + moving = all. `host` counts
the blocks of the host tier, `disk` those of the disk tier.
"""

from array import array
from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from engine.iteration import Save
from engine.kv.host_tier import HostTier
from engine.kv.prefix_index import PrefixIndex
from engine.kv.saved_blocks import LowerTiers, SavedBlocks
from engine.step import Tier

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from engine.step import RequestId


@dataclass(slots=True)
class _Holding:
    """The blocks of one request, oldest first, and how many of them are published."""

    blocks: "array[int]" = field(default_factory=lambda: array("i"))
    num_published: int = 0


class BlockPairs(NamedTuple):
    """Blocks to copy: `device[i]` to or from `host[i]`."""

    device: "array[int]"
    host: "array[int]"


class KVLedger:
    """Allocates and frees blocks; an allocation succeeds completely or changes nothing.

        free ──reserve──▶ held, private ──publish──▶ held, shared by requests with this prefix
          ▲                  │ release                  │ release by the last holder
          ├──────────────────┘                          ▼
          └───────── evict, least recently used ──── cached ──adopt──▶ held

    A block is published under the chained hash of all tokens up to its end, so equal hash means
    equal content; only full, computed blocks are published. The scheduler must not release a
    request that is in an iteration in flight: the workers may still write to its blocks.

    A request that is swapped out by a move that is not awaited keeps its device blocks until the
    step returns. Until then they are *moving*: not free yet, but counted in `num_to_be_freed`.
    Published blocks are copied like all others and stay cached on the device. When the request is
    swapped in, it adopts the blocks that are still cached, and only the rest is copied back.

    Cached blocks are saved in the tiers below (`begin_save`), the least recently used first. Until
    the step that copies them returns they are moving, and requests may adopt them.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_host_blocks: int = 0,
        num_disk_blocks: int = 0,
        *,
        saves_on_host: bool = False,
    ) -> None:
        """With `saves_on_host` the host tier also keeps copies of cached blocks."""
        assert num_blocks > 0, "a ledger has at least one block"
        assert block_size > 0, "a block has at least one slot"
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.host = HostTier(num_host_blocks)
        self.disk = SavedBlocks(list(range(num_disk_blocks - 1, -1, -1)))
        tiers = {Tier.HOST: self.host.cached} if num_host_blocks and saves_on_host else {}
        self.lower = LowerTiers(tiers | ({Tier.DISK: self.disk} if num_disk_blocks else {}))
        self._unsaved: dict[int, None] = {}  # cached and not in every tier; least recent first
        self._saving: set[int] = set()  # that a step in flight copies
        # Requests whose device blocks a step in flight copies, with the blocks that become free.
        self._in_motion: dict[RequestId, int] = {}
        self._held: dict[RequestId, _Holding] = {}
        self._free: list[int] = []
        self._holders: list[int] = []  # by block
        self.prefixes = PrefixIndex()
        self._idle: dict[bytes, int] = {}  # what `num_idle` found since the last change
        self._cached: OrderedDict[int, None] = (
            OrderedDict()
        )  # published, not held; least recent first
        self.reset()

    def __repr__(self) -> str:
        return (
            f"KVLedger(free={len(self._free)}, held={self.num_held}, cached={self.num_cached}, "
            f"moving={self.num_moving}, all={self.num_blocks}, holders={len(self._held)}, "
            f"{self.host!r})"
        )

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated: free blocks, and cached blocks, which would be evicted."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Blocks that no request holds and whose content can be reused."""
        return len(self._cached)

    @property
    def num_held(self) -> int:
        """Blocks held by requests, without the moving ones."""
        return self.num_blocks - len(self._free) - len(self._cached) - self.num_moving

    @property
    def num_moving(self) -> int:
        """Blocks held only by requests whose KV a step in flight copies."""
        movers: dict[int, int] = {}
        for owner in self._in_motion:
            for block in self._held[owner].blocks:
                movers[block] = movers.get(block, 0) + 1
        swapped = sum(self._holders[block] == count for block, count in movers.items())
        return swapped + sum(not self._holders[block] for block in self._saving)

    @property
    def num_to_be_freed(self) -> int:
        """Moving blocks that become free when the steps in flight return."""
        return sum(self._in_motion.values()) + len(self._saving)

    @property
    def num_slots(self) -> int:
        """Tokens whose KV fits on the device."""
        return self.num_blocks * self.block_size

    def blocks_for(self, num_slots: int) -> int:
        """Blocks needed for `num_slots` slots."""
        return -(-num_slots // self.block_size)

    def num_idle(self, hashes: "Sequence[bytes]") -> int:
        """How many of these published blocks are cached: adopting them reduces `num_free`."""
        if not hashes:
            return 0
        last = hashes[-1]  # stands for the whole chain before it
        if last not in self._idle:
            block = self.prefixes.block
            self._idle[last] = sum(block(block_hash) in self._cached for block_hash in hashes)
        return self._idle[last]

    def blocks_of(self, hashes: "Sequence[bytes]") -> set[int]:
        """The published blocks of a prefix."""
        return {self.prefixes.block(block_hash) for block_hash in hashes}

    def adopt(self, request_id: "RequestId", hashes: "Sequence[bytes]") -> None:
        """Let a request that holds no blocks share the published blocks of a prefix."""
        assert request_id not in self._held, "a prefix is adopted before any block is reserved"
        holding = self._held[request_id] = _Holding(num_published=len(hashes))
        self._idle.clear()
        for block_hash in hashes:
            block = self.prefixes.block(block_hash)
            self._cached.pop(block, None)
            self._unsaved.pop(block, None)
            self._holders[block] += 1
            holding.blocks.append(block)

    def num_slots_of(self, request_id: "RequestId") -> int:
        """Slots that the request holds on the device."""
        return len(self._held[request_id].blocks) * self.block_size

    def num_missing(self, request_id: "RequestId", num_slots: int) -> int:
        """Blocks that lack for the request to hold so many slots; 0 or negative if none lack."""
        holding = self._held.get(request_id)
        held = len(holding.blocks) if holding is not None else 0
        return self.blocks_for(num_slots) - held - self.num_free

    def reserve(self, request_id: "RequestId", num_slots: int) -> bool:
        """Make the request hold at least `num_slots` slots; False, and no change, if it cannot."""
        holding = self._held.get(request_id)
        held = len(holding.blocks) if holding is not None else 0
        if num_slots <= held * self.block_size:
            return True
        missing = self.blocks_for(num_slots) - held
        if missing > len(self._free) + len(self._cached):
            return False
        if holding is None:
            holding = self._held[request_id] = _Holding()
        while len(self._free) < missing:
            self._evict()
        taken = self._free[: -missing - 1 : -1]
        del self._free[-missing:]
        holding.blocks.extend(taken)
        for block in taken:
            self._holders[block] = 1
        return True

    def _evict(self) -> None:
        block = next(iter(self._cached))
        del self._cached[block]
        self._unsaved.pop(block, None)
        self._idle.clear()
        self.prefixes.evict(block)
        self._free.append(block)

    def publish(self, request_id: "RequestId", hashes: "Sequence[bytes]") -> list[int]:
        """Publish the request's leading blocks, which are full and computed, under `hashes`.

        Returns the places of the newly published ones in the request. A block whose content is
        already published stays private and is freed with its request.
        """
        holding, published = self._held[request_id], []
        for index in range(holding.num_published, len(hashes)):
            if hashes[index] not in self.prefixes:
                self.prefixes.publish(holding.blocks[index], hashes[index], index)
                published.append(index)
        holding.num_published = max(holding.num_published, len(hashes))
        return published

    def num_private(self, request_id: "RequestId", exclude: "Container[int]" = ()) -> int:
        """Blocks that only this request holds, so that its release makes them available; those in
        `exclude` are not counted."""
        blocks = self._held[request_id].blocks
        return sum([self._holders[block] == 1 and block not in exclude for block in blocks])

    def begin_swap_out(
        self, request_id: "RequestId", num_slots: int, *, is_awaited: bool
    ) -> BlockPairs | None:
        """Allocate host blocks for a copy of the request's first `num_slots` slots; None, and no
        change, if too few are free. The device blocks are free now if the copy is awaited, else
        after `finish_swap_out`."""
        copied = self._held[request_id].blocks[: self.blocks_for(num_slots)]
        copy = self.host.begin_write(request_id, len(copied))
        if copy is None:
            return None
        if is_awaited:
            self._release_device(request_id)
        else:
            self._in_motion[request_id] = self.num_private(request_id)
        return BlockPairs(copied, copy)

    def finish_swap_out(self, request_id: "RequestId") -> None:
        """The step that copied the request's KV to the host has returned."""
        self.host.finish_write(request_id)
        self._release_device(request_id)

    def begin_swap_in(
        self,
        request_id: "RequestId",
        prefix: "Sequence[bytes]",
        num_slots: int,
        *,
        is_awaited: bool,
    ) -> BlockPairs:
        """Give the request `num_slots` slots, which must be available: the published blocks of
        `prefix` and new ones. The pairs say which of these to fill from its host copy; unless
        that is awaited, they are moving until `finish_swap_in`."""
        self.adopt(request_id, prefix)
        reserved = self.reserve(request_id, num_slots)
        assert reserved, "a request is swapped in only if its blocks are available"
        copy = self.host.begin_read(request_id, len(prefix))
        filled = self._held[request_id].blocks[len(prefix) : len(prefix) + len(copy)]
        if filled and not is_awaited:
            self._in_motion[request_id] = 0
        return BlockPairs(filled, copy)

    def finish_swap_in(self, request_id: "RequestId") -> None:
        """The step that copied the request's KV to the device has returned."""
        self._in_motion.pop(request_id, None)

    def _release_device(self, request_id: "RequestId") -> int:
        """Free the request's device blocks and return their number; a host copy is kept.

        The end of a prefix is evicted before its beginning, which more requests can use.
        """
        self._in_motion.pop(request_id, None)
        holding = self._held.pop(request_id, None)
        if holding is None:
            return 0
        self._idle.clear()
        for block in reversed(holding.blocks):
            self._holders[block] -= 1
            if self._holders[block]:
                continue
            if self.prefixes.is_published(block):
                if block not in self._saving:
                    self._cache(block)
            else:
                self._free.append(block)
        return len(holding.blocks)

    def _cache(self, block: int) -> None:
        """A published block that no request holds: it is cached, as the most recently used one."""
        self._cached[block] = None
        if self.lower and self.lower.without(self.prefixes.hash_of(block)):
            self._unsaved[block] = None

    # Copies in the tiers below

    @property
    def saves(self) -> bool:
        """Whether cached blocks are saved in any tier."""
        return bool(self.lower)

    @property
    def num_unsaved(self) -> int:
        """Cached blocks that are not saved in every tier."""
        return len(self._unsaved)

    def begin_save(self, most: int) -> "list[Save]":
        """Let the step being planned copy at most so many cached blocks, the least recently used
        first. Until `finish_save` they are moving."""
        saves: list[Save] = []
        for block in list(islice(self._unsaved, most)):
            del self._unsaved[block]
            block_hash = self.prefixes.hash_of(block)
            for tier, copies in self.lower.without(block_hash):
                slot = copies.begin_save(block_hash)
                if slot is not None:
                    saves.append(Save(tier, block, slot, block_hash))
        if saves:
            self._idle.clear()
        for save in saves:
            self._cached.pop(save.block, None)
            self._saving.add(save.block)
        return saves

    def finish_save(self, saves: "Sequence[Save]", *, is_complete: bool) -> None:
        """The step that made these copies has returned, or will not return."""
        for save in reversed(saves):  # the first was the least recently used
            self.lower[save.tier].finish_save(save.block_hash, is_complete=is_complete)
            if save.block in self._saving:
                self._saving.discard(save.block)
                if not self._holders[save.block]:
                    self._cached[save.block] = None
                    self._cached.move_to_end(save.block, last=False)
        self._idle.clear()

    def release(self, request_id: "RequestId") -> int:
        """Free the request's blocks in both tiers; the number of device blocks that it held."""
        self.host.release(request_id)
        return self._release_device(request_id)

    def reset(self) -> None:
        """The worker is lost: all blocks of both tiers are free, and no prefix is cached."""
        self.host.reset()
        self._in_motion.clear()
        self._held.clear()
        self._free = list(range(self.num_blocks - 1, -1, -1))
        self._holders = [0] * self.num_blocks
        self.prefixes.clear()
        self._idle.clear()
        self._cached.clear()
        self._unsaved.clear()
        self._saving.clear()
        self.disk.abandon()

    def table(self, request_id: "RequestId") -> bytes:
        """The request's block table as int32, oldest block first (see `StepEntry.blocks`)."""
        return self._held[request_id].blocks.tobytes()

    def num_leaked(self, live: "Container[RequestId]") -> int:
        """Blocks of both tiers whose request is not live; anything but 0 is a leak."""
        held = sum(len(h.blocks) for owner, h in self._held.items() if owner not in live)
        return held + self.host.num_leaked(live)

    def check(self) -> None:
        """Assert that every block is in exactly one state and that all counts agree."""
        holders = [0] * self.num_blocks
        for holding in self._held.values():
            assert len(set(holding.blocks)) == len(holding.blocks), "a block twice in a table"
            for block in holding.blocks:
                holders[block] += 1
        assert holders == self._holders, f"holders drifted: {self!r}"
        idle = [block for block in range(self.num_blocks) if not holders[block]]
        saving = [block for block in self._saving if not holders[block]]
        found = sorted([*self._free, *self._cached, *saving])
        assert found == idle, f"lost or owned twice: {self!r}"
        assert self._unsaved.keys() <= self._cached.keys(), "unsaved, and not cached"
        assert self._in_motion.keys() <= self._held.keys(), "a request moves and holds no block"
        counts = (len(self._free), self.num_held, self.num_cached, self.num_moving)
        assert min(counts) >= 0, f"a negative count: {self!r}"
        assert sum(counts) == self.num_blocks, f"the counts are not all: {self!r}"
        self.host.check()
        self.prefixes.check()
        published = self.prefixes.blocks
        assert self._cached.keys() <= published, "cached without a hash"
        shared = {block for block in range(self.num_blocks) if holders[block] > 1}
        assert shared <= published, "a private block is shared"
