"""KVManager: all that the control plane asks of the KV cache, over ledger, host tier and prefixes.

Swapping. A move of KV is part of the next step. Until that step returns, both ends of the move
are moving: device blocks that are swapped out are not free yet, and a request whose KV is being
copied does not run. An *awaited* move ends before its step computes. So the device blocks that it
swaps out are free in the plan that orders it, and a request that it swaps in may run in that plan.
"""

from array import array
from typing import TYPE_CHECKING

from engine.iteration import NO_SWAPS, Iteration, Swaps
from engine.kv.cached_copies import CachedCopies
from engine.kv.prefix import extend_hashes
from engine.kv.prefix_search import PrefixSearch
from engine.kv.saved_blocks import StoreNames
from engine.request import Move, Request, State
from engine.step import BlockMove, Direction, Tier

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Sequence

    from engine.events import Observer
    from engine.kv.ledger import KVLedger
    from engine.kv.state_ledger import StateLedger
    from engine.kv.tables import BlockPairs
    from engine.pool import RequestPool
    from engine.step import ReadAhead, StateSlots, StepEntry

MOST_LOOKED_UP = 512  # blocks of a prompt, which are about 1 ms of hashing
SWAPPED = State.SWAPPED  # bound once (see engine.pool)

SAVES_PER_STEP = 16  # cached blocks that are copied to the tiers below, beside an iteration
IDLE_SAVES_PER_STEP = 64


class KVManager:
    """Gives requests KV blocks, takes them back, swaps them, and finds shared prefixes."""

    def __init__(
        self,
        ledger: "KVLedger",
        pool: "RequestPool",
        observer: "Observer",
        *,
        reuses_prefixes: bool,
    ) -> None:
        self.ledger = ledger
        self.block_size = ledger.block_size
        self.num_blocks = ledger.num_blocks
        self._pool = pool
        self._observer = observer
        self._reuses_prefixes = reuses_prefixes and bool(ledger.groups)
        self.keeps_all = ledger.keeps_all
        self._has_one_table = ledger.groups.keeps_all
        self.states = ledger.states  # None without recurrent layers
        self.num_groups = len(ledger.groups)
        self.search = PrefixSearch(ledger, is_on=self._reuses_prefixes)
        self._moves: list[BlockMove] = []  # of the plan being made
        self._swapping: list[Request] = []  # whose KV they copy, without being in the batch
        self._filled: set[Request] = set()  # whose KV awaited moves fill; may be in the batch
        self.copies = CachedCopies(ledger, self._moves)

    @property
    def num_free(self) -> int:
        """Device blocks that can be allocated."""
        return self.ledger.num_free

    @property
    def num_host_free(self) -> int:
        """Free blocks of the host tier."""
        return self.ledger.host.num_free

    @property
    def num_to_be_freed(self) -> int:
        """Device blocks that become free when the steps in flight return."""
        return self.ledger.num_to_be_freed

    # Shared prefixes

    def publish(self, request: Request, start: int) -> None:
        """Let other requests share the blocks that this one has filled from position `start`, and
        give back the blocks that no window reaches any more."""
        size = self.block_size
        num_full = request.num_computed // size
        if num_full > start // size and self._reuses_prefixes:
            extend_hashes(request, size, num_full)
            hashes = request.block_hashes[:num_full]
            published = self.ledger.publish(request.request_id, hashes)
            if (listener := self.ledger.prefixes.listener) is not None:
                for group, places in enumerate(published):
                    if places:
                        listener.stored(request, places, group)
        if not self.keeps_all:
            self.ledger.give_back(request.request_id, request.num_computed)
            if self.states is not None:
                self._publish_snapshots(request, self.states)

    def _publish_snapshots(self, request: Request, states: "StateLedger") -> None:
        size, num_computed = self.block_size, request.num_computed
        hashes: Sequence[bytes] = ()
        if self._reuses_prefixes:
            extend_hashes(request, size, num_computed // size)
            hashes = request.block_hashes
        prompt_len = request.prompt_len
        places = states.commit(request.request_id, num_computed, prompt_len, hashes, size)
        if places and (listener := states.snapshots.listener) is not None:
            for place in places:
                listener.stored(request, [place], states.group)

    def num_to_compute(self, request: Request) -> int:
        """Known tokens of a request without KV whose KV is not in the cache, as far as it was
        looked for (`PrefixSearch.find`)."""
        self.search.find(request)
        return request.num_tokens - request.num_matched * self.block_size

    def prefix(self, request: Request) -> "Sequence[bytes]":
        """Hashes of the request's leading blocks that it can start behind. They are on the device,
        held or cached; where layers do not keep all their KV, also in the tiers below."""
        if request.state is SWAPPED and not self.keeps_all:
            return ()  # all that it needs is in its copy
        self.search.find(request)
        return self.search.reusable(request, self._most_reusable(request) // self.block_size)

    # Blocks

    def num_missing(self, request: Request, num_slots: int) -> int:
        """Blocks that lack for a started request to hold `num_slots` slots; 0 or less if none."""
        return self.ledger.num_missing(request.request_id, num_slots)

    def num_missing_to_start(self, request: Request, num_slots: int) -> int:
        """The same for a waiting or swapped request, which can share a prefix."""
        prefix = self.prefix(request)
        need = self.ledger.num_to_start(request.request_id, num_slots, prefix)
        return need + self.ledger.num_idle(prefix) - self.ledger.num_free

    def num_states_missing(self, request: Request) -> int:
        """State slots that lack for a waiting or swapped request to start; 0 or less if none do."""
        return 0 if self.states is None else self.states.num_missing(self.prefix(request))

    def num_for_prompt(self, prompt_len: int) -> int:
        """Blocks that a prompt of this length needs to start, if nothing of it is cached."""
        return self.ledger.num_for(prompt_len)

    def num_gained(self, victim: Request, exclude: "Container[int]" = ()) -> int:
        """Blocks that become available if `victim` releases its KV, without those in `exclude`."""
        return self.ledger.num_private(victim.request_id, exclude)

    def shared_blocks(self, request: Request) -> set[int]:
        """Blocks that a waiting or swapped request will share when it starts."""
        return self.ledger.blocks_of(self.prefix(request))

    def reserve(self, request: Request, num_slots: int) -> bool:
        """Make a started request hold at least so many slots; False, and no change, if blocks
        lack."""
        return self.ledger.reserve(request.request_id, num_slots)

    def start(self, request: Request, num_slots: int, now: float, *, is_awaited: bool) -> None:
        """Give a waiting or swapped request `num_slots` slots, which must be available.

        A request whose KV is on the host is swapped in by an awaited move or another one.
        """
        prefix = self.prefix(request)
        if request.state is SWAPPED:
            self._swap_in(request, prefix, num_slots, now, is_awaited=is_awaited)
            return
        missing = self.ledger.adopt(request.request_id, prefix)
        reserved = self.ledger.reserve(request.request_id, num_slots)
        assert reserved, "a request is started only if its blocks are available"
        self._pool.move(request, Move.ADMIT)
        num_loaded = 0
        if missing.blocks or missing.states:
            self._filled.add(request)
            self.copies.load(request, missing.blocks)
            self.copies.load(request, missing.states, is_state=True)
        elif self.ledger.saves and self.keeps_all:
            num_loaded = self.copies.load(request, self._behind(request, len(prefix)))
            if num_loaded:
                self._filled.add(request)
        request.reset_to((len(prefix) + num_loaded) * self.block_size)

    def wait_for_moves(self, request: Request) -> None:
        """A request that was started is in no entry of the step being planned: if the step fills
        its blocks, it is in flight until the step has returned."""
        if request in self._filled:
            self._pool.move(request, Move.SWAP_IN)
            self._swapping.append(request)
            request.num_in_flight += 1

    def _behind(self, request: Request, first: int) -> "Iterator[tuple[int, bytes]]":
        """The request's blocks from number `first` on that may be loaded, with their hashes."""
        stop = self._most_reusable(request) // self.block_size
        table = memoryview(self.ledger.table(request.request_id)).cast("i")
        return zip(table[first:], request.block_hashes[first:stop], strict=False)

    def _most_reusable(self, request: Request) -> int:
        """How many of the known tokens may come from the cache: a request that is not swapped
        computes at least one, and those whose prompt log-probabilities are still missing."""
        if request.state is SWAPPED:
            return request.num_computed
        if request.wants_prompt_logprobs:
            return len(request.prompt_logprobs)
        return request.num_tokens - 1

    def save(self, most: int) -> None:
        """Order copies of at most so many cached blocks to the tiers below, beside the step being
        planned."""
        if self.ledger.saves or self.states is not None:
            self.copies.save(most)

    def to_look_up(self, request: Request) -> StoreNames:
        """What a shared store may have of a request's prompt, of its first blocks."""
        most = min(self._most_reusable(request) // self.block_size, MOST_LOOKED_UP)
        extend_hashes(request, self.block_size, most)
        return self.copies.unknown(request.block_hashes[:most])

    def read_ahead(self, request: Request) -> "ReadAhead | None":
        """The copies on the disk that a waiting request would load if it started now; None if there
        are none."""
        if Tier.DISK not in self.ledger.lower:
            return None
        prefix = self.prefix(request)
        if self.keeps_all:
            most = self._most_reusable(request) // self.block_size
            return self.copies.ahead(request, request.block_hashes[len(prefix) : most], ())
        states = [] if self.states is None else self.states.names(prefix)
        return self.copies.ahead(request, self.ledger.groups.names(prefix), states)

    def with_blocks(self, request: Request, entry: "StepEntry") -> "StepEntry":
        """The entry with the request's blocks as they are now, in all layer groups."""
        if self._has_one_table:
            return entry._replace(blocks=self.ledger.table(request.request_id))
        return entry._replace(blocks=b"", tables=self.ledger.tables(request.request_id))

    def plan_state(self, request: Request, start: int, stop: int) -> "StateSlots | None":
        """Where a step that computes the tokens `[start, stop)` reads and writes the request's
        recurrent state; None without recurrent layers.

        Snapshots are written after the last full block of the prompt, of all tokens so far, and of
        each block of the output, and at intervals within long prompts.
        """
        if self.states is None:
            return None
        ends: set[int] = set()
        if self._reuses_prefixes:
            size, prompt_len = self.block_size, request.prompt_len
            interval = -(-self.states.interval(prompt_len) // size) * size
            last = (prompt_len - 1) // size * size
            ends.update(range(interval, last, interval))
            ends.update((last, (request.num_tokens - 1) // size * size))
            if start >= prompt_len:
                ends.add(stop // size * size)
        written = sorted(end for end in ends if start < end <= stop)
        return self.states.plan(request.request_id, start, written)

    def plan_drafts(self, request: Request, entry: "StepEntry") -> "StepEntry":
        """The entry, which has got drafts, with the request's blocks and state slots."""
        if self.states is not None and entry.state is not None:
            stop = entry.start + len(entry.tokens)
            state = self.states.plan_drafts(
                request.request_id,
                entry.state,
                entry.start,
                entry.num_drafts,
                has_snapshot=self._reuses_prefixes and stop % self.block_size == 0,
            )
            entry = entry._replace(state=state)
        return self.with_blocks(request, entry)

    def most_drafts(self, count: int) -> int:
        """How many of `count` drafts have a slot for the recurrent state after them."""
        return count if self.states is None else max(0, min(count, self.states.num_for_drafts))

    def release(self, request: Request) -> None:
        """Free the request's blocks in both tiers; no step in flight may use them."""
        self.ledger.release(request.request_id)

    def forget(self, request: Request) -> None:
        """A running request's KV could not be read: it waits again, to be recomputed."""
        self.ledger.release(request.request_id)
        request.reset_to(0)
        self._pool.move(request, Move.LOSE)

    def reset(self) -> None:
        """The worker is lost: no request holds any block, and no prefix is cached."""
        self.ledger.reset()

    # Swapping

    def num_to_swap(self, request: Request) -> int:
        """Host blocks that a copy of the request's KV needs."""
        return self.ledger.num_to_copy(request.request_id, request.num_computed)

    def swap_out(self, request: Request, now: float, *, is_awaited: bool) -> bool:
        """Order the swap-out of a ready request; False, and no change, if the host tier is full."""
        if not request.num_computed:
            return False
        pairs = self.ledger.begin_swap_out(
            request.request_id, request.num_computed, is_awaited=is_awaited
        )
        if pairs is None:
            return False
        request.num_swaps += 1
        self._pool.move(request, Move.SWAP_OUT)
        self._order(request, Direction.OUT, pairs, now, is_awaited=is_awaited)
        return True

    def _swap_in(
        self,
        request: Request,
        prefix: "Sequence[bytes]",
        num_slots: int,
        now: float,
        *,
        is_awaited: bool,
    ) -> None:
        """Order the swap-in; the request is ready at once if nothing has to be waited for."""
        pairs = self.ledger.begin_swap_in(
            request.request_id, prefix, num_slots, is_awaited=is_awaited
        )
        request.num_drafted = 0  # the draft model's KV is not swapped
        has_moves = bool(pairs.device) or pairs.state is not None
        self._pool.move(request, Move.ADMIT if is_awaited or not has_moves else Move.SWAP_IN)
        if has_moves:
            self._order(request, Direction.IN, pairs, now, is_awaited=is_awaited)
            if is_awaited:
                self._filled.add(request)

    def _order(
        self,
        request: Request,
        direction: Direction,
        pairs: "BlockPairs",
        now: float,
        *,
        is_awaited: bool,
    ) -> None:
        if request.state is not State.READY:
            self._swapping.append(request)
            request.num_in_flight += 1
        move = BlockMove(direction, pairs.device.tobytes(), pairs.host.tobytes(), is_awaited)
        if pairs.device:
            self._moves.append(move)
        if pairs.state is not None:
            device, host = (array("i", [slot]).tobytes() for slot in pairs.state)
            self._moves.append(BlockMove(direction, device, host, is_awaited, is_state=True))
        self._observer.swapped(request, move, now)

    def collect_swaps(self) -> Swaps:
        """The moves ordered since the last call; they must be part of the step being planned."""
        if not self._moves:
            return NO_SWAPS
        self._moves.sort(key=lambda move: not move.is_awaited)  # stable: out before in, as ordered
        swaps = Swaps(
            tuple(self._moves),
            tuple(self._swapping),
            tuple(self.copies.saves),
            tuple(self.copies.loads),
        )
        for ordered in (self._moves, self._swapping, self.copies.saves, self.copies.loads):
            ordered.clear()
        self._filled.clear()
        return swaps

    def finish_swaps(self, iteration: Iteration) -> list[Request]:
        """A step has returned, so its moves have ended. Returns the swapping requests whose end
        was decided meanwhile; their blocks are still held."""
        self._free_read_blocks(iteration)
        self.copies.finish_saves(iteration, is_complete=True)
        for request in iteration.swapping:
            request.num_in_flight -= 1
            if request.state is State.SWAPPING_OUT:
                self.ledger.finish_swap_out(request.request_id)
                self._pool.move(request, Move.SETTLE)
            elif request.state is State.SWAPPING_IN:
                self.ledger.finish_swap_in(request.request_id)
                self._pool.move(request, Move.SETTLE)
        return [request for request in iteration.swapping if request.state is State.LEAVING]

    def abandon_swaps(self, iteration: Iteration) -> list[Request]:
        """A step failed or is lost, and its moves may not have been made: the swapping requests
        have no KV any more. Returns those whose end was decided meanwhile."""
        self._free_read_blocks(iteration)
        self.copies.finish_saves(iteration, is_complete=False)
        self.copies.finish_loads(iteration)
        for request in iteration.swapping:
            request.num_in_flight -= 1
            if request.state is not State.LEAVING:
                self.ledger.release(request.request_id)
                request.reset_to(0)
                self._pool.move(request, Move.LOSE)
        return [request for request in iteration.swapping if request.state is State.LEAVING]

    def _free_read_blocks(self, iteration: Iteration) -> None:
        """The host blocks that swapped requests were read from are free."""
        for move in iteration.step.moves:
            if move.direction is Direction.IN and not move.hashes:
                blocks = array("i")
                blocks.frombytes(move.host)
                states = self.ledger.states if move.is_state else None
                tier = self.ledger.host if states is None else states.host
                tier.finish_read(blocks)
