"""Play a trace through a real `Engine` in virtual time, and say how every request fared."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from engine.errors import EngineError, RequestCancelled
from engine.loop import Engine
from engine.request import Abort, Request, RequestSpec
from engine.simulated.virtual_loop import run_virtual
from engine.stream import TokenStream

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.control.scheduler import IterationScheduler
    from engine.ports import StepExecutor
    from engine.simulated.trace import Arrival
    from engine.step import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished request: seconds from arrival to its first and last token, and its size."""

    arrival: "Arrival"
    ttft: float
    jct: float
    num_preemptions: int
    num_cached: int = 0  # tokens of the prompt that need not be computed
    admitted_at: float = 0.0  # the moment at which it was first given KV

    @property
    def normalized_latency(self) -> float:
        """Orca's metric: seconds per output token, end to end."""
        return self.jct / self.arrival.output_len

    @property
    def tpot(self) -> float | None:
        """Seconds per output token after the first; None for an answer of one token."""
        if self.arrival.output_len == 1:
            return None
        return (self.jct - self.ttft) / (self.arrival.output_len - 1)


class RequestLost(NamedTuple):
    """A request that was refused, or accepted and not finished."""

    arrival: "Arrival"
    error: EngineError


LONG = 1e9  # seconds
Accepted = Callable[[Request, "Arrival"], object]


class Played(NamedTuple):
    """How everybody fared: the finished in order of arrival, and the others."""

    outcomes: list[Outcome]
    lost: list[RequestLost]


def play(
    scheduler: "IterationScheduler", executor: "StepExecutor", arrivals: "Sequence[Arrival]"
) -> list[Outcome]:
    """Every arrival to its last token, in order of arrival. Same inputs, same answer.

    Raises the `EngineError` of the first request that was refused or lost.
    """
    played = play_all(scheduler, executor, arrivals)
    for lost in played.lost:
        raise lost.error
    return played.outcomes


def play_all(
    scheduler: "IterationScheduler",
    executor: "StepExecutor",
    arrivals: "Sequence[Arrival]",
    accepted: "Accepted | None" = None,
    lookahead: int = 0,
) -> Played:
    """As `play`, for loads at which some requests may be refused. Arrivals are by time; `accepted`
    hears which of them became which request."""
    return run_virtual(play_out(scheduler, executor, arrivals, accepted, lookahead))


async def play_out(
    scheduler: "IterationScheduler",
    executor: "StepExecutor",
    arrivals: "Sequence[Arrival]",
    accepted: "Accepted | None" = None,
    lookahead: int = 0,
) -> Played:
    """As `play_all`, in the time of the running loop: on a real one with a real executor, this is
    the engine that serves, and what is measured is real."""
    clock = asyncio.get_running_loop().time
    engine = Engine(scheduler, executor, clock, lookahead=lookahead)
    audience = _Audience(engine, len(arrivals), accepted)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(engine.run())
        await audience.arrive(arrivals)
        await audience.is_served.wait()
        await engine.drain(LONG)  # iterations of which nobody wants anything are still in flight
        running.cancel()
    return audience.played()


class _Audience:
    """All clients as one: asks in the order of arrival, and notes each end."""

    def __init__(self, engine: Engine, size: int, accepted: "Accepted | None") -> None:
        self.is_served = asyncio.Event()
        self._engine = engine
        self._left = size
        self._accepted = accepted
        self._fared: dict[int, Outcome] = {}
        self._lost: dict[int, RequestLost] = {}

    async def arrive(self, arrivals: "Sequence[Arrival]") -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        if not arrivals:
            self.is_served.set()
        for index, arrival in enumerate(arrivals):
            at = began + arrival.at
            if at > loop.time():
                await asyncio.sleep(at - loop.time())
            stream = _PatientClient(arrival.spec(index), self._engine, self._watch(index, arrival))
            try:
                stream.__enter__()
            except EngineError as error:
                self._note(index, arrival, error)
                continue
            if self._accepted is not None:
                self._accepted(stream.request, arrival)
            if arrival.patience is not None:
                loop.call_at(at + arrival.patience, stream.leave)

    def played(self) -> Played:
        finished = [self._fared[index] for index in sorted(self._fared)]
        return Played(finished, [self._lost[index] for index in sorted(self._lost)])

    def _watch(self, index: int, arrival: "Arrival") -> "Callable[[Request], None]":
        def ended(request: Request) -> None:
            self._note(index, arrival, request.error or outcome(arrival, request))

        return ended

    def _note(self, index: int, arrival: "Arrival", end: Outcome | EngineError) -> None:
        if isinstance(end, Outcome):
            self._fared[index] = end
        else:
            self._lost[index] = RequestLost(arrival, end)
        self._left -= 1
        if not self._left:
            self.is_served.set()


class _PatientClient(TokenStream):
    """A reader that is told of the end only: a million tokens need not wake a million readers.

    Its lease ends with its request, or when its caller leaves.
    """

    def __init__(
        self, spec: RequestSpec, engine: Engine, ended: "Callable[[Request], None]"
    ) -> None:
        super().__init__(spec, engine)
        self._ended = ended

    def push(self, token: int, logprobs: "TokenLogprobs | None" = None) -> None:
        if self.request.finish is not None:
            self._ended(self.request)

    def wake(self) -> None:
        self._ended(self.request)

    def leave(self) -> None:
        """The caller has waited long enough."""
        request = self.request
        if not request.state.is_terminal and request.abort is None:
            request.error = RequestCancelled("its caller left")
            self.close(Abort.CLIENT_GONE)
            self._ended(request)


def outcome(arrival: "Arrival", request: Request) -> Outcome:
    """How a request fared that has finished."""
    assert request.first_token_at is not None, "a finished request has a first token"
    assert request.last_token_at is not None, "and a last one"
    assert request.admitted_at is not None, "and was admitted"
    return Outcome(
        arrival=arrival,
        ttft=request.first_token_at - request.arrived_at,
        jct=request.last_token_at - request.arrived_at,
        num_preemptions=request.num_preemptions,
        num_cached=request.num_cached,
        admitted_at=request.admitted_at,
    )
