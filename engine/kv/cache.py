"""KVCache: all that the scheduler asks of the pages of requests, in all tiers."""

from collections.abc import Collection, Iterator, Sequence
from sys import maxsize
from typing import NamedTuple

from engine.iteration import Iteration, Observer, Swaps
from engine.kv.layer_groups import Missing
from engine.kv.ledger import KVLedger
from engine.kv.page_moves import PageMoves, SwappedPages
from engine.kv.prefix import extend_hashes
from engine.kv.prefix_search import PrefixSearch
from engine.kv.request_states import RowsOfDrafts
from engine.pool import RequestPool
from engine.request import Move, Request, State
from engine.step import Direction, Page, PageKind, StepEntry, StepResult

WAITING, SWAPPED = State.WAITING, State.SWAPPED  # bound once (see engine.pool)


class Shortage(NamedTuple):
    """Pages that lack for a request to hold its slots; 0 or less if none lack."""

    blocks: int
    states: int

    @property
    def is_any(self) -> bool:
        return self.blocks > 0 or self.states > 0


class Room(NamedTuple):
    """Pages that can be allocated now: blocks of the device and of the host, and drafts whose rows
    have state slots; and device blocks that become free when the steps in flight return."""

    blocks: int
    host_blocks: int
    drafts: int
    blocks_coming: int


class Finished(NamedTuple):
    """The requests of a step whose end was decided while it moved their pages, which they still
    hold; and those whose pages it could not read."""

    leaving: Sequence[Request]
    unread: Collection[Request]


NOTHING_FINISHED = Finished((), ())


class KVCache:
    """Gives requests pages, takes them back, swaps them, and lets requests share prefixes.

    `search` finds the prefixes of waiting requests. `table` gives a request's blocks in its first
    layer group, as int32, by its id. `rewinds`: a request can compute its last token
    again, since no recurrent state has gone past it.
    """

    def __init__(
        self, ledger: KVLedger, pool: RequestPool, observer: Observer, *, reuses_prefixes: bool
    ) -> None:
        self.ledger = ledger
        self.shape = ledger.shape
        self.block_size = ledger.block_size
        self.groups = ledger.groups
        self.keeps_all = ledger.keeps_all
        self.saves = bool(ledger.blocks.lower)
        self.rewinds = not ledger.states.is_on
        most = ledger.groups.longest_request(ledger.num_blocks)
        self.longest_request = maxsize if most is None else most * ledger.block_size  # in slots
        self.table = ledger.table  # bound once, for the hot path
        self._pool = pool
        self._observer = observer
        self._reuses_prefixes = reuses_prefixes and bool(ledger.groups)
        self.search = PrefixSearch(ledger, is_on=self._reuses_prefixes)
        self._has_one_table = ledger.groups.keeps_all
        self._has_lower = any(pages.lower for pages in ledger.pages.values())
        self._moves = PageMoves(ledger)
        self._swapped = SwappedPages(ledger)
        self._filled: set[Request] = set()  # by awaited moves of the plan; may be in the batch

    # How many pages

    @property
    def room(self) -> Room:
        """What can be allocated."""
        ledger = self.ledger
        coming = sum(ledger.in_motion.values()) + ledger.pool.num_to_be_saved
        drafts = ledger.states.num_for_drafts
        return Room(ledger.num_free, ledger.blocks.host.num_free, drafts, coming)

    def missing(
        self, request: Request, num_slots: int, prefix: Sequence[bytes] | None = None
    ) -> Shortage:
        """The pages that lack for a request to hold `num_slots` slots. One without device pages
        shares a prefix, which is looked for unless it is given."""
        ledger, request_id = self.ledger, request.request_id
        if request.state is not WAITING and request.state is not SWAPPED:
            return Shortage(sum(ledger.shortage(request_id, num_slots)) - ledger.num_free, 0)
        if prefix is None:
            prefix = self.search.prefix(request)
        needed = ledger.num_to_start(num_slots, prefix, self._swapped.copied(request_id))
        return Shortage(needed - ledger.num_free, ledger.states.num_missing(prefix))

    def num_gained(self, victim: Request, request: Request | None = None) -> int:
        """Blocks that become available if `victim` releases its pages, without those that a waiting
        or swapped request will share when it starts."""
        shared: set[int] = set()
        if request is not None:
            find = self.ledger.prefixes.find
            names = self.groups.names(self.search.prefix(request))
            shared = {block for name in names if (block := find(name)) is not None}
        return self.ledger.num_private(victim.request_id, shared)

    def num_to_swap(self, request: Request) -> int:
        """Host blocks that a copy of the request's KV needs."""
        return self._swapped.num_to_copy(request.request_id, request.num_computed)

    # Pages of requests

    def reserve(self, request: Request, num_slots: int) -> bool:
        """Make a started request hold at least so many slots; False, and no change, if blocks
        lack."""
        return self.ledger.reserve(request.request_id, num_slots)

    def start(self, request: Request, num_slots: int, now: float, *, is_awaited: bool) -> None:
        """Give a waiting or swapped request `num_slots` slots, which must be available.

        A request whose pages are on the host is swapped in by an awaited move or another one.
        """
        prefix = self.search.prefix(request)
        if request.state is SWAPPED:
            self._swap_in(request, prefix, num_slots, now, is_awaited=is_awaited)
            return
        missing = self.ledger.adopt(request.request_id, prefix)
        reserved = self.ledger.reserve(request.request_id, num_slots)
        assert reserved, "a request is started only if its blocks are available"
        self._pool.move(request, Move.ADMIT)
        num_loaded = 0
        if missing:
            self._filled.add(request)
            self._moves.load(request, missing)
        elif self.saves and self.keeps_all:
            num_loaded = self._moves.load(request, self._behind(request, len(prefix)))
            if num_loaded:
                self._filled.add(request)
        request.reset_to((len(prefix) + num_loaded) * self.block_size)

    def _behind(self, request: Request, first: int) -> Iterator[Missing]:
        """The request's blocks from number `first` on that may be loaded, with their hashes."""
        stop = self.search.most_reusable(request) // self.block_size
        (table,) = self.ledger.holding(request.request_id).tables
        pairs = zip(table.blocks[first:], request.block_hashes[first:stop], strict=False)
        return (Missing(Page(PageKind.BLOCK, block), name) for block, name in pairs)

    def wait_for_moves(self, request: Request) -> None:
        """A request that was started is in no entry of the step being planned: if the step fills
        its pages, it is in flight until the step has returned."""
        if request in self._filled:
            self._pool.move(request, Move.SWAP_IN)
            self._moves.wait_for(request)

    def extend(
        self, request: Request, entry: StepEntry, *, has_new_drafts: bool = False
    ) -> StepEntry:
        """The entry with the request's blocks as they are now; and with state slots, if it has none
        yet, or has got drafts, whose rows need them too."""
        states, request_id = self.ledger.states, request.request_id
        stop, size = entry.start + len(entry.tokens), self.block_size
        if states.is_on and entry.state is None:
            ends: Sequence[int] = ()
            if self._reuses_prefixes:
                ends = states.snapshot_ends(request, entry.start, stop, size)
            entry = entry._replace(state=states.plan(request_id, entry.start, ends))
        elif entry.state is not None and has_new_drafts:
            has_snapshot = self._reuses_prefixes and stop % size == 0
            rows = RowsOfDrafts(entry.start, entry.num_drafts, has_snapshot)
            entry = entry._replace(state=states.plan_drafts(request_id, entry.state, rows))
        if self._has_one_table:
            return entry._replace(blocks=self.table(request_id))
        return entry._replace(blocks=b"", tables=self.ledger.holding(request_id).block_tables())

    def publish(self, request: Request, start: int) -> None:
        """Let other requests share the pages that this one has filled from position `start`, and
        give back the blocks that no window reaches any more."""
        size, ledger = self.block_size, self.ledger
        num_full = self._num_shared(request)
        if num_full > start // size and self._reuses_prefixes:
            extend_hashes(request, size, num_full)
            hashes = request.block_hashes[:num_full]
            published = ledger.publish(request.request_id, hashes)
            if (listener := ledger.prefixes.listener) is not None:
                for group, places in enumerate(published):
                    if places:
                        listener.stored(request, places, group)
        if not self.keeps_all:
            ends = request.spec.ends
            ledger.give_back(request.request_id, request.num_computed, ends)
            if ledger.states.is_on:
                self._publish_snapshots(request)

    def _publish_snapshots(self, request: Request) -> None:
        size, num_computed, states = self.block_size, request.num_computed, self.ledger.states
        hashes: Sequence[bytes] = ()
        if self._reuses_prefixes:
            num_shared = self._num_shared(request)
            extend_hashes(request, size, num_shared)
            hashes = request.block_hashes[:num_shared]
        prompt_len = request.prompt_len
        places = states.commit(request.request_id, num_computed, prompt_len, hashes, size)
        if places and (listener := states.snapshots.listener) is not None:
            for place in places:
                listener.stored(request, [place], states.group)

    def _num_shared(self, request: Request) -> int:
        """The full, computed blocks of a request that others may share."""
        until, num_computed = request.spec.caching.until, request.num_computed
        return (num_computed if until is None else min(until, num_computed)) // self.block_size

    def release(self, request: Request) -> None:
        """Free the request's pages in all tiers; no step in flight may use them."""
        if request.spec.retention and self._reuses_prefixes:
            _retain(self.ledger, request, self._num_shared(request))
        self._swapped.release(request.request_id)
        self.ledger.release(request.request_id)

    def forget(self, request: Request) -> None:
        """A request's pages are lost or could not be read: it waits again, to be recomputed."""
        self.release(request)
        request.reset_to(0)
        self._pool.move(request, Move.LOSE)

    def reset(self) -> None:
        """The worker is lost: no request holds any page, and no prefix is cached."""
        self._swapped.reset()
        self.ledger.reset()

    # Moves

    def swap_out(self, request: Request, now: float, *, is_awaited: bool) -> bool:
        """Order the swap-out of a ready request; False, and no change, if the host tier is full."""
        if not request.num_computed:
            return False
        pairs = self._swapped.begin_swap_out(
            request.request_id, request.num_computed, is_awaited=is_awaited
        )
        if pairs is None:
            return False
        request.setbacks.num_swaps += 1
        self._pool.move(request, Move.SWAP_OUT)
        self._moves.wait_for(request)
        move = self._moves.swap(Direction.OUT, pairs, is_awaited=is_awaited)
        self._observer.swapped(request, move, now)
        return True

    def _swap_in(
        self,
        request: Request,
        prefix: Sequence[bytes],
        num_slots: int,
        now: float,
        *,
        is_awaited: bool,
    ) -> None:
        """Order the swap-in; the request is ready at once if nothing has to be waited for."""
        pairs = self._swapped.begin_swap_in(
            request.request_id, prefix, num_slots, is_awaited=is_awaited
        )
        request.num_drafted = 0  # the draft model's KV is not swapped
        if not any(pair.device for pair in pairs):
            self._pool.move(request, Move.ADMIT)
            return
        self._pool.move(request, Move.ADMIT if is_awaited else Move.SWAP_IN)
        if is_awaited:
            self._filled.add(request)
        else:
            self._moves.wait_for(request)
        move = self._moves.swap(Direction.IN, pairs, is_awaited=is_awaited)
        self._observer.swapped(request, move, now)

    def collect_moves(self, num_saves: int) -> Swaps:
        """The moves ordered since the last call, which must be part of the step being planned; and
        copies of at most `num_saves` cached blocks to the tiers below."""
        if num_saves and self._has_lower:
            self._moves.save(num_saves)
        self._filled.clear()
        return self._moves.collect()

    def finish(self, iteration: Iteration, result: StepResult | None) -> Finished:
        """A step has returned, so its moves have ended; or it has no result, since it failed or is
        lost: then the requests whose pages it copied wait again, to be recomputed."""
        if not iteration.step.moves and not iteration.swapping:
            return NOTHING_FINISHED
        for move in iteration.step.moves:
            if move.direction is Direction.IN and not move.hashes:
                self._swapped.finish_read(move)
        self._moves.finish_saves(iteration, is_complete=result is not None)
        unread = self._moves.finish_loads(iteration, () if result is None else result.unread)
        leaving: list[Request] = []
        for request in iteration.swapping:
            request.num_in_flight -= 1
            if request.state is State.LEAVING:
                leaving.append(request)
            elif result is None or request in unread:
                self.forget(request)
            elif request.state is State.SWAPPING_OUT:
                self._swapped.finish_swap_out(request.request_id)
                self._pool.move(request, Move.SETTLE)
            elif request.state is State.SWAPPING_IN:
                self._swapped.finish_swap_in(request.request_id)
                self._pool.move(request, Move.SETTLE)
        return Finished(leaving, unread)


def _retain(ledger: KVLedger, request: Request, num_shared: int) -> None:
    """Retain what another request needs to go on behind the blocks that this one shares."""
    ledger.retains = True
    hashes, spec, states = request.block_hashes[:num_shared], request.spec, ledger.states
    until = request.times.arrived_at + spec.retention
    ledger.blocks.retain(ledger.groups.names(hashes), until, spec.tenant)
    behind = hashes[: states.longest(hashes, len(hashes))]
    ledger.snapshots.retain(states.names(behind), until, spec.tenant)
