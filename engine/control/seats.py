"""SeatBound: the seats and tokens of an iteration. Prefills leave a token for each decode."""

from typing import TYPE_CHECKING

from engine.request import Request, State

if TYPE_CHECKING:
    from engine.control.batch_builder import BatchBuilder
    from engine.control.settings import SchedulerSettings
    from engine.pool import RequestPool

READY = State.READY  # bound once (see engine.pool)


class SeatBound:
    """How many tokens of a request the seats and tokens of the batch allow."""

    def __init__(self, settings: "SchedulerSettings", pool: "RequestPool") -> None:
        self._chunks_prompts = settings.chunks_prompts
        self._pool = pool

    def tokens(self, batch: "BatchBuilder", request: Request, num_tokens: int) -> int:
        """How many of the next `num_tokens` tokens of a started request fit; 0 if none."""
        if request.num_crashes and batch.excludes_suspect(request):
            return 0
        if num_tokens > 1 and self._chunks_prompts:
            num_tokens = min(num_tokens, self.room(batch, request))
        return max(0, num_tokens) if num_tokens <= batch.tokens_left else 0

    def room(self, batch: "BatchBuilder", request: Request) -> int:
        """The tokens that are left for the prompt of a request beside the decodes."""
        return batch.tokens_left - self.num_others(batch, request)

    def has_room(self, batch: "BatchBuilder", request: Request) -> bool:
        """Whether a request without KV could be in the batch."""
        needed = self.num_others(batch, request) + 1 if self._chunks_prompts else request.unplanned
        return batch.tokens_left >= needed

    def num_ready(self, batch: "BatchBuilder") -> int:
        """Ready requests, and those that may be planned ahead, which were not considered yet."""
        return self._pool.count(READY) - batch.num_skipped + len(batch.ahead)

    def num_others(self, batch: "BatchBuilder", request: Request) -> int:
        """The other ready requests for which a prefill of `request` leaves a token: at most one per
        seat, and none for background requests unless it is one itself."""
        num_ready, background = self.num_ready(batch) - request.is_started, self._pool.background
        if background and not request.spec.is_background:
            num_ready -= background.num_ready
            num_ready -= sum(r.spec.is_background for r in batch.ahead)
        return min(num_ready, batch.seats - 1)
