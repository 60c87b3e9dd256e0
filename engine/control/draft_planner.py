"""Adds drafts to the decodes of a batch, from the tokens and the KV blocks that it leaves over."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.control.batch_builder import BatchBuilder
    from engine.control.settings import SchedulerSettings
    from engine.kv.manager import KVManager
    from engine.pool import RequestPool
    from engine.request import Request
    from engine.speculation.drafter import Drafter


def add_drafts(
    batch: "BatchBuilder",
    drafter: "Drafter",
    kv: "KVManager",
    pool: "RequestPool",
    settings: "SchedulerSettings",
) -> None:
    """Give decodes drafts, and let the draft model propose tokens behind them. One free block is
    left for each started request to grow into."""
    spare, max_seconds = _SpareBlocks(kv, len(pool.started)), settings.max_step_seconds
    for index, drafts in drafter.choose(batch.decodes, batch.tokens_left, max_seconds).items():
        drafts = drafts[: kv.most_drafts(len(drafts))]
        if drafts and spare.take(batch.decodes[index][0], len(drafts)):
            batch.add_drafts(index, drafts, kv)
    for index, spec in drafter.proposals(batch.decodes, batch.tokens_left, max_seconds).items():
        request, _ = batch.decodes[index]
        if spec.num_tokens == 0 or spare.take(request, spec.num_tokens):
            batch.add_proposal(index, spec, kv)
            drafter.will_propose(request, spec)


class _SpareBlocks:
    """The free blocks that drafts may take."""

    def __init__(self, kv: "KVManager", num_started: int) -> None:
        self._kv = kv
        self._num_left = kv.num_free - num_started

    def take(self, request: "Request", num_slots: int) -> bool:
        """Reserve `num_slots` slots behind those planned for the request; False, and no change, if
        too few blocks are left."""
        slots = request.num_planned + num_slots
        missing = self._kv.num_missing(request, slots) + self._kv.num_free
        if missing > 0 and missing > self._num_left:
            return False
        self._num_left -= max(0, missing)
        reserved = self._kv.reserve(request, slots)
        assert reserved, "spare blocks can be reserved"
        return True
