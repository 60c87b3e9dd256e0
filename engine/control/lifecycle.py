"""Which requests are accepted (a rejection changes nothing), and every way in which one ends: it
frees its KV and is reported ended once.

A request that is in no iteration ends at once. One that is in flight, or whose KV is being
swapped, is LEAVING until its last iteration has returned, since workers may touch its KV until
then. If a worker dies no request ends, but those in flight are suspects: each runs in iterations
without another suspect until it has produced a token. Suspects with fewer crashes run first, and
one with `max_crashes` crashes in a row fails.
"""

from collections import Counter
from collections.abc import Collection, Sequence

from engine.control.images import Images
from engine.control.settings import SchedulerSettings
from engine.cost.live import LiveCost
from engine.errors import (
    ContextTooLong,
    DeadlineExceeded,
    EngineError,
    InvalidRequest,
    Overloaded,
    WorkerLost,
)
from engine.iteration import Iteration, Observer
from engine.kv.cache import KVCache
from engine.pool import RequestPool
from engine.request import ENDS_AT_ONCE, Abort, Move, Request, RequestSpec, State, Times
from engine.step import RequestId

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
        settings: SchedulerSettings,
        kv: KVCache,
        pool: RequestPool,
        cost: LiveCost,
        images: Images,
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

    def accept(self, spec: RequestSpec, now: float, block_hashes: Sequence[bytes] = ()) -> Request:
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


LEAVING = State.LEAVING  # bound once, for the hot path (see engine.pool)


class Lifecycle:
    """Ends requests. `num_committed` counts the iterations that returned, failed ones included."""

    def __init__(
        self, kv: KVCache, pool: RequestPool, observer: Observer, max_crashes: int
    ) -> None:
        self.num_committed = 0
        self._kv = kv
        self._pool = pool
        self._observer = observer
        self._max_crashes = max_crashes
        self._suspects: set[Request] = set()
        self._cancelled: dict[Request, int] = {}  # until they end; `num_committed` at that time

    @property
    def has_suspect_in_flight(self) -> bool:
        """Whether another suspect has to wait, so that a crash can be attributed to this one."""
        return any(suspect.num_in_flight for suspect in self._suspects)

    @property
    def least_crashes(self) -> int:
        """The fewest crashes of a suspect that is not in the background. Suspects with more wait
        for it, so that they are not counted in a crash which it causes."""
        if not self._suspects:
            return self._max_crashes
        suspects = [r.num_crashes for r in self._suspects if not r.spec.is_background]
        return min(suspects, default=self._max_crashes)

    def clear(self, request: Request) -> None:
        """A suspect has produced a token: it is no suspect any more."""
        request.num_crashes = 0
        self._suspects.discard(request)

    def withdraw(self, request: Request) -> None:
        """A waiting request goes to another scheduler."""
        self._suspects.discard(request)

    def adopt(self, request: Request) -> None:
        """A waiting request has come from another scheduler, where it may have become a suspect."""
        if request.num_crashes:
            self._suspects.add(request)

    def leave(self, request: Request, now: float) -> None:
        """The request's end is decided: it ends now, or after its last iteration in flight."""
        if request.num_in_flight:
            self._pool.move(request, Move.LEAVE)
        else:
            self._end(request, now)

    def iteration_returned(self, request: Request, now: float) -> None:
        """An iteration of a leaving request has returned; after the last one it ends."""
        if not request.num_in_flight:
            self._end(request, now)

    def fail(self, request: Request, error: EngineError, now: float) -> None:
        """End the request with an error, unless its end is already decided."""
        if request.state is LEAVING:
            self.iteration_returned(request, now)
        else:
            request.error = error
            self.leave(request, now)

    def fail_all(self, error: EngineError, now: float) -> list[Request]:
        """End all live requests with an error. Returns those whose end was not decided before."""
        self._observer.given_up(now)
        requests = [request for request in self._pool if request.state is not LEAVING]
        for request in requests:
            if request.num_in_flight:
                request.error = error
                self.cancel(request, Abort.SHUTDOWN, now)
            else:
                self.fail(request, error, now)
        return requests

    def cancel(self, request: Request, reason: Abort, now: float) -> None:
        """End the request from outside, unless it has ended or its end is already decided."""
        if request.state.is_terminal or request.state is LEAVING:
            return
        request.abort = reason
        self._cancelled[request] = self.num_committed
        self._observer.cancelled(request, now)
        self.leave(request, now)

    def expire(self, now: float) -> list[Request]:
        """End requests whose deadline has passed, at most `ENDS_AT_ONCE`, and return them."""
        overdue = [r for r in self._pool.overdue(now, ENDS_AT_ONCE) if r.state is not LEAVING]
        for request in overdue:
            request.error = DeadlineExceeded(
                f"The request's deadline of {request.spec.deadline:g} s passed after "
                f"{request.produced} output tokens."
            )
            self.cancel(request, Abort.DEADLINE, now)
        return overdue

    def lose_device(self, in_flight: Collection[Iteration], now: float) -> list[Request]:
        """All KV is lost: all requests wait again, to be recomputed from prompt and output.

        Those in flight become suspects; one that was in flight at `max_crashes` crashes in a row
        fails. Returns the requests that ended.
        """
        self._observer.worker_lost(now)
        ended: list[Request] = []
        for iteration in in_flight:
            for request in self._kv.finish(iteration, None).leaving:
                self.iteration_returned(request, now)
        for request in dict.fromkeys(r for iteration in in_flight for r in iteration.requests):
            request.num_in_flight = 0
            request.num_crashes += 1
            self._suspects.add(request)
            if request.num_crashes >= self._max_crashes or request.state is LEAVING:
                error = WorkerLost("A worker died each time while it computed this request.")
                self.fail(request, error, now)
                ended.append(request)
        for request in self._pool:
            if request.state is not State.WAITING:
                request.reset_to(0)
                self._pool.move(request, Move.LOSE)
        self._kv.reset()
        return ended

    def _end(self, request: Request, now: float) -> None:
        """The one way out: free the KV, leave pool and policy, report the end once."""
        self._kv.release(request)
        self._pool.move(request, request.final_move)
        self._pool.policy.leave(request, now)
        self._suspects.discard(request)
        request.times.ended_at = now
        if (cancelled_at := self._cancelled.pop(request, None)) is not None:
            self._observer.freed(request, self.num_committed - cancelled_at)
        self._observer.ended(request, now)
