"""SwappedPages: copies of requests' pages on the host, and the pages that moves free or fill.

    on the device ──begin_swap_out──▶ moving ──finish_swap_out──▶ on the host
          ▲                                                          │ begin_swap_in
          └──────────────── finish_swap_in ◀── moving ◀──────────────┘

The device pages of a swap-out that is not awaited are moving until its step has returned; those of
an awaited one are free at once, since the step copies them before it computes. Published blocks
stay cached on the device. When the request is swapped in, it adopts those that are still cached,
and the rest is copied back; all are, with several layer groups, a window or recurrent states.
"""

from array import array
from typing import TYPE_CHECKING

from engine.kv.tables import Copied, PagePairs
from engine.step import PageKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.kv.ledger import KVLedger
    from engine.step import BlockMove, RequestId


class SwappedPages:
    """Orders copies of all pages that a request holds; each is made completely or not at all."""

    def __init__(self, ledger: "KVLedger") -> None:
        self._ledger = ledger
        self._hosts = {kind: pages.host for kind, pages in ledger.pages.items()}
        self._copied: dict[RequestId, tuple[Copied, ...]] = {}

    def copied(self, request_id: "RequestId") -> "tuple[Copied, ...] | None":
        """The blocks that the request's copy has, by layer group; None without one."""
        return self._copied.get(request_id)

    def _to_copy(self, request_id: "RequestId", num_slots: int) -> tuple[Copied, ...]:
        stop = -(-num_slots // self._ledger.block_size)
        return self._ledger.holding(request_id).to_copy(stop)

    def num_to_copy(self, request_id: "RequestId", num_slots: int) -> int:
        """Host blocks that a copy of the request's first `num_slots` slots needs."""
        return sum([span.num_blocks for span in self._to_copy(request_id, num_slots)])

    def begin_swap_out(
        self, request_id: "RequestId", num_slots: int, *, is_awaited: bool
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

    def finish_swap_out(self, request_id: "RequestId") -> None:
        """The step that copied the request's pages to the host has returned."""
        for host in self._hosts.values():
            host.finish_write(request_id)
        self._ledger.release(request_id)

    def begin_swap_in(
        self,
        request_id: "RequestId",
        prefix: "Sequence[bytes]",
        num_slots: int,
        *,
        is_awaited: bool,
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

    def finish_swap_in(self, request_id: "RequestId") -> None:
        """The step that copied the request's pages to the device has returned."""
        self._ledger.in_motion.pop(request_id, None)

    def finish_read(self, move: "BlockMove") -> None:
        """The step that made this swap-in has returned: the host pages that it read are free."""
        pages = array("i")
        pages.frombytes(move.host)
        self._hosts[move.kind].finish_read(pages)

    def release(self, request_id: "RequestId") -> None:
        """Free the request's copy, if it has one."""
        self._copied.pop(request_id, None)
        for host in self._hosts.values():
            host.release(request_id)

    def reset(self) -> None:
        """The worker is lost, and its host memory with it; the ledger frees the pages."""
        self._copied.clear()
