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
from typing import TYPE_CHECKING, NamedTuple

from engine.ahead_of_start import AheadOfStart
from engine.errors import EngineError, RequestCancelled, StepFailed, Unavailable, WorkerLost
from engine.image_sender import ImageSender
from engine.request import Abort, Request, RequestSpec
from engine.stream import TokenStream, Wakeup

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engine.control.scheduler import IterationScheduler
    from engine.iteration import Iteration
    from engine.media import ImagePixels
    from engine.policy.port import Policy
    from engine.ports import Clock, StepExecutor, StepFuture, StoreLookup
    from engine.step import ReadAhead, RequestId
    from engine.turns import Turn

logger = logging.getLogger(__name__)

RESTART_SECONDS = 5.0  # expected duration of a restart, until one has been measured
MIN_RETRY_SECONDS = 1.0
# Requests sent at once are accepted, read and added in different turns: of 8 over HTTP, one turn
# gathered 1 to 3 in most of 16 bursts, 4 turns 5 to 8, 8 turns all in 14. An empty turn takes 2 µs.
GATHER_TURNS = 8
SAVE_SECONDS = 30.0  # for saving cached blocks before the server ends


class _IterationInFlight(NamedTuple):
    iteration: "Iteration"
    future: "StepFuture"


class Engine:
    """Serves requests as token streams, and runs the iterations that compute them."""

    def __init__(
        self,
        scheduler: "IterationScheduler",
        executor: "StepExecutor",
        clock: "Clock",
        ready_seconds: float = 30.0,
        lookahead: int = 0,
        depth: int | None = None,
        read_ahead: "Callable[[ReadAhead], object] | None" = None,
        lookup: "StoreLookup | None" = None,
        turn: "Turn | None" = None,
        send_pixels: "Callable[[ImagePixels], object] | None" = None,
    ) -> None:
        """Keep at most `depth` iterations in flight, `executor.depth` if it is None; `lookahead` of
        them are for iterations planned ahead. `is_ready` turns False if no iteration returns for
        `ready_seconds`. `read_ahead` is called with what workers should read from the disk for a
        request that has to wait, and again when it has ended. Before a request starts, `lookup`
        finds what a shared store has of its prompt. With a `turn`, engines of other models
        compute on the same cores, too. `send_pixels` sends a piece of an image to the workers."""
        self.scheduler = scheduler
        scheduler.looks_ahead = lookahead > 0
        self._executor = executor
        self._clock = clock
        self._turn = turn
        self._ready_seconds = ready_seconds
        self._lookahead = lookahead
        self._depth = executor.depth if depth is None else depth
        self._streams: dict[RequestId, TokenStream] = {}
        self._reporting: dict[RequestId, TokenStream] = {}  # until the prompt is computed
        self._in_flight: deque[_IterationInFlight] = deque()
        self._wakeup = Wakeup()
        self._ahead = AheadOfStart(scheduler.kv.search, read_ahead, lookup, self._wakeup.set)
        self._sender = send_pixels and ImageSender(scheduler.images, send_pixels, self._wakeup.set)
        self._idle = asyncio.Event()
        self._idle.set()
        self._is_saved = asyncio.Event()  # whether no iteration is in flight
        self._returned_at = clock()
        self._is_draining = False
        self._lost_at: float | None = None  # while the worker restarts
        self._restart_seconds = RESTART_SECONDS
        self._deadline_timer: asyncio.TimerHandle | None = None  # for the earliest deadline
        self.failure: str | None = None  # why no worker can be restarted
        self.failed = asyncio.Event()  # set once `failure` is
        self.on_planned: Callable[[], object] = _ignore  # after each plan, and after a loss
        executor.watch(self._wakeup.set)
        if turn is not None:
            turn.wake = self._wakeup.set

    def __repr__(self) -> str:
        return f"Engine(in_flight={len(self._in_flight)}, {self.scheduler!r})"

    @property
    def is_ready(self) -> bool:
        """Whether a new request would be served: iterations return, or no request is live."""
        if self.rejection() is not None:
            return False
        return self._idle.is_set() or self._clock() - self._returned_at < self._ready_seconds

    @property
    def is_generating(self) -> bool:
        """Whether a request has begun to be computed and has not ended."""
        return bool(self.scheduler.pool.started)

    @property
    def engines(self) -> "tuple[Engine, ...]":
        """Itself, as the only engine of its model (see `engine.replicas`)."""
        return (self,)

    @property
    def is_draining(self) -> bool:
        """Whether the engine finishes its live requests and accepts no new ones."""
        return self._is_draining

    def rejection(self) -> Unavailable | None:
        """The error with which a new request is rejected now; None if it is accepted."""
        if self._is_draining:
            return Unavailable("The server is shutting down.")
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

    def check_group(self, num_requests: int, num_tokens: int) -> None:
        """Raise `InvalidRequest` if the queue can never hold so many requests, with so many prompt
        tokens in all, at once."""
        self.scheduler.arrivals.check_group(num_requests, num_tokens)

    def stream(self, spec: RequestSpec, *, reports_progress: bool = False) -> TokenStream:
        """The output of a new request, which is added when the stream's `with` is entered."""
        return TokenStream(spec, self, reports_progress=reports_progress)

    def open_stream(self, stream: TokenStream, block_hashes: "Sequence[bytes]" = ()) -> Request:
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
        stream = self._streams.pop(request.request_id)
        self._reporting.pop(request.request_id, None)
        self._ahead.leave(request)
        now = self._clock()
        self.scheduler.hand_over(request, to.scheduler, now)
        to._serve(stream, request, now)  # an engine, too

    def _serve(self, stream: TokenStream, request: Request, now: float) -> None:
        """Run a request, which the scheduler has, for its stream."""
        if self._idle.is_set():
            self._returned_at = now
            self._idle.clear()
        stream.owner = self
        self._streams[request.request_id] = stream
        if stream.reports_progress and not request.output:
            self._reporting[request.request_id] = stream
        if stream.spec.deadline is not None:
            self._watch_deadlines()
        self._ahead.arrive(request, must_wait=bool(self._in_flight))
        self._wakeup.set()

    def close_stream(self, stream: TokenStream, reason: Abort) -> None:
        """End the stream's request if it is still live."""
        self._ahead.leave(stream.request)
        if self._streams.pop(stream.request.request_id, None) is not None:
            self.scheduler.cancel(stream.request, reason, self._clock())
            self._wakeup.set()

    def cancel(self, label: str, tenant: str | None) -> int:
        """End the live requests with this label and tenant (None: of every tenant); their readers
        get `RequestCancelled`. Returns their number."""
        named = [
            stream.request
            for stream in self._streams.values()
            if stream.spec.label == label and tenant in (None, stream.spec.tenant)
        ]
        now = self._clock()
        for request in named:
            request.error = RequestCancelled(f"The request {label} was cancelled.")
            self.scheduler.cancel(request, Abort.EXPLICIT, now)
        self._wake(named)
        self._wakeup.set()
        return len(named)

    def fail_lora(self, lora_id: int, error: EngineError) -> None:
        """End the live requests of a LoRA adapter that the workers do not have any more; their
        readers get the error."""
        streams = self._streams.values()
        named = [s.request for s in streams if s.spec.lora and s.spec.lora.lora_id == lora_id]
        for request in named:
            request.error = error
            self.scheduler.cancel(request, Abort.EXPLICIT, self._clock())
        self._wake(named)

    async def run(self) -> None:
        """Run iterations until cancelled."""
        while True:
            self._wakeup.clear()
            self._submit()
            if not self.scheduler.pool:
                self._idle.set()
            self._is_saved.clear() if self._in_flight else self._is_saved.set()
            if self._in_flight and self._in_flight[0].future.done():
                if not self._apply(self._in_flight.popleft()):
                    await self._recover()
            elif self._has_died_idle:
                await self._recover()
            else:
                was_idle = self._idle.is_set()
                await self._wakeup.wait()
                for _ in range(GATHER_TURNS if was_idle else 0):
                    await asyncio.sleep(0)

    async def drain(self, seconds: float | None) -> None:
        """Reject new requests, wait at most so long for the live ones, and end the rest. None: wait
        until all have ended."""
        self._is_draining = True
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            error = Unavailable("The server shut down before the response was complete.")
            self._wake(self.scheduler.fail_all(error, self._clock()))
        if self.scheduler.kv.saves and self.failure is None:
            self._wakeup.set()
            self._is_saved.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SAVE_SECONDS):
                    await self._is_saved.wait()

    def switch(self, policy: "Policy") -> None:
        """Continue under another policy, which is empty; no request is lost or restarted."""
        self.scheduler.switch(policy, self._clock())

    @property
    def _has_died_idle(self) -> bool:
        """Whether a worker was lost while no step was in flight, whose future would report it."""
        return not self._in_flight and not self._executor.is_alive and self.failure is None

    def _watch_deadlines(self) -> None:
        """Expire requests when their deadline passes, also while no iteration returns."""
        if self._deadline_timer is not None:
            self._deadline_timer.cancel()
            self._deadline_timer = None
        deadline = self.scheduler.pool.next_deadline
        if deadline is not None:
            delay = max(0.0, deadline - self._clock())
            loop = asyncio.get_running_loop()
            self._deadline_timer = loop.call_later(delay, self._expire)

    def _expire(self) -> None:
        self._wake(self.scheduler.expire(self._clock()))
        self._watch_deadlines()

    def _submit(self) -> None:
        if self.scheduler.pool.next_deadline is not None:
            self._wake(self.scheduler.expire(self._clock()))
        scheduler, must_wait = self.scheduler, False
        while len(self._in_flight) < self._depth and self._executor.is_alive:
            if self._turn is not None and (scheduler.pool or scheduler.kv.saves):
                must_wait = not self._turn.take()
                if must_wait:
                    break
            iteration = self._plan(self._clock())
            if iteration is None and not self.scheduler.pool and not self._in_flight:
                iteration = self.scheduler.save()
            if self._sender is not None:
                self._sender.wake()
            if iteration is None:
                break
            future = self._executor.submit(iteration.step)
            future.add_done_callback(self._returned)
            self._in_flight.append(_IterationInFlight(iteration, future))
        if self._turn is not None and not self._in_flight:
            self._turn.give()
            if must_wait:
                self._turn.take()
        self.on_planned()

    def _returned(self, future: "StepFuture") -> None:
        self._wakeup.set()

    def _plan(self, now: float) -> "Iteration | None":
        """The next iteration: of requests in no iteration, else planned ahead of the oldest."""
        if not self._lookahead or not self._in_flight:
            return self.scheduler.plan(now)
        oldest = self._in_flight[0].iteration
        if len(self._in_flight) >= self._depth - self._lookahead:
            return self.scheduler.plan(now, oldest)
        return self.scheduler.plan(now) or self.scheduler.plan(now, oldest)

    def _apply(self, oldest: _IterationInFlight) -> bool:
        """Commit or fail an iteration that returned; False if the worker is lost."""
        self._returned_at = now = self._clock()
        try:
            result = oldest.future.result()
        except StepFailed as error:
            logger.error("iteration %d failed: %s", oldest.iteration.step.step_id, error)
            self._wake(self.scheduler.fail(oldest.iteration, error, now))
        except WorkerLost as error:
            logger.error("worker lost: %s", error)
            self._in_flight.appendleft(oldest)
            return False
        else:
            if oldest.iteration.only_saves:
                self.scheduler.kv.finish(oldest.iteration, result)
                return True
            streams = self._streams
            finished: list[Request] = []
            for request, token, logprobs in self.scheduler.commit(oldest.iteration, result, now):
                if token is None:
                    self._wake([request])
                    continue
                streams[request.request_id].push(token, logprobs)
                if request.finish is not None:
                    finished.append(request)
            for request in finished:
                streams.pop(request.request_id, None)
            if self._reporting:
                self._report_progress(oldest.iteration.requests, now)
        return True

    def _report_progress(self, requests: "Sequence[Request]", now: float) -> None:
        for request in requests:
            stream = self._reporting.get(request.request_id)
            if stream is not None and not request.output:
                stream.progressed(now)
        live = self._streams.keys()
        ended = [i for i, each in self._reporting.items() if i not in live or each.request.output]
        for request_id in ended:
            del self._reporting[request_id]

    async def _recover(self) -> None:
        """Reset the KV cache, restart the workers, and let all live requests be recomputed."""
        lost = [flight.iteration for flight in self._in_flight]
        self._in_flight.clear()
        if self._turn is not None:
            self._turn.give()
        self._lost_at = self._clock()
        self._wake(self.scheduler.lose_device(lost, self._lost_at))
        self.on_planned()
        try:
            await self._executor.restart()
        except EngineError as error:
            logger.error("no worker can be restarted: %s", error)
            self.failure = f"The server has no worker: {error}"
            self.failed.set()
            self.on_planned()
            self._wake(self.scheduler.fail_all(Unavailable(self.failure), self._clock()))
        else:
            self._restart_seconds = self._clock() - self._lost_at
        self._lost_at = None
        self._returned_at = self._clock()

    def _wake(self, ended: list[Request]) -> None:
        for request in ended:
            stream = self._streams.pop(request.request_id, None)
            if stream is not None:
                stream.wake()


def _ignore() -> None:
    """There is no other engine of the model."""
