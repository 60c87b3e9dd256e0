"""Engine: the only code that awaits iterations (Orca, algorithm 1).

Plan and submit while fewer than `depth` iterations are in flight; apply the result of the oldest
when its future is done; otherwise wait for one event, which arrivals, futures and the loss of a
worker set. When a worker is lost all live requests wait again with the tokens they have produced,
and new requests are rejected until the worker has restarted.

When the first request of an idle engine arrives, those that arrive within the next `GATHER_TURNS`
turns of the event loop share its first iteration. Otherwise they would wait for all of its prompt,
and be computed in pieces beside its decodes.

With lookahead, one more iteration in flight is allowed for one that is planned before its input
tokens are known. It is used only if all stages are busy, or if no other request could run.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from engine.control.scheduler import IterationScheduler
from engine.errors import (
    EngineError,
    RequestCancelled,
    ShuttingDown,
    StepFailed,
    Unavailable,
    WorkerLost,
)
from engine.image_sender import ImageSender
from engine.iteration import Iteration
from engine.media import ImagePixels
from engine.policy.base import Policy
from engine.ports import Clock, StepExecutor, StepFuture, StoreLookup
from engine.request import ENDS_AT_ONCE, Abort, Request, RequestSpec
from engine.store_lookups import StoreLookups
from engine.stream import DeadlineTimer, LiveStreams, TokenStream, Wakeup
from engine.turns import Turn

logger = logging.getLogger(__name__)

RESTART_SECONDS = 5.0  # expected duration of a restart, until one has been measured
MIN_RETRY_SECONDS = 1.0
# Requests sent at once are accepted, read and added in different turns: of 8 over HTTP, one turn
# gathered 1 to 3 in most of 16 bursts, 4 turns 5 to 8, 8 turns all in 14. An empty turn takes 2 µs.
GATHER_TURNS = 8
READY_SECONDS = 30.0  # if no iteration returns for so long, the engine is not ready
SAVE_SECONDS = 30.0  # for saving cached blocks before the server ends


class Flight(NamedTuple):
    """An iteration, and its result when it has returned."""

    iteration: Iteration
    future: StepFuture


class InFlight:
    """The iterations that the workers have, the oldest first: at most `depth`, of which
    `lookahead` are planned before the tokens of the one before are known. `on_change` is called
    when one returns or a worker is lost."""

    def __init__(
        self, executor: StepExecutor, depth: int, lookahead: int, on_change: Callable[[], object]
    ) -> None:
        self._executor = executor
        self._depth = depth
        self._lookahead = lookahead
        self._on_change = on_change
        self._flights: deque[Flight] = deque()
        executor.watch(on_change)

    def __len__(self) -> int:
        return len(self._flights)

    @property
    def has_room(self) -> bool:
        """Whether another iteration may be submitted."""
        return len(self._flights) < self._depth and self._executor.is_alive

    @property
    def has_died_idle(self) -> bool:
        """Whether a worker was lost while no step was in flight, whose future would report it."""
        return not self._flights and not self._executor.is_alive

    @property
    def has_returned(self) -> bool:
        """Whether the oldest iteration has returned."""
        return bool(self._flights) and self._flights[0].future.done()

    def plan(self, scheduler: IterationScheduler, now: float) -> Iteration | None:
        """The next iteration: of requests in no iteration, else planned ahead of the oldest."""
        if not self._lookahead or not self._flights:
            return scheduler.plan(now)
        oldest = self._flights[0].iteration
        if len(self._flights) >= self._depth - self._lookahead:
            return scheduler.plan(now, oldest)
        return scheduler.plan(now) or scheduler.plan(now, oldest)

    def submit(self, iteration: Iteration) -> None:
        """Send an iteration to the workers."""
        future = self._executor.submit(iteration.step)
        future.add_done_callback(self._returned)
        self._flights.append(Flight(iteration, future))

    def pop(self) -> Flight:
        """Take the oldest iteration out."""
        return self._flights.popleft()

    def put_back(self, flight: Flight) -> None:
        """The oldest iteration was lost with all others."""
        self._flights.appendleft(flight)

    def lose(self) -> list[Iteration]:
        """No iteration will return."""
        lost = [flight.iteration for flight in self._flights]
        self._flights.clear()
        return lost

    def _returned(self, future: StepFuture) -> None:
        self._on_change()


class Engine:
    """Serves requests as token streams, and runs the iterations that compute them."""

    def __init__(
        self,
        scheduler: IterationScheduler,
        executor: StepExecutor,
        clock: Clock,
        lookahead: int = 0,
        depth: int | None = None,
        lookup: StoreLookup | None = None,
        turn: Turn | None = None,
        send_pixels: Callable[[ImagePixels], Awaitable[object]] | None = None,
    ) -> None:
        """Keep at most `depth` iterations in flight, `executor.depth` if it is None; `lookahead` of
        them are for iterations planned ahead. Before a request starts, `lookup` finds what a shared
        store has of its prompt. With a `turn`, engines of other models compute on the same cores,
        too. `send_pixels` sends a piece of an image to the workers."""
        self.scheduler = scheduler
        scheduler.looks_ahead = lookahead > 0
        self._executor = executor
        self._clock = clock
        self._turn = turn
        self.engines = (self,)  # its model's engines, here one (see `engine.replicas`)
        self._streams = LiveStreams()
        self._deadlines = DeadlineTimer(scheduler, clock, self._streams)
        self._wakeup = Wakeup()
        depth = executor.depth if depth is None else depth
        self._in_flight = InFlight(executor, depth, lookahead, self._wakeup.set)
        self._lookups: StoreLookups | None = None
        if lookup is not None:
            self._lookups = StoreLookups(scheduler.kv.search, lookup, self._wakeup.set)
        self._sender = send_pixels and ImageSender(scheduler.images, send_pixels, self._wakeup.set)
        self._idle = asyncio.Event()
        self._idle.set()
        self._is_saved = asyncio.Event()  # whether no iteration is in flight
        self._returned_at = clock()
        self.is_draining = False  # it finishes its live requests and accepts no new ones
        self._lost_at: float | None = None  # while the worker restarts
        self._restart_seconds = RESTART_SECONDS
        self.failure: str | None = None  # why no worker can be restarted
        self.failed = asyncio.Event()  # set once `failure` is
        self.on_planned: Callable[[], object] = _ignore  # after each plan, and after a loss
        if turn is not None:
            turn.wake = self._wakeup.set

    def __repr__(self) -> str:
        return f"Engine(in_flight={len(self._in_flight)}, {self.scheduler!r})"

    @property
    def is_ready(self) -> bool:
        """Whether a new request would be served: iterations return, or no request is live."""
        if self.rejection() is not None:
            return False
        return self._idle.is_set() or self._clock() - self._returned_at < READY_SECONDS

    @property
    def is_generating(self) -> bool:
        """Whether a request has begun to be computed and has not ended."""
        return bool(self.scheduler.pool.started)

    def rejection(self) -> Unavailable | None:
        """The error with which a new request is rejected now; None if it is accepted."""
        if self.is_draining:
            return ShuttingDown()
        if self.failure is not None:
            return Unavailable(self.failure)
        if self._lost_at is None and self._executor.is_alive:
            return None
        now = self._clock()
        since = now if self._lost_at is None else self._lost_at
        left = since + self._restart_seconds - now
        return Unavailable("The worker is restarting.", max(left, MIN_RETRY_SECONDS))

    def check_fits(self, prompt_len: int, max_tokens: int) -> None:
        """Raise `ContextTooLong` if so many tokens exceed the context or the KV cache."""
        self.scheduler.arrivals.check_fits(prompt_len, max_tokens)

    def check_group(self, num_requests: int, num_tokens: int, client: str) -> None:
        """Raise as `Arrivals.check_group`."""
        self.scheduler.arrivals.check_group(num_requests, num_tokens, client)

    def stream(self, spec: RequestSpec, *, reports_progress: bool = False) -> TokenStream:
        """The output of a new request, which is added when the stream's `with` is entered."""
        return TokenStream(spec, self, reports_progress=reports_progress)

    def open_stream(self, stream: TokenStream, block_hashes: Sequence[bytes] = ()) -> Request:
        """Add the stream's request, or raise as `TokenStream.__enter__` does."""
        rejection = self.rejection()
        if rejection is not None:
            raise rejection
        now = self._clock()
        request = self.scheduler.add(stream.spec, now, block_hashes)
        self._serve(stream, request, now)
        return request

    def hand_over(self, request: Request, to: "Engine") -> None:
        """Let another engine of the model go on with a waiting request."""
        stream = self._streams.remove(request)
        assert stream is not None, "its request is live"
        now = self._clock()
        self.scheduler.hand_over(request, to.scheduler, now)
        to._serve(stream, request, now)  # an engine, too

    def _serve(self, stream: TokenStream, request: Request, now: float) -> None:
        """Run a request, which the scheduler has, for its stream."""
        if self._idle.is_set():
            self._returned_at = now
            self._idle.clear()
        stream.owner = self
        self._streams.add(stream, request)
        if stream.spec.deadline is not None:
            self._deadlines.set()
        if self._lookups is not None:
            self._lookups.begin(request)
        self._wakeup.set()

    def close_stream(self, stream: TokenStream, reason: Abort) -> None:
        """End the stream's request if it is still live."""
        if self._streams.remove(stream.request) is not None:
            self.scheduler.cancel(stream.request, reason, self._clock())
            self._wakeup.set()

    def cancel(self, label: str, tenant: str | None) -> int:
        """End the live requests with this label and tenant (None: of every tenant); their readers
        get `RequestCancelled`. Returns their number; `ENDS_AT_ONCE` end now, the others later."""
        named = self._streams.requests(
            lambda spec: spec.label == label and tenant in (None, spec.tenant)
        )
        error = RequestCancelled(f"The request {label} was cancelled.")
        self._streams.end(named[:ENDS_AT_ONCE], self.scheduler, error, self._clock())
        if len(named) > ENDS_AT_ONCE:
            asyncio.get_running_loop().call_soon(self.cancel, label, tenant)
        self._wakeup.set()
        return len(named)

    def fail_lora(self, lora_id: int, error: EngineError) -> None:
        """End the live requests of a LoRA adapter that the workers do not have any more; their
        readers get the error."""
        named = self._streams.requests(
            lambda spec: spec.lora is not None and spec.lora.lora_id == lora_id
        )
        self._streams.end(named, self.scheduler, error, self._clock())

    async def run(self) -> None:
        """Run iterations until cancelled."""
        while True:
            self._wakeup.clear()
            self._submit()
            if not self.scheduler.pool:
                self._idle.set()
            self._is_saved.clear() if self._in_flight else self._is_saved.set()
            if self._in_flight.has_returned:
                if not self._apply(self._in_flight.pop()):
                    await self._recover()
            elif self._in_flight.has_died_idle and self.failure is None:
                await self._recover()
            else:
                was_idle = self._idle.is_set()
                await self._wakeup.wait()
                for _ in range(GATHER_TURNS if was_idle else 0):
                    await asyncio.sleep(0)

    async def drain(self, seconds: float | None) -> None:
        """Reject new requests, wait at most so long for the live ones, and end the rest. None: wait
        until all have ended."""
        self.is_draining = True
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            error = ShuttingDown("The server shut down before the response was complete.")
            self._streams.wake(self.scheduler.fail_all(error, self._clock()))
        if self.scheduler.kv.saves and self.failure is None:
            self._wakeup.set()
            self._is_saved.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SAVE_SECONDS):
                    await self._is_saved.wait()

    def switch(self, policy: Policy) -> None:
        """Continue under another policy, which is empty; no request is lost or restarted."""
        self.scheduler.switch(policy, self._clock())

    def _submit(self) -> None:
        self._deadlines.expire()
        scheduler, must_wait = self.scheduler, False
        while self._in_flight.has_room:
            if self._turn is not None and (scheduler.pool or scheduler.kv.saves):
                must_wait = not self._turn.take()
                if must_wait:
                    break
            iteration = self._in_flight.plan(scheduler, self._clock())
            if iteration is None and not scheduler.pool and not self._in_flight:
                iteration = scheduler.save()
            if self._sender is not None:
                self._sender.wake()
            if iteration is None:
                break
            self._in_flight.submit(iteration)
        if self._turn is not None and not self._in_flight:
            self._turn.give()
            if must_wait:
                self._turn.take()
        self.on_planned()

    def _apply(self, oldest: Flight) -> bool:
        """Commit or fail an iteration that returned; False if the worker is lost."""
        self._returned_at = now = self._clock()
        try:
            result = oldest.future.result()
        except StepFailed as error:
            logger.error("iteration %d failed: %s", oldest.iteration.step.step_id, error)
            self._streams.wake(self.scheduler.fail(oldest.iteration, error, now))
        except WorkerLost as error:
            logger.error("worker lost: %s", error)
            self._in_flight.put_back(oldest)
            return False
        else:
            if oldest.iteration.only_saves:
                self.scheduler.kv.finish(oldest.iteration, result)
                return True
            self._streams.deliver(self.scheduler.commit(oldest.iteration, result, now))
            self._streams.report_progress(oldest.iteration.requests, now)
        return True

    async def _recover(self) -> None:
        """Reset the KV cache, restart the workers, and let all live requests be recomputed."""
        lost = self._in_flight.lose()
        if self._turn is not None:
            self._turn.give()
        self._lost_at = self._clock()
        self._streams.wake(self.scheduler.lose_device(lost, self._lost_at))
        self.on_planned()
        try:
            await self._executor.restart()
        except EngineError as error:
            logger.error("no worker can be restarted: %s", error)
            self.failure = f"The server has no worker: {error}"
            self.failed.set()
            self.on_planned()
            self._streams.wake(self.scheduler.fail_all(Unavailable(self.failure), self._clock()))
        else:
            self._restart_seconds = self._clock() - self._lost_at
        self._lost_at = None
        self._returned_at = self._clock()


def _ignore() -> None:
    """There is no other engine of the model."""
