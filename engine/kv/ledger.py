"""KVLedger: which request holds which pages of the device. Integers only; the tensors live in the
workers.

A slot is the KV memory of one token in all layers of all stages (Orca, section 4.2); a block is a
fixed run of slots. If layers keep different parts of their KV, they are divided into groups of
equally many layers (`engine.kv.layer_groups`), and a block has the slots of one group. Every device
block is free, held by requests, cached, or moving (held only by requests that are being swapped, or
being saved): free + held + cached + moving = all.
"""

from array import array
from collections.abc import Container, Sequence
from typing import TypeAlias

from engine.kv.layer_groups import Copied, Holding, LayerGroups, Missing, Table
from engine.kv.pages import Pages
from engine.kv.prefix import name_in_group
from engine.kv.request_states import RequestStates
from engine.kv_shape import KVShape
from engine.step import Page, PageKind, RequestId

Hashes: TypeAlias = "Sequence[bytes]"


class KVLedger:
    """Allocates and frees blocks; an allocation succeeds completely or changes nothing.

    A full, computed block is published under the chained hash of all tokens up to its end, so equal
    hash means equal content. Requests in an iteration in flight must not be released: workers may
    still write to their blocks. Blocks before a layer group's window are given back meanwhile.

    A request that is swapped out by a move that is not awaited keeps its device blocks until the
    step returns (`engine.kv.page_moves`). Until then they are *moving*: not free yet, and not held.
    """

    def __init__(self, shape: KVShape) -> None:
        self.shape = shape
        self.num_blocks = shape.num_blocks
        self.block_size = shape.block_size
        self.groups = LayerGroups.of(shape.windows, shape.block_size, shape.chunk)
        self.blocks = Pages(PageKind.BLOCK, shape)
        self.snapshots = Pages(PageKind.SNAPSHOT, shape)
        self.pages = {pages.kind: pages for pages in (self.blocks, self.snapshots)}
        self.states = RequestStates(self.snapshots, len(self.groups))
        self.retains = False  # whether any request has asked for it
        self.keeps_all = self.groups.keeps_all and not self.states.is_on
        self.pool = self.blocks.pool
        self.prefixes = self.blocks.index
        # Requests whose device blocks a step in flight copies, with the blocks that become free.
        self.in_motion: dict[RequestId, int] = {}
        self._held: dict[RequestId, Holding] = {}

    def __repr__(self) -> str:
        return (
            f"KVLedger(free={self.num_free - self.num_cached}, held={self.num_held}, "
            f"cached={self.num_cached}, moving={self.num_moving}, all={self.num_blocks}, "
            f"holders={len(self._held)}, {self.blocks.host!r})"
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
        for owner in self.in_motion:
            for block in self._held[owner].blocks():
                movers[block] = movers.get(block, 0) + 1
        swapped = sum(self.pool.num_holders(block) == count for block, count in movers.items())
        return swapped + self.pool.num_saving

    # Shared prefixes

    def adopt(self, request_id: RequestId, hashes: Hashes) -> list[Missing]:
        """Let a request that holds no pages share the published pages of a prefix. Returns its
        other pages, which are new and have to be loaded."""
        assert request_id not in self._held, "a prefix is adopted before any block is reserved"
        stop, published = len(hashes) * self.block_size, self.prefixes
        names = [list(self.groups.names_in(number, hashes)) for number in range(len(self.groups))]
        wanted = [name for part in names for name in part if name not in published]
        for part in names:
            for name in part:
                if name in published:
                    self.pool.take(name)
        new = self.pool.allocate(len(wanted)) if wanted else []
        loaded = dict(zip(wanted, new, strict=True))
        tables = []
        for group, part in zip(self.groups, names, strict=True):
            blocks = [loaded[name] if name in loaded else published.page_of(name) for name in part]
            first = group.first_needed(stop)
            later = (place for place, name in enumerate(part, first) if name in loaded)
            tables.append(Table(first, next(later, len(hashes)), array("i", blocks)))
        self._held[request_id] = Holding(tuple(tables), stop)
        missing = [Missing(Page(PageKind.BLOCK, block), name) for name, block in loaded.items()]
        states = self.states.start(request_id, hashes)
        return missing + [Missing(Page(PageKind.SNAPSHOT, slot), name) for slot, name in states]

    def publish(self, request_id: RequestId, hashes: Sequence[bytes]) -> list[list[int]]:
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

    def shortage(self, request_id: RequestId, num_slots: int) -> list[int]:
        """The blocks that the request allocates in each layer group to hold so many slots."""
        holding = self._held.get(request_id)
        tables = None if holding is None else holding.tables
        return self.groups.shortage(tables, -(-num_slots // self.block_size))

    def num_to_start(
        self, num_slots: int, prefix: Hashes, copied: tuple[Copied, ...] | None = None
    ) -> int:
        """Blocks that a request without device blocks takes to hold so many slots behind a prefix:
        new ones, of which some may have to be loaded, and cached ones. `copied` is what a copy on
        the host has, with which it is swapped in."""
        stop, names = -(-num_slots // self.block_size), self.groups.names(prefix)
        if copied is not None and not self.keeps_all:
            spans = zip(self.groups, copied, strict=True)
            return sum(group.stop(stop, span.first) - span.first for group, span in spans)
        count = self.groups.num_behind(len(prefix), stop) + self.pool.num_idle(names)
        if self.keeps_all or not self.blocks.lower:
            return count
        return count + sum(name not in self.prefixes for name in names)

    def reserve(self, request_id: RequestId, num_slots: int) -> bool:
        """Make the request hold at least `num_slots` slots, or, in a group with a window, as many
        as a table may have; False, and no change, if it cannot."""
        holding = self._held.get(request_id)
        if holding is not None and num_slots <= holding.num_slots:
            return True
        shortage = self.shortage(request_id, num_slots)
        if sum(shortage) > self.pool.num_available:
            return False
        if holding is None:
            holding = self._held[request_id] = Holding(tuple(Table() for _ in self.groups))
        for table, count in zip(holding.tables, shortage, strict=True):
            if count:
                table.blocks.extend(self.pool.allocate(count))
        holding.encoded = None
        stops = [table.stop for table in holding.tables]
        holding.num_slots = min(stops) * self.block_size if stops else num_slots
        return True

    def give_back(
        self, request_id: RequestId, num_computed: int, checkpoints: Sequence[int] = ()
    ) -> None:
        """Drop the blocks that lie wholly before the windows, now that so many tokens are computed.
        The last of them may be computed again, so what it reads is kept. Those that are read behind
        one of the checkpoints are not evicted before others."""
        ends = [at // self.block_size * self.block_size for at in checkpoints]
        holding = self._held[request_id]
        holding.encoded = None
        for group, table in zip(self.groups, holding.tables, strict=True):
            count = group.first_needed(num_computed - 1) - table.first
            if count > 0:
                for place, block in enumerate(table.blocks[:count], table.first):
                    self.pool.drop(block, is_stale=not group.is_read_behind(ends, place))
                del table.blocks[:count]
                table.first += count
                table.num_published = max(table.num_published, table.first)

    def num_private(self, request_id: RequestId, exclude: Container[int] = ()) -> int:
        """Blocks that only this request holds, so that its release makes them available; those in
        `exclude` are not counted."""
        holders = self.pool.num_holders
        blocks = self._held[request_id].blocks()
        return sum([holders(block) == 1 and block not in exclude for block in blocks])

    def table(self, request_id: RequestId) -> bytes:
        """The request's block table as int32, oldest block first, in the first layer group."""
        holding = self._held[request_id]
        if holding.encoded is None:
            tables = holding.tables
            holding.encoded = tables[0].blocks.tobytes() if tables else b""
        return holding.encoded

    def holding(self, request_id: RequestId) -> Holding:
        """The request's tables."""
        return self._held[request_id]

    def release(self, request_id: RequestId) -> int:
        """Free the request's pages on the device; returns the number of its blocks.

        The end of a prefix is evicted before its beginning, which more requests can use.
        """
        self.in_motion.pop(request_id, None)
        self.states.release(request_id)
        holding = self._held.pop(request_id, None)
        if holding is None:
            return 0
        blocks = [block for table in holding.tables for block in reversed(table.blocks)]
        for block in blocks:
            self.pool.drop(block)
        return len(blocks)

    def reset(self) -> None:
        """The worker is lost: all pages of device and host are free, and no prefix is cached."""
        self.in_motion.clear()
        self._held.clear()
        self.states.reset()
        for pages in self.pages.values():
            pages.reset()

    def num_leaked(self, live: Container[RequestId]) -> int:
        """Pages of the device and the host whose request is not live; anything but 0 is a leak."""
        held = [sum(1 for _ in h.blocks()) for owner, h in self._held.items() if owner not in live]
        copied = [pages.host.num_leaked(live) for pages in self.pages.values()]
        return sum(held) + sum(copied) + self.states.num_leaked(live)

    def check(self) -> None:
        """Assert that every page is in exactly one state and that all counts agree."""
        holders = [0] * self.num_blocks
        for holding in self._held.values():
            self.groups.check(holding.tables)
            first = next(iter(holding.tables), Table())
            assert holding.encoded in (None, first.blocks.tobytes()), "the encoded table is old"
            for block in holding.blocks():
                holders[block] += 1
        assert self.in_motion.keys() <= self._held.keys(), "a request moves and holds no block"
        counts = (self.num_free - self.num_cached, self.num_held, self.num_cached, self.num_moving)
        assert min(counts) >= 0, f"a negative count: {self!r}"
        assert sum(counts) == self.num_blocks, f"the counts are not all: {self!r}"
        self.blocks.check(holders)
        self.states.check(self._held)
