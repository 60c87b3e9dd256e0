"""Engine: the only place that awaits iterations (Orca, algorithm 1).

Plan and submit while fewer than `depth` iterations are in flight; settle the oldest
when its future is done; sleep on one event that arrivals, futures and the death of a worker set.
That death is survived: all live requests go back to waiting with what they have produced, and
until the worker is back new ones are refused.

With lookahead one place in flight more is for an iteration planned before the tokens that it
goes on from are known. All stages are busy before it is used, or nobody else is there to run.
"""

import asyncio
import logging
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from engine.errors import EngineError, RequestCancelled, StepFailed, Unavailable, WorkerLost
from engine.request import Abort, Request, RequestSpec
from engine.stream import TokenStream

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.control.scheduler import IterationScheduler
    from engine.iteration import Iteration
    from engine.ports import Clock, Policy, StepExecutor, StepFuture
    from engine.step import RequestId

logger = logging.getLogger(__name__)

RESTART_SECONDS = 5.0  # what a restart is expected to take, until one has been seen
LEAST_RETRY_SECONDS = 1.0


class _IterationInFlight(NamedTuple):
    iteration: "Iteration"
    future: "StepFuture"


class Engine:
    """Lends token streams and runs the iterations behind them."""

    def __init__(
        self,
        scheduler: "IterationScheduler",
        executor: "StepExecutor",
        clock: "Clock",
        ready_seconds: float = 30.0,
        lookahead: int = 0,
        depth: int | None = None,
    ) -> None:
        """At most `depth` iterations are in flight, all that the executor takes if it is None;
        `lookahead` of these places are for iterations planned ahead."""
        self.scheduler = scheduler
        self._executor = executor
        self._clock = clock
        self._ready_seconds = ready_seconds
        self._lookahead = lookahead
        self._depth = executor.depth if depth is None else depth
        self._streams: dict[RequestId, TokenStream] = {}
        self._in_flight: deque[_IterationInFlight] = deque()
        self._news = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._settled_at = clock()
        self._is_draining = False
        self._lost_at: float | None = None  # while the worker restarts
        self._restart_seconds = RESTART_SECONDS
        self._gone: str | None = None  # why there will be no worker any more
        executor.watch(self._news.set)

    def __repr__(self) -> str:
        return f"Engine(in_flight={len(self._in_flight)}, {self.scheduler!r})"

    @property
    def is_ready(self) -> bool:
        """Whether a new request would be served: iterations return, or nobody waits for one."""
        if self.rejection() is not None:
            return False
        return self._idle.is_set() or self._clock() - self._settled_at < self._ready_seconds

    def rejection(self) -> Unavailable | None:
        """Why a new request is refused now, if it is."""
        if self._is_draining:
            return Unavailable("The server is shutting down.")
        if self._gone is not None:
            return Unavailable(self._gone)
        if self._lost_at is None and self._executor.is_alive:
            return None
        now = self._clock()
        since = now if self._lost_at is None else self._lost_at
        left = since + self._restart_seconds - now
        return Unavailable("The worker is restarting.", max(left, LEAST_RETRY_SECONDS))

    def check_fits(self, prompt_len: int, max_tokens: int) -> None:
        """Raise `ContextTooLong` if so many tokens can never be served."""
        self.scheduler.check_fits(prompt_len, max_tokens)

    def check_group(self, prompt_lens: "Sequence[int]") -> None:
        """Raise `InvalidRequest` if requests with such prompts can never all wait at once."""
        self.scheduler.check_group(prompt_lens)

    def stream(self, spec: RequestSpec) -> TokenStream:
        """A lease on the answer to `spec`; nothing happens before its `with` is entered."""
        return TokenStream(spec, self)

    def lend(self, stream: TokenStream) -> Request:
        """Accept the stream's request (see `TokenStream.__enter__`)."""
        refusal = self.rejection()
        if refusal is not None:
            raise refusal
        now = self._clock()
        request = self.scheduler.add(stream.spec, now)
        if self._idle.is_set():
            self._settled_at = now
            self._idle.clear()
        self._streams[request.request_id] = stream
        self._news.set()
        return request

    def take_back(self, stream: TokenStream, reason: Abort) -> None:
        """End the stream's request if it still lives."""
        if self._streams.pop(stream.request.request_id, None) is not None:
            self.scheduler.cancel(stream.request, reason, self._clock())
            self._news.set()

    def cancel(self, label: str, tenant: str) -> int:
        """End the live requests of that name and tenant, and tell who reads them. How many."""
        named = [
            stream.request
            for stream in self._streams.values()
            if stream.spec.label == label and stream.spec.tenant == tenant
        ]
        now = self._clock()
        for request in named:
            request.error = RequestCancelled(f"The request {label} was cancelled by its caller.")
            self.scheduler.cancel(request, Abort.EXPLICIT, now)
        self._wake(named)
        self._news.set()
        return len(named)

    async def run(self) -> None:
        """Serve until cancelled."""
        while True:
            self._news.clear()
            self._submit()
            if not self.scheduler.pool:
                self._idle.set()
            if self._in_flight and self._in_flight[0].future.done():
                if not self._settle(self._in_flight.popleft()):
                    await self._recover()
            elif self._has_died_idle:
                await self._recover()
            else:
                await self._news.wait()

    async def drain(self, seconds: float) -> None:
        """Take no new requests; wait for the live ones, at most so long, and end the rest."""
        self._is_draining = True
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            error = Unavailable("The server shut down before the answer was complete.")
            self._wake(self.scheduler.fail_all(error, self._clock()))

    def switch(self, policy: "Policy") -> None:
        """Go on under another policy (see `IterationScheduler.switch`)."""
        self.scheduler.switch(policy, self._clock())

    @property
    def _has_died_idle(self) -> bool:
        """Whether a worker is to be replaced whose death no step in flight will tell."""
        return not self._in_flight and not self._executor.is_alive and self._gone is None

    def _submit(self) -> None:
        self._wake(self.scheduler.expire(self._clock()))
        while self._executor.is_alive and len(self._in_flight) < self._depth:
            iteration = self._plan(self._clock())
            if iteration is None:
                return
            future = self._executor.submit(iteration.step)
            future.add_done_callback(lambda _: self._news.set())
            self._in_flight.append(_IterationInFlight(iteration, future))

    def _plan(self, now: float) -> "Iteration | None":
        """The next iteration: of requests that are there, else of those in the oldest flight."""
        if not self._lookahead or not self._in_flight:
            return self.scheduler.plan(now)
        oldest = self._in_flight[0].iteration
        if len(self._in_flight) >= self._depth - self._lookahead:
            return self.scheduler.plan(now, oldest)
        return self.scheduler.plan(now) or self.scheduler.plan(now, oldest)

    def _settle(self, oldest: _IterationInFlight) -> bool:
        """Commit or fail an iteration that came back; False if the device is gone."""
        self._settled_at = now = self._clock()
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
            for request, token, logprobs in self.scheduler.commit(oldest.iteration, result, now):
                if token is None:
                    self._wake([request])
                    continue
                self._streams[request.request_id].push(token, logprobs)
                if request.finish is not None:
                    del self._streams[request.request_id]
        return True

    async def _recover(self) -> None:
        """Forget the device, restart the workers, and let everybody be computed again."""
        lost = [flight.iteration for flight in self._in_flight]
        self._in_flight.clear()
        self._lost_at = self._clock()
        self._wake(self.scheduler.lose_device(lost, self._lost_at))
        try:
            await self._executor.restart()
        except EngineError as error:
            logger.error("no worker any more: %s", error)
            self._gone = f"The server has no worker: {error}"
            self._wake(self.scheduler.fail_all(Unavailable(self._gone), self._clock()))
        else:
            self._restart_seconds = self._clock() - self._lost_at
        self._lost_at = None
        self._settled_at = self._clock()

    def _wake(self, ended: list[Request]) -> None:
        for request in ended:
            stream = self._streams.pop(request.request_id, None)
            if stream is not None:
                stream.wake()
