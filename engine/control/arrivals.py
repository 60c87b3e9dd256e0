"""Arrivals: which requests are accepted. Rejection changes nothing."""

from collections import Counter
from typing import TYPE_CHECKING

from engine.errors import ContextTooLong, InvalidRequest, Overloaded
from engine.request import Request, RequestSpec, State, Times
from engine.step import RequestId

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.control.images import Images
    from engine.control.settings import SchedulerSettings
    from engine.cost.live import LiveCost
    from engine.kv.cache import KVCache
    from engine.pool import RequestPool

WAITING = State.WAITING  # bound once (see engine.pool)


class Queue:
    """What schedulers with one queue have in common: its bound is for the requests in all pools,
    and requests are numbered together."""

    def __init__(self) -> None:
        self.next_request_id = 0
        self.pools: list[RequestPool] = []

    @property
    def num_waiting(self) -> int:
        """Waiting requests, without those in the background."""
        return sum([pool.count(WAITING) - pool.background.num_waiting for pool in self.pools])

    @property
    def waiting_tokens(self) -> int:
        """Their prompt and output tokens."""
        return sum([pool.waiting_tokens - pool.background.waiting_tokens for pool in self.pools])

    def has_share_left(self, client: str) -> bool:
        """Whether this client has less than an equal share of the waiting requests. Walks all live
        requests, so it is for a full queue."""
        specs = (r.spec for pool in self.pools for r in pool if r.state is WAITING)
        waiting = Counter(spec.client for spec in specs if not spec.is_background)
        return waiting[client] * len(waiting.keys() | {client}) < waiting.total()


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
        self.queue: Queue
        self.join(Queue())

    def join(self, queue: Queue) -> None:
        """Share a queue with other schedulers. No request has arrived yet."""
        self.queue = queue
        queue.pools.append(self._pool)

    def accept(
        self, spec: RequestSpec, now: float, block_hashes: "Sequence[bytes]" = ()
    ) -> Request:
        """The request, which is now in the pool and under the policy; its first `block_hashes` may
        be known. Raises as `IterationScheduler.add`."""
        assert spec.prompt, "a prompt has at least one token"
        assert (spec.max_tokens == 0) == spec.is_pooling, "max_tokens is 0 only without output"
        self.check_fits(len(spec.prompt), spec.max_tokens)
        self._images.check(spec)
        self._check_room(1, spec.own_len, spec.client)
        request = Request(RequestId(self.queue.next_request_id), spec, Times(now))
        request.block_hashes = [*block_hashes] or self.known_hashes(spec)
        has_deadline = spec.ttft_deadline is not None or spec.deadline is not None
        num_tokens = self._kv.search.num_to_compute(request) if has_deadline else len(spec.prompt)
        self._pool.policy.validate(spec, num_tokens, now)
        self.queue.next_request_id += 1
        self._pool.add(request)
        self._pool.policy.arrive(request, now)
        if spec.media:
            self._images.arrive(request)
        return request

    def known_hashes(self, spec: RequestSpec) -> list[bytes]:
        """The hashes that are known of the request's first blocks, as those of the one behind which
        it goes on: to hash their tokens again would take several plans."""
        if spec.behind is None:
            return list(spec.caching.known_hashes)
        return spec.behind.block_hashes[: spec.shared_len // self._kv.block_size]

    def check_fits(self, prompt_len: int, max_tokens: int) -> None:
        """Raise `ContextTooLong` if so many tokens exceed the context or the KV cache."""
        limit, longest = self._settings.max_model_len, self._kv.longest_request
        if prompt_len + max_tokens > limit:
            raise ContextTooLong(prompt_len, max_tokens, limit, "maximum context length")
        if prompt_len + max(0, max_tokens - 1) > longest:
            raise ContextTooLong(prompt_len, max_tokens, longest, "KV cache size")

    def check_group(self, num_requests: int, num_tokens: int, client: str) -> None:
        """Raise `InvalidRequest` if the queue can never hold so many requests, with so many prompt
        tokens in all, at once; and `Overloaded` if it has no room for them now: to build them and
        add some would be in vain."""
        bound, tokens = self._settings.max_queue_requests, self._settings.max_queue_tokens
        if num_requests > bound or (num_requests > 1 and num_tokens > tokens):
            raise InvalidRequest(
                f"The request has {num_requests} choices with {num_tokens} prompt tokens in "
                f"all; the queue holds at most {bound} requests and {tokens} tokens."
            )
        pools = self.queue.pools
        seats = self._settings.max_batch_size * len(pools)
        num_waiting = num_requests - (seats - sum([pool.num_admitted for pool in pools]))
        if num_waiting > 0:
            self._check_room(num_waiting, num_tokens * num_waiting // num_requests, client)

    def _check_room(self, num_requests: int, num_tokens: int, client: str) -> None:
        """Raise `Overloaded` if the queue has no room for so many requests. It has as much room
        again for clients that have less than their share of it, so that no client keeps the others
        out."""
        if self._has_room(num_requests, num_tokens) or (
            self._has_room(num_requests, num_tokens, 2) and self.queue.has_share_left(client)
        ):
            return
        waiting, tokens = self.queue.num_waiting, self.queue.waiting_tokens
        raise Overloaded(
            f"The queue is full: {waiting} requests with {tokens} tokens are waiting.",
            retry_after=self._cost.seconds_for(tokens) / len(self.queue.pools),
        )

    def _has_room(self, num_requests: int, num_tokens: int, factor: int = 1) -> bool:
        """Whether so many times the queue's limits have room for these requests."""
        waiting, tokens = self.queue.num_waiting, self.queue.waiting_tokens + num_tokens
        settings = self._settings
        return waiting + num_requests <= factor * settings.max_queue_requests and (
            not waiting or tokens <= factor * settings.max_queue_tokens
        )
