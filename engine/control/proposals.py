"""Proposals: what a plan does for speculation.

A plan asks which requests wait for their drafts instead of being planned ahead, and adds drafts to
the decodes of its batch, from the tokens and KV blocks that are left over.
"""

from engine.control.batch_builder import BatchBuilder
from engine.control.settings import SchedulerSettings
from engine.iteration import Iteration
from engine.kv.cache import KVCache
from engine.pool import RequestPool
from engine.request import Request
from engine.speculation.drafter import Drafter


class Proposals:
    """Passes drafts from a drafter to the iterations being planned."""

    def __init__(
        self, drafter: Drafter, kv: KVCache, pool: RequestPool, settings: SchedulerSettings
    ) -> None:
        self._drafter = drafter
        self._kv = kv
        self._pool = pool
        self._max_seconds = settings.max_step_seconds

    def hold_back(self, oldest: Iteration, ahead: dict[Request, None]) -> None:
        """Remove from `ahead`, the requests that could be planned ahead of the `oldest` iteration,
        those that wait until their drafts are known."""
        drafter = self._drafter
        if drafter.is_active and ahead:
            for request in drafter.waiting(oldest, ahead):
                del ahead[request]

    def add_to(self, batch: BatchBuilder) -> None:
        """Give the decodes of a complete batch drafts, and let the draft model propose tokens
        behind them. One free block is left for each started request to grow into."""
        drafter = self._drafter
        if not drafter.is_active:
            return
        if not batch.has_prefills:
            self._add_drafts(batch, drafter)
        drafter.sent(batch.step_id)

    def _add_drafts(self, batch: BatchBuilder, drafter: Drafter) -> None:
        kv, max_seconds = self._kv, self._max_seconds
        spare = _SpareBlocks(kv, len(self._pool.started))
        for index, drafts in drafter.choose(batch.decodes, batch.tokens_left, max_seconds).items():
            drafts = drafts[: kv.room.drafts]
            if drafts and spare.take(batch.decodes[index][0], len(drafts)):
                batch.add_drafts(index, drafts, kv)
        for index, spec in drafter.proposals(batch.decodes, batch.tokens_left, max_seconds).items():
            request, _ = batch.decodes[index]
            if spec.num_tokens == 0 or spare.take(request, spec.num_tokens):
                batch.add_proposal(index, spec, kv)
                drafter.will_propose(request, spec)


class _SpareBlocks:
    """The free blocks that drafts may take."""

    def __init__(self, kv: KVCache, num_started: int) -> None:
        self._kv = kv
        self._num_left = kv.room.blocks - num_started

    def take(self, request: Request, num_slots: int) -> bool:
        """Reserve `num_slots` slots behind those planned for the request; False, and no change, if
        too few blocks are left."""
        slots = request.num_planned + num_slots
        missing = self._kv.missing(request, slots).blocks + self._kv.room.blocks
        if missing > 0 and missing > self._num_left:
            return False
        self._num_left -= max(0, missing)
        reserved = self._kv.reserve(request, slots)
        assert reserved, "spare blocks can be reserved"
        return True
