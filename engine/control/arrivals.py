"""Arrivals: which requests are accepted. Rejection changes nothing."""

from typing import TYPE_CHECKING

from engine.errors import ContextTooLong, InvalidRequest, Overloaded
from engine.request import Request, RequestSpec, State
from engine.step import RequestId

if TYPE_CHECKING:
    from engine.control.images import Images
    from engine.control.settings import SchedulerSettings
    from engine.cost.live import LiveCost
    from engine.kv.cache import KVCache
    from engine.pool import RequestPool


class Arrivals:
    """Checks new requests against the context, the KV cache, the queue and their deadlines."""

    def __init__(
        self,
        settings: "SchedulerSettings",
        kv: "KVCache",
        pool: "RequestPool",
        cost: "LiveCost",
        images: "Images",
    ) -> None:
        self._settings = settings
        self._kv = kv
        self._pool = pool
        self._cost = cost
        self._images = images
        self._next_request_id = 0

    def accept(self, spec: RequestSpec, now: float) -> Request:
        """The request, which is now in the pool and under the policy. Raises as
        `IterationScheduler.add`."""
        assert spec.prompt, "a prompt has at least one token"
        assert (spec.max_tokens == 0) == spec.is_pooling, "max_tokens is 0 only without output"
        self.check_fits(len(spec.prompt), spec.max_tokens)
        self._images.check(spec)
        self._check_queue(spec.own_len)
        request = Request(RequestId(self._next_request_id), spec, arrived_at=now)
        if spec.behind is not None:  # hashing its tokens again would take several plans
            num_full = spec.shared_len // self._kv.block_size
            request.block_hashes = spec.behind.block_hashes[:num_full]
        elif spec.known_hashes:
            request.block_hashes = list(spec.known_hashes)
        has_deadline = spec.ttft_deadline is not None or spec.deadline is not None
        num_tokens = self._kv.search.num_to_compute(request) if has_deadline else len(spec.prompt)
        self._pool.policy.validate(spec, num_tokens, now)
        self._next_request_id += 1
        self._pool.add(request)
        self._pool.policy.arrive(request, now)
        if spec.media:
            self._images.arrive(request)
        return request

    def check_fits(self, prompt_len: int, max_tokens: int) -> None:
        """Raise `ContextTooLong` if so many tokens exceed the context or the KV cache."""
        limit, longest = self._settings.max_model_len, self._kv.longest_request
        if prompt_len + max_tokens > limit:
            raise ContextTooLong(prompt_len, max_tokens, limit, "maximum context length")
        if prompt_len + max(0, max_tokens - 1) > longest:
            raise ContextTooLong(prompt_len, max_tokens, longest, "KV cache size")

    def check_group(self, num_requests: int, num_tokens: int) -> None:
        """Raise `InvalidRequest` if the queue can never hold so many requests, with so many prompt
        tokens in all, at once."""
        bound, tokens = self._settings.max_queue_requests, self._settings.max_queue_tokens
        if num_requests > bound or (num_requests > 1 and num_tokens > tokens):
            raise InvalidRequest(
                f"The request has {num_requests} choices with {num_tokens} prompt tokens in "
                f"all; the queue holds at most {bound} requests and {tokens} tokens."
            )

    def _check_queue(self, prompt_len: int) -> None:
        background = self._pool.background
        waiting = self._pool.count(State.WAITING) - background.num_waiting
        tokens = self._pool.waiting_tokens - background.waiting_tokens
        too_many = waiting >= self._settings.max_queue_requests
        if too_many or (waiting and tokens + prompt_len > self._settings.max_queue_tokens):
            raise Overloaded(
                f"The queue is full: {waiting} requests with {tokens} tokens are waiting.",
                retry_after=self._cost.seconds_for(tokens),
            )
