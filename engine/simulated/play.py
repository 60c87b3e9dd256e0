"""Runs the arrivals of a trace through a real `Engine`, and reports the outcome of each."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine.control.scheduler import IterationScheduler
from engine.errors import EngineError, RequestCancelled
from engine.loop import Engine
from engine.ports import StepExecutor
from engine.request import Abort, Request, RequestSpec
from engine.simulated.trace import Arrival
from engine.simulated.virtual_loop import run_virtual
from engine.step import TokenLogprobs
from engine.stream import TokenStream


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished request: seconds from its arrival to its first and last token."""

    arrival: Arrival
    ttft: float
    jct: float
    num_preemptions: int
    num_cached: int = 0  # prompt tokens found in the prefix cache
    admitted_at: float = 0.0  # when it was first admitted, in the clock's seconds

    @property
    def normalized_latency(self) -> float:
        """Orca's metric: seconds per output token, end to end."""
        return self.jct / self.arrival.output_len

    @property
    def tpot(self) -> float | None:
        """Seconds per output token after the first; None if there is only one token."""
        if self.arrival.output_len == 1:
            return None
        return (self.jct - self.ttft) / (self.arrival.output_len - 1)


class RequestLost(NamedTuple):
    """A request that was rejected, or that was accepted and did not finish."""

    arrival: Arrival
    error: EngineError


LONG = 1e9  # seconds
OnAccepted = Callable[[Request, "Arrival"], object]


class PlayResult(NamedTuple):
    """The outcomes of finished requests in order of arrival, and the requests that were lost."""

    outcomes: list[Outcome]
    lost: list[RequestLost]


def play(
    scheduler: IterationScheduler, executor: StepExecutor, arrivals: Sequence[Arrival]
) -> list[Outcome]:
    """Run every arrival to its last token; outcomes in order of arrival. Deterministic.

    Raises the `EngineError` of the first request that was rejected or lost.
    """
    played = play_all(scheduler, executor, arrivals)
    for lost in played.lost:
        raise lost.error
    return played.outcomes


def play_all(
    scheduler: IterationScheduler,
    executor: StepExecutor,
    arrivals: Sequence[Arrival],
    on_accepted: OnAccepted | None = None,
    lookahead: int = 0,
) -> PlayResult:
    """Like `play`, for loads at which some requests may be rejected.

    `arrivals` are sorted by time. `on_accepted` is called with each request and its arrival.
    """
    return run_virtual(play_async(scheduler, executor, arrivals, on_accepted, lookahead))


async def play_async(
    scheduler: IterationScheduler,
    executor: StepExecutor,
    arrivals: Sequence[Arrival],
    on_accepted: OnAccepted | None = None,
    lookahead: int = 0,
) -> PlayResult:
    """Like `play_all`, on the running event loop: a virtual one, or a real one together with a
    real executor, which measures the real engine."""
    clock = asyncio.get_running_loop().time
    engine = Engine(scheduler, executor, clock, lookahead=lookahead)
    clients = _Clients(engine, len(arrivals), on_accepted)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(engine.run())
        await clients.send(arrivals)
        await clients.all_ended.wait()
        await engine.drain(LONG)  # iterations of cancelled requests may still be in flight
        running.cancel()
    return clients.result()


class _Clients:
    """All clients of a trace: sends each request at its time and records its end."""

    def __init__(self, engine: Engine, size: int, on_accepted: OnAccepted | None) -> None:
        self.all_ended = asyncio.Event()
        self._engine = engine
        self._num_open = size
        self._on_accepted = on_accepted
        self._outcomes: dict[int, Outcome] = {}
        self._lost: dict[int, RequestLost] = {}

    async def send(self, arrivals: Sequence[Arrival]) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        if not arrivals:
            self.all_ended.set()
        for index, arrival in enumerate(arrivals):
            at = began + arrival.at
            if at > loop.time():
                await asyncio.sleep(at - loop.time())
            on_end = self._recording_end(index, arrival)
            stream = _FinishStream(arrival.spec(index), self._engine, on_end)
            try:
                stream.__enter__()
            except EngineError as error:
                self._record_end(index, arrival, error)
                continue
            if self._on_accepted is not None:
                self._on_accepted(stream.request, arrival)
            if arrival.patience is not None:
                loop.call_at(at + arrival.patience, stream.disconnect)

    def result(self) -> PlayResult:
        finished = [self._outcomes[index] for index in sorted(self._outcomes)]
        return PlayResult(finished, [self._lost[index] for index in sorted(self._lost)])

    def _recording_end(self, index: int, arrival: Arrival) -> Callable[[Request], None]:
        def on_end(request: Request) -> None:
            self._record_end(index, arrival, request.error or outcome_of(arrival, request))

        return on_end

    def _record_end(self, index: int, arrival: Arrival, end: Outcome | EngineError) -> None:
        if isinstance(end, Outcome):
            self._outcomes[index] = end
        else:
            self._lost[index] = RequestLost(arrival, end)
        self._num_open -= 1
        if not self._num_open:
            self.all_ended.set()


class _FinishStream(TokenStream):
    """A stream that only reports the end of its request, so that tokens wake no reader.

    It is closed when the request ends or when the client disconnects.
    """

    def __init__(
        self, spec: RequestSpec, engine: Engine, on_end: Callable[[Request], None]
    ) -> None:
        super().__init__(spec, engine)
        self._on_end = on_end

    def push(self, token: int, logprobs: TokenLogprobs | None = None) -> bool:
        if self.request.finish is not None:
            self._on_end(self.request)
        return False

    def wake(self) -> None:
        self._on_end(self.request)

    def disconnect(self) -> None:
        """The client disconnects after `Arrival.patience` seconds."""
        request = self.request
        if not request.state.is_terminal and request.abort is None:
            request.error = RequestCancelled("the client disconnected")
            self.close(Abort.CLIENT_GONE)
            self._on_end(request)


def outcome_of(arrival: Arrival, request: Request) -> Outcome:
    """The outcome of a finished request."""
    times = request.times
    pooled_at = times.ended_at if request.spec.is_pooling else None
    first_at, last_at = times.first_token_at or pooled_at, times.last_token_at or pooled_at
    assert first_at is not None, "a finished request has a first token or a vector"
    assert last_at is not None, "a finished request has a last token or a vector"
    assert times.admitted_at is not None, "a finished request was admitted"
    return Outcome(
        arrival=arrival,
        ttft=first_at - times.arrived_at,
        jct=last_at - times.arrived_at,
        num_preemptions=request.setbacks.num_preemptions,
        num_cached=request.num_cached,
        admitted_at=times.admitted_at,
    )
