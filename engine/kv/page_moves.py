"""Moves of pages between tiers: requests' copies on the host, and the moves of a plan.

Swapping. A move is part of the next step. Until that step returns, both ends of the move are
moving: device pages that are swapped out are not free yet, and a request whose pages are being
copied does not run. An *awaited* move ends before its step computes. So the device pages that it
swaps out are free in the plan that orders it, and a request that it swaps in may run in that plan.

Saves and loads. Copies in the tiers below are made while their pages are cached. A load is awaited:
its pages are filled before the step computes, and are published like computed ones when the step
has returned.
"""

from array import array
from collections.abc import Container, Iterable, Sequence

from engine.iteration import NO_SWAPS, Iteration, Load, Save, Swaps
from engine.kv.layer_groups import Copied, Missing, PagePairs
from engine.kv.ledger import KVLedger
from engine.request import Request
from engine.step import BlockMove, Direction, Page, PageKind, RequestId, Tier


class SwappedPages:
    """Copies of requests on the host, and the pages that moves free or fill. A copy has all pages
    that the request holds.

        on the device ──begin_swap_out──▶ moving ──finish_swap_out──▶ on the host
              ▲                                                          │ begin_swap_in
              └──────────────── finish_swap_in ◀── moving ◀──────────────┘

    Published blocks stay cached on the device. When the request is swapped in, it adopts those that
    are still cached, and the rest is copied back; all are, with several layer groups, a window or
    recurrent states.
    """

    def __init__(self, ledger: KVLedger) -> None:
        self._ledger = ledger
        self._hosts = {kind: pages.host for kind, pages in ledger.pages.items()}
        self._copied: dict[RequestId, tuple[Copied, ...]] = {}

    def copied(self, request_id: RequestId) -> tuple[Copied, ...] | None:
        """The blocks that the request's copy has, by layer group; None without one."""
        return self._copied.get(request_id)

    def _to_copy(self, request_id: RequestId, num_slots: int) -> tuple[Copied, ...]:
        stop = -(-num_slots // self._ledger.block_size)
        return self._ledger.holding(request_id).to_copy(stop)

    def num_to_copy(self, request_id: RequestId, num_slots: int) -> int:
        """Host blocks that a copy of the request's first `num_slots` slots needs."""
        return sum([span.num_blocks for span in self._to_copy(request_id, num_slots)])

    def begin_swap_out(
        self, request_id: RequestId, num_slots: int, *, is_awaited: bool
    ) -> list[PagePairs] | None:
        """Allocate host pages for a copy of the request's first `num_slots` slots and its state;
        None, and no change, if too few are free."""
        ledger, spans = self._ledger, self._to_copy(request_id, num_slots)
        sources = {
            PageKind.BLOCK: ledger.holding(request_id).copied(spans),
            PageKind.SNAPSHOT: ledger.states.current(request_id),
        }
        if any(len(pages) > self._hosts[kind].num_free for kind, pages in sources.items()):
            return None
        pairs = []
        for kind, pages in sources.items():
            copy = self._hosts[kind].begin_write(request_id, len(pages))
            assert copy is not None, "the pages are free"
            pairs.append(PagePairs(kind, pages, copy))
        self._copied[request_id] = spans
        if is_awaited:
            ledger.release(request_id)
        else:
            ledger.in_motion[request_id] = ledger.num_private(request_id)
        return pairs

    def finish_swap_out(self, request_id: RequestId) -> None:
        """The step that copied the request's pages to the host has returned."""
        for host in self._hosts.values():
            host.finish_write(request_id)
        self._ledger.release(request_id)

    def begin_swap_in(
        self, request_id: RequestId, prefix: Sequence[bytes], num_slots: int, *, is_awaited: bool
    ) -> list[PagePairs]:
        """Give the request `num_slots` slots, which must be available: the published blocks of
        `prefix` and new ones. The pairs say which of its pages to fill from its host copy; unless
        that is awaited, they are moving until `finish_swap_in`."""
        ledger = self._ledger
        assert ledger.keeps_all or not prefix, "only a whole prefix is shared while swapping in"
        spans = self._copied.pop(request_id)
        ledger.adopt(request_id, prefix)
        holding = ledger.holding(request_id)
        if not prefix:
            holding.begin_at(spans)
        reserved = ledger.reserve(request_id, num_slots)
        assert reserved, "a request is swapped in only if its blocks are available"
        blocks, states = holding.copied(spans, len(prefix)), ledger.states.refill(request_id)
        if blocks and not is_awaited:
            ledger.in_motion[request_id] = 0
        return [
            PagePairs(kind, pages, self._hosts[kind].begin_read(request_id, num_skipped))
            for kind, pages, num_skipped in (
                (PageKind.BLOCK, blocks, len(prefix)),
                (PageKind.SNAPSHOT, states, 0),
            )
        ]

    def finish_swap_in(self, request_id: RequestId) -> None:
        """The step that copied the request's pages to the device has returned."""
        self._ledger.in_motion.pop(request_id, None)

    def finish_read(self, move: BlockMove) -> None:
        """The step that made this swap-in has returned: the host pages that it read are free."""
        pages = array("i")
        pages.frombytes(move.host)
        self._hosts[move.kind].finish_read(pages)

    def release(self, request_id: RequestId) -> None:
        """Free the request's copy, if it has one."""
        self._copied.pop(request_id, None)
        for host in self._hosts.values():
            host.release(request_id)

    def reset(self) -> None:
        """The worker is lost, and its host memory with it; the ledger frees the pages."""
        self._copied.clear()


class PageMoves:
    """Orders moves of all kinds of pages between all tiers."""

    def __init__(self, ledger: KVLedger) -> None:
        self._pages = ledger.pages
        self._moves: list[BlockMove] = []  # moves in the plan being made
        self._saves: list[Save] = []
        self._loads: list[Load] = []
        # Requests whose pages are copied, without being in the batch
        self._swapping: list[Request] = []

    def wait_for(self, request: Request) -> None:
        """The request is in flight until the step being planned has returned, without an entry."""
        self._swapping.append(request)
        request.num_in_flight += 1

    def swap(
        self, direction: Direction, pairs: Sequence[PagePairs], *, is_awaited: bool
    ) -> BlockMove:
        """Order a swap; returns its move of blocks, which may have none."""
        moves = [
            BlockMove(direction, device.tobytes(), host.tobytes(), is_awaited, kind=kind)
            for kind, device, host in pairs
        ]
        self._moves += [move for move in moves if move.device]
        return moves[0]

    def save(self, most: int) -> None:
        """Order copies of at most so many cached blocks to the tiers below, and of a snapshot,
        beside the step being planned."""
        saves: list[Save] = []
        for kind, pages in self._pages.items():
            count = most if kind is PageKind.BLOCK else 1  # it is as large as several blocks
            saves += pages.pool.begin_save(count)
        self._saves += saves
        by_tier: dict[tuple[Tier, PageKind], list[tuple[int, int, bytes]]] = {}
        for tier, page, slot, name in saves:
            by_tier.setdefault((tier, page.kind), []).append((page.number, slot, name))
        self._copy(Direction.OUT, by_tier)

    def load(self, request: Request, wanted: Iterable[Missing]) -> int:
        """Order awaited moves that fill device pages with the contents of these names, up to the
        first one that no tier has; returns their number."""
        by_tier: dict[tuple[Tier, PageKind], list[tuple[int, int, bytes]]] = {}
        num_loaded = 0
        for page, name in wanted:
            copy = self._pages[page.kind].lower.begin_load(name)
            if copy is None:
                break
            tier, slot = copy
            by_tier.setdefault((tier, page.kind), []).append((page.number, slot, name))
            self._loads.append(Load(request, tier, page, name))
            num_loaded += 1
        self._copy(Direction.IN, by_tier)
        return num_loaded

    def _copy(
        self,
        direction: Direction,
        by_tier: dict[tuple[Tier, PageKind], list[tuple[int, int, bytes]]],
    ) -> None:
        """Order a move of named pages, by number, slot and name, for each tier and kind."""
        for (tier, kind), copies in by_tier.items():
            numbers, slots, names = zip(*copies, strict=True)
            tables = array("i", numbers).tobytes(), array("i", slots).tobytes()
            is_awaited = direction is Direction.IN
            move = BlockMove(direction, *tables, is_awaited, tier, b"".join(names), kind)
            self._moves.append(move)

    def collect(self) -> Swaps:
        """The moves ordered since the last call; they must be part of the step being planned."""
        if not self._moves:
            return NO_SWAPS
        self._moves.sort(key=lambda move: not move.is_awaited)  # stable: out before in, as ordered
        moves, swapping, saves, loads = self._moves, self._swapping, self._saves, self._loads
        self._moves, self._swapping, self._saves, self._loads = [], [], [], []
        return Swaps(tuple(moves), tuple(swapping), tuple(saves), tuple(loads))

    def finish_saves(self, iteration: Iteration, *, is_complete: bool) -> None:
        """A step has returned, or will not return."""
        for kind, pages in self._pages.items():
            saves = [save for save in iteration.saves if save.page.kind is kind]
            if saves:
                pages.pool.finish_save(saves, is_complete=is_complete)

    def finish_loads(self, iteration: Iteration, unread: Container[Page]) -> dict[Request, None]:
        """A step has returned, or will not return: what it read may be replaced. Returns the
        requests with pages that it could not read; these copies are dropped."""
        failed: dict[Request, None] = {}
        for request, tier, page, name in iteration.loads:
            is_readable = page not in unread
            self._pages[page.kind].lower.finish_load(tier, name, is_readable=is_readable)
            if not is_readable:
                failed[request] = None
        return failed
