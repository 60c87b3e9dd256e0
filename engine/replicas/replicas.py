"""Replicas: engines of one model, which serve requests as one engine does.

    request ──place──▶ replica's queue ──▶ its iterations
                            │
                            └──moves while it waits──▶ another replica's queue

A request is placed where the sum of all completion times grows least (`engine.replicas.placement`).
While it waits it moves to a replica that could start it now, if they grow less there. It does not
move once it has KV, except that a replica which has lost its workers has none: then all of its
requests wait, and move as others do, to be recomputed from their tokens.
"""

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import NamedTuple, TypeAlias

from engine.control.lifecycle import Queue
from engine.control.scheduler import IterationScheduler
from engine.errors import EngineError, Unavailable
from engine.kv.prefix import extend_hashes
from engine.loop import Engine
from engine.ports import Clock
from engine.replicas.placement import Load, Place, growth, least_growth
from engine.replicas.replica import Replica
from engine.request import Abort, Request, RequestSpec, State, Times
from engine.step import RequestId
from engine.stream import TokenStream

MAX_CANDIDATES = 8  # waiting requests of a replica, of which one moves
WAITING = State.WAITING
MAX_HASHES = 512  # blocks of a prompt that are looked for in all caches, about 1 ms of hashing
ServingEngine: TypeAlias = "Engine | Replicas"  # what serves a model


class Waiting(NamedTuple):
    """A request that may move. `growth`: of the sum of all completion times, if it does not."""

    growth: float
    request: Request
    giver: Replica


class Moves:
    """Moves requests between replicas. `num_moved` counts them."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = replicas
        self.num_moved = 0

    def balance(self, planned: Replica, now: float) -> None:
        """A replica has planned, or has lost its workers. If requests wait there, each replica with
        a free seat gets the one that gains most by it, and all move if it cannot be restarted; if
        none waits, it gets one itself. Other pairs of replicas are as they were."""
        if planned.engine.failure is not None:
            self._empty(planned, now)
        givers = [each for each in self._replicas if each.pool.count(WAITING)]
        takers: Sequence[Replica] = (planned,)
        if planned in givers:
            takers, givers = self._replicas, [planned]
        waiting: list[Waiting] | None = None
        for taker in takers if givers else ():
            if taker.has_seat:
                if waiting is None:
                    waiting = [each for giver in givers for each in self._waiting(giver, now)]
                if self._take(taker, waiting, now):
                    waiting = None

    def _empty(self, giver: Replica, now: float) -> None:
        takers = [each for each in self._replicas if each.engine.failure is None]
        for request in list(giver.movable(now)):
            taker = min(takers, key=lambda each: (each.delay(now), len(each.pool)))
            self._move(request, giver, taker)

    def _waiting(self, giver: Replica, now: float) -> Iterator[Waiting]:
        """Requests that may move. Each waits behind those that stand before it."""
        for place, request in enumerate(list(islice(giver.movable(now), MAX_CANDIDATES))):
            before = giver.delay(now) * place / giver.pool.count(WAITING)
            wait, others = giver.restart_seconds + before, len(giver.pool) - 1
            yield Waiting(growth(wait, giver.prefill(request), others), request, giver)

    def _take(self, taker: Replica, waiting: Iterable[Waiting], now: float) -> bool:
        """Move the request to a replica that gains most by it. Returns whether there is one."""
        delay, most, best = taker.delay(now), 0.0, None
        for each in waiting:
            if each.growth - delay > most:
                there = growth(delay, taker.prefill(each.request), len(taker.pool))
                if (gain := each.growth - there) > most and taker.may_start(each.request):
                    most, best = gain, each
        if best is None:
            return False
        self._move(best.request, best.giver, taker)
        return True

    def _move(self, request: Request, giver: Replica, taker: Replica) -> None:
        self.num_moved += 1
        giver.engine.hand_over(request, taker.engine)
        taker.arrive(request)


class Replicas:
    """The engines of one model. What it has in common with `Engine` means the same."""

    def __init__(
        self, replicas: Sequence[Replica], clock: Clock, place: Place = least_growth
    ) -> None:
        """No request has arrived at any of them yet. `place` chooses among those that accept a
        request."""
        self._replicas = tuple(replicas)
        self._clock = clock
        self._place = place
        self.engines = tuple(replica.engine for replica in replicas)
        self.moves = Moves(self._replicas)
        self.failed = asyncio.Event()  # set once no replica can be restarted
        queue = Queue()
        for replica in self._replicas:
            replica.scheduler.arrivals.join(queue)
            replica.engine.on_planned = partial(self._balance, replica)

    def __repr__(self) -> str:
        return f"Replicas({', '.join(map(repr, self.engines))})"

    @property
    def scheduler(self) -> IterationScheduler:
        """The scheduler of the first replica, whose settings and sizes are those of all."""
        return self.engines[0].scheduler

    @property
    def is_ready(self) -> bool:
        """Whether a new request would be served."""
        return any(engine.is_ready for engine in self.engines)

    @property
    def is_generating(self) -> bool:
        """Whether a request has begun to be computed and has not ended."""
        return any(engine.is_generating for engine in self.engines)

    @property
    def is_draining(self) -> bool:
        """Whether live requests are finished and no new ones are accepted."""
        return self.engines[0].is_draining

    @property
    def failure(self) -> str | None:
        """Why no replica can be restarted."""
        return self.engines[0].failure if self.failed.is_set() else None

    def rejection(self) -> Unavailable | None:
        """The error with which a new request is rejected now; None if a replica accepts it."""
        rejections: list[Unavailable] = []
        for engine in self.engines:
            rejection = engine.rejection()
            if rejection is None:
                return None
            rejections.append(rejection)
        restarting = [each for each in rejections if each.retry_after is not None]
        return min(restarting, key=lambda each: each.retry_after or 0.0, default=rejections[0])

    def check_fits(self, prompt_len: int, max_tokens: int) -> None:
        """Raise `ContextTooLong` if so many tokens exceed the context or a replica's KV cache."""
        self.engines[0].check_fits(prompt_len, max_tokens)

    def check_group(self, num_requests: int, num_tokens: int, client: str) -> None:
        """Raise as `Arrivals.check_group`."""
        self.engines[0].check_group(num_requests, num_tokens, client)

    def stream(self, spec: RequestSpec, *, reports_progress: bool = False) -> TokenStream:
        """The output of a new request, which is placed when the stream's `with` is entered."""
        return TokenStream(spec, self, reports_progress=reports_progress)

    def open_stream(self, stream: TokenStream) -> Request:
        """Add the stream's request to a replica, or raise as `TokenStream.__enter__` does."""
        accepting = [each for each in self._replicas if each.engine.rejection() is None]
        if not accepting:
            rejection = self.rejection()
            assert rejection is not None, "no replica accepts a request"
            raise rejection
        now, probe = self._clock(), self._probe(stream.spec)
        loads = [Load(each.delay(now), len(each.pool), each.prefill(probe)) for each in accepting]
        chosen = accepting[self._place(loads)]
        request = chosen.engine.open_stream(stream, probe.block_hashes)
        chosen.arrive(request)
        return request

    def _probe(self, spec: RequestSpec) -> Request:
        """A request that is looked for in the caches, and is never in a pool."""
        scheduler = self.scheduler
        probe = Request(RequestId(-1), spec, Times(0.0))
        probe.block_hashes = scheduler.arrivals.known_hashes(spec)
        if scheduler.settings.reuses_prefixes:
            size = scheduler.kv.block_size
            num_blocks = min(probe.num_tokens // size, MAX_HASHES)
            extend_hashes(probe, size, num_blocks)
        return probe

    def close_stream(self, stream: TokenStream, reason: Abort) -> None:
        """A stream is closed by the engine that has its request."""
        raise AssertionError("an open stream belongs to an engine")

    def cancel(self, label: str, tenant: str | None) -> int:
        """End the live requests with this label and tenant, see `Engine.cancel`."""
        return sum(engine.cancel(label, tenant) for engine in self.engines)

    def fail_lora(self, lora_id: int, error: EngineError) -> None:
        """End the live requests of a LoRA adapter that the workers of a replica do not have."""
        for engine in self.engines:
            engine.fail_lora(lora_id, error)

    async def run(self) -> None:
        """Run the iterations of all replicas until cancelled."""
        async with asyncio.TaskGroup() as group:
            for engine in self.engines:
                group.create_task(engine.run())

    async def drain(self, seconds: float | None) -> None:
        """Reject new requests, wait at most so long for the live ones, and end the rest."""
        await asyncio.gather(*(engine.drain(seconds) for engine in self.engines))

    def _balance(self, planned: Replica) -> None:
        """A replica has planned, or has lost its workers. While the server drains no request moves,
        since a replica whose requests have ended ends."""
        if self.is_draining:
            return
        if all(engine.failure is not None for engine in self.engines):
            self.failed.set()
        else:
            self.moves.balance(planned, self._clock())
