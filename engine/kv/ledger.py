"""KVLedger: which request holds which KV blocks. Integers only; the tensors live in the workers.

A slot is the KV memory of one token in all layers of all stages (Orca, section 4.2); a block is a
fixed run of slots. If layers keep different parts of their KV, they are divided into groups of
equally many layers (`engine.kv.layer_groups`), and a block has the slots of one group. Every device
block is free, held by requests, cached, or moving (held only by requests that are being swapped, or
being saved): free + held + cached + moving = all. `host` and `disk` count blocks of these tiers.
"""

from array import array
from typing import TYPE_CHECKING, TypeAlias

from engine.kv.block_pool import BlockPool
from engine.kv.host_tier import HostTier
from engine.kv.layer_groups import LayerGroups
from engine.kv.prefix import name_in_group
from engine.kv.saved_blocks import LowerTiers, SavedBlocks, TiersBelow
from engine.kv.state_ledger import StateLedger
from engine.kv.tables import BlockPairs, Copied, Holding, Missing, Table
from engine.step import BlockTable

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from engine.kv.prefix_index import PrefixListener
    from engine.kv_shape import KVShape
    from engine.step import RequestId

Hashes: TypeAlias = "Sequence[bytes]"
NO_LIMIT = 1 << 40  # slots


class KVLedger:
    """Allocates and frees blocks; an allocation succeeds completely or changes nothing.

    A full, computed block is published under the chained hash of all tokens up to its end, so equal
    hash means equal content. Requests in an iteration in flight must not be released: workers may
    still write to their blocks. Blocks before a layer group's window are given back meanwhile.

    A request that is swapped out by a move that is not awaited keeps its device blocks until the
    step returns. Until then they are *moving*: not free yet, but counted in `num_to_be_freed`.
    Published blocks stay cached on the device. When the request is swapped in, it adopts those that
    are still cached, and the rest is copied back; all are, with several layer groups or a window.
    """

    def __init__(self, shape: "KVShape") -> None:
        self.num_blocks = shape.num_blocks
        self.block_size = shape.block_size
        self.num_slots = shape.num_slots  # each of one token in one layer group
        self.groups = LayerGroups.of(shape.windows, shape.block_size, shape.chunk)
        num_states, saves_on_host = shape.num_states, shape.saves_on_host
        store_names = shape.num_store_names
        counts = (num_states, shape.num_host_states, shape.num_disk_states, store_names)
        group = len(self.groups)
        self.states = StateLedger(*counts, saves_on_host, group=group) if num_states else None
        self.keeps_all = self.groups.keeps_all and self.states is None
        self.host = HostTier(shape.num_host_blocks)
        self.disk = SavedBlocks.of_size(shape.num_disk_blocks)
        host, store = (
            self.host.cached if saves_on_host else None,
            SavedBlocks.of_size(store_names),
        )
        self.lower = LowerTiers.of(host, self.disk, store)
        self.saves = bool(self.lower)
        self.below = TiersBelow(self.lower, self.states.lower if self.states else LowerTiers())
        self.pool = BlockPool(shape.num_blocks, self.lower)
        self.prefixes = self.pool.prefixes
        # Requests whose device blocks a step in flight copies, with the blocks that become free.
        self._in_motion: dict[RequestId, int] = {}
        self._held: dict[RequestId, Holding] = {}
        self._copied: dict[RequestId, tuple[Copied, ...]] = {}  # to the host

    def __repr__(self) -> str:
        return (
            f"KVLedger(free={self.num_free - self.num_cached}, held={self.num_held}, "
            f"cached={self.num_cached}, moving={self.num_moving}, all={self.num_blocks}, "
            f"holders={len(self._held)}, {self.host!r})"
        )

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated: free blocks, and cached blocks, which would be evicted."""
        return self.pool.num_available

    @property
    def num_cached(self) -> int:
        """Blocks that no request holds and whose content can be reused."""
        return self.pool.num_cached

    @property
    def num_held(self) -> int:
        """Blocks held by requests, without the moving ones."""
        return self.num_blocks - self.pool.num_available - self.num_moving

    @property
    def num_moving(self) -> int:
        """Blocks held only by requests whose KV a step in flight copies."""
        movers: dict[int, int] = {}
        for owner in self._in_motion:
            for block in self._held[owner].blocks():
                movers[block] = movers.get(block, 0) + 1
        swapped = sum(self.pool.num_holders(block) == count for block, count in movers.items())
        return swapped + self.pool.num_saving

    @property
    def num_to_be_freed(self) -> int:
        """Moving blocks that become free when the steps in flight return."""
        return sum(self._in_motion.values()) + self.pool.num_to_be_saved

    @property
    def longest_request(self) -> int:
        """The most slots that a request alone can hold on the device."""
        most = self.groups.longest_request(self.num_blocks)
        return NO_LIMIT if most is None else most * self.block_size

    def blocks_for(self, num_slots: int) -> int:
        """Blocks needed for `num_slots` slots of one layer group."""
        return -(-num_slots // self.block_size)

    # Shared prefixes

    def num_idle(self, hashes: "Sequence[bytes]") -> int:
        """Published blocks of a prefix that are cached: adopting them reduces `num_free`."""
        return self.pool.num_idle(self.groups.names(hashes))

    def blocks_of(self, hashes: "Sequence[bytes]") -> set[int]:
        """The published blocks of a prefix."""
        names, published = self.groups.names(hashes), self.prefixes
        return {published.block(name) for name in names if name in published}

    def adopt(self, request_id: "RequestId", hashes: "Sequence[bytes]") -> Missing:
        """Let a request that holds no blocks share the published blocks of a prefix. Returns its
        other blocks, which are new and have to be loaded."""
        assert request_id not in self._held, "a prefix is adopted before any block is reserved"
        stop, published = len(hashes) * self.block_size, self.prefixes
        names = [list(self.groups.names_in(number, hashes)) for number in range(len(self.groups))]
        wanted = [name for part in names for name in part if name not in published]
        for part in names:
            for name in part:
                if name in published:
                    self.pool.share(name)
        new = self.pool.allocate(len(wanted)) if wanted else []
        loaded = dict(zip(wanted, new, strict=True))
        tables = []
        for group, part in zip(self.groups, names, strict=True):
            blocks = [loaded[name] if name in loaded else published.block(name) for name in part]
            first = group.first_needed(stop)
            later = (place for place, name in enumerate(part, first) if name in loaded)
            tables.append(Table(first, next(later, len(hashes)), array("i", blocks)))
        self._held[request_id] = Holding(tuple(tables), stop)
        states = [] if self.states is None else self.states.start(request_id, hashes)
        return Missing([(block, name) for name, block in loaded.items()], states)

    def publish(self, request_id: "RequestId", hashes: "Sequence[bytes]") -> list[list[int]]:
        """Publish the request's leading blocks, which are full and computed, under `hashes`.

        Returns the places of the newly published ones in the request, for each layer group. A
        block whose content is already published stays private and is freed with its request.
        """
        published: list[list[int]] = []
        for number, table in enumerate(self._held[request_id].tables):
            published.append([])
            for place in range(table.num_published, len(hashes)):
                name = name_in_group(hashes[place], number)
                if name in self.prefixes:
                    continue
                depth = None if number else place
                self.prefixes.publish(table.blocks[place - table.first], name, depth)
                published[number].append(place)
            table.num_published = max(table.num_published, len(hashes))
        return published

    # Blocks of requests

    def _shortage(self, holding: Holding | None, num_slots: int) -> list[int]:
        """For each layer group, the blocks by which its table is too short for so many slots."""
        tables = None if holding is None else holding.tables
        return self.groups.shortage(tables, self.blocks_for(num_slots))

    def num_slots_of(self, request_id: "RequestId") -> int:
        """Slots that the request holds on the device."""
        return self._held[request_id].num_slots

    def num_missing(self, request_id: "RequestId", num_slots: int) -> int:
        """Blocks that lack for the request to hold so many slots; 0 or negative if none lack."""
        return sum(self._shortage(self._held.get(request_id), num_slots)) - self.num_free

    def num_for(self, num_slots: int) -> int:
        """Blocks that a request allocates to hold so many slots without any prefix."""
        return sum(self._shortage(None, num_slots))

    def num_to_start(self, request_id: "RequestId", num_slots: int, prefix: Hashes) -> int:
        """Blocks that a request without device blocks allocates to hold so many slots behind a
        prefix, of which some blocks may have to be loaded; it is swapped in if it has a host
        copy."""
        stop, copied = self.blocks_for(num_slots), self._copied.get(request_id)
        if copied is not None and not self.keeps_all:
            spans = zip(self.groups, copied, strict=True)
            return sum(group.stop(stop, span.first) - span.first for group, span in spans)
        num_behind = self.groups.num_behind(len(prefix), stop)
        if self.keeps_all or not self.saves:
            return num_behind
        return num_behind + sum(name not in self.prefixes for name in self.groups.names(prefix))

    def reserve(self, request_id: "RequestId", num_slots: int) -> bool:
        """Make the request hold at least `num_slots` slots, or, in a group with a window, as many
        as a table may have; False, and no change, if it cannot."""
        holding = self._held.get(request_id)
        if holding is not None and num_slots <= holding.num_slots:
            return True
        shortage = self._shortage(holding, num_slots)
        if sum(shortage) > self.pool.num_available:
            return False
        if holding is None:
            holding = self._held[request_id] = Holding(tuple(Table() for _ in self.groups))
        for table, count in zip(holding.tables, shortage, strict=True):
            if count:
                table.blocks.extend(self.pool.allocate(count))
        stops = [table.stop for table in holding.tables]
        holding.num_slots = min(stops) * self.block_size if stops else num_slots
        return True

    def give_back(self, request_id: "RequestId", num_computed: int) -> None:
        """Drop the blocks that lie wholly before the windows, now that so many tokens are computed.
        The last of them may be computed again, so what it reads is kept."""
        for group, table in zip(self.groups, self._held[request_id].tables, strict=True):
            count = group.first_needed(num_computed - 1) - table.first
            if count > 0:
                for block in table.blocks[:count]:
                    self.pool.drop(block, is_stale=True)
                del table.blocks[:count]
                table.first += count
                table.num_published = max(table.num_published, table.first)

    def num_private(self, request_id: "RequestId", exclude: "Container[int]" = ()) -> int:
        """Blocks that only this request holds, so that its release makes them available; those in
        `exclude` are not counted."""
        holders = self.pool.num_holders
        blocks = self._held[request_id].blocks()
        return sum([holders(block) == 1 and block not in exclude for block in blocks])

    def table(self, request_id: "RequestId") -> bytes:
        """The request's block table as int32, oldest block first, in the first layer group."""
        tables = self._held[request_id].tables
        return tables[0].blocks.tobytes() if tables else b""

    def tables(self, request_id: "RequestId") -> tuple[BlockTable, ...]:
        """The request's table in each layer group; none if all layers keep all their KV."""
        if self.groups.keeps_all:
            return ()
        tables = self._held[request_id].tables
        return tuple([BlockTable(table.first, table.blocks.tobytes()) for table in tables])

    # Swapping

    def num_to_copy(self, request_id: "RequestId", num_slots: int) -> int:
        """Host blocks that a copy of the request's first `num_slots` slots needs."""
        copied = self._held[request_id].to_copy(self.blocks_for(num_slots))
        return sum([span.num_blocks for span in copied])

    def begin_swap_out(
        self, request_id: "RequestId", num_slots: int, *, is_awaited: bool
    ) -> BlockPairs | None:
        """Allocate host blocks for a copy of the request's first `num_slots` slots; None, and no
        change, if too few are free. The device blocks are free now if the copy is awaited, else
        after `finish_swap_out`."""
        holding = self._held[request_id]
        spans = holding.to_copy(self.blocks_for(num_slots))
        copied = holding.copied(spans)
        if self.states is not None and not self.states.host.num_free:
            return None
        copy = self.host.begin_write(request_id, len(copied))
        if copy is None:
            return None
        state = None if self.states is None else self.states.begin_swap_out(request_id)
        self._copied[request_id] = spans
        if is_awaited:
            self._release_device(request_id)
        else:
            self._in_motion[request_id] = self.num_private(request_id)
        return BlockPairs(copied, copy, state)

    def finish_swap_out(self, request_id: "RequestId") -> None:
        """The step that copied the request's KV to the host has returned."""
        self.host.finish_write(request_id)
        if self.states is not None:
            self.states.host.finish_write(request_id)
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
        assert self.keeps_all or not prefix, "only a whole prefix is shared while swapping in"
        spans = self._copied.pop(request_id)
        self.adopt(request_id, prefix)
        holding = self._held[request_id]
        if not prefix:
            holding.begin_at(spans)
        reserved = self.reserve(request_id, num_slots)
        assert reserved, "a request is swapped in only if its blocks are available"
        copy = self.host.begin_read(request_id, len(prefix))
        filled = holding.copied(spans, len(prefix))
        if filled and not is_awaited:
            self._in_motion[request_id] = 0
        state = None if self.states is None else self.states.begin_swap_in(request_id)
        return BlockPairs(filled, copy, state)

    def finish_swap_in(self, request_id: "RequestId") -> None:
        """The step that copied the request's KV to the device has returned."""
        self._in_motion.pop(request_id, None)

    def _release_device(self, request_id: "RequestId") -> int:
        """Free the request's device blocks and return their number; a host copy is kept.

        The end of a prefix is evicted before its beginning, which more requests can use.
        """
        self._in_motion.pop(request_id, None)
        if self.states is not None:
            self.states.release_device(request_id)
        holding = self._held.pop(request_id, None)
        if holding is None:
            return 0
        blocks = [block for table in holding.tables for block in reversed(table.blocks)]
        for block in blocks:
            self.pool.drop(block)
        return len(blocks)

    def listen(self, listener: "PrefixListener") -> None:
        """Report to `listener` which blocks and snapshots are cached, and their copies below."""
        self.pool.listen(listener)
        if self.states is not None:
            self.states.pool.listen(listener)

    def release(self, request_id: "RequestId") -> int:
        """Free the request's blocks in both tiers; the number of device blocks that it held."""
        self.host.release(request_id)
        if self.states is not None:
            self.states.host.release(request_id)
        self._copied.pop(request_id, None)
        return self._release_device(request_id)

    def reset(self) -> None:
        """The worker is lost: all blocks of both tiers are free, and no prefix is cached."""
        self.host.reset()
        self._in_motion.clear()
        self._held.clear()
        self._copied.clear()
        self.pool.reset()
        self.lower.abandon()
        if self.states is not None:
            self.states.reset()

    def num_leaked(self, live: "Container[RequestId]") -> int:
        """Blocks of both tiers whose request is not live; anything but 0 is a leak."""
        held = [sum(1 for _ in h.blocks()) for owner, h in self._held.items() if owner not in live]
        states = 0 if self.states is None else self.states.num_leaked(live)
        return sum(held) + self.host.num_leaked(live) + states

    def check(self) -> None:
        """Assert that every block is in exactly one state and that all counts agree."""
        holders = [0] * self.num_blocks
        for holding in self._held.values():
            self.groups.check(holding.tables)
            for block in holding.blocks():
                holders[block] += 1
        self.pool.check(holders)
        assert self._in_motion.keys() <= self._held.keys(), "a request moves and holds no block"
        counts = (self.num_free - self.num_cached, self.num_held, self.num_cached, self.num_moving)
        assert min(counts) >= 0, f"a negative count: {self!r}"
        assert sum(counts) == self.num_blocks, f"the counts are not all: {self!r}"
        self.host.check()
        self.disk.check()
        if self.states is not None:
            self.states.check(self._held)
