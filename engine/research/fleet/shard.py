"""Shard: the replicas of a fleet that one process advances, from epoch to epoch.

Replicas do not depend on each other within an epoch, so the figures do not depend on how they are
divided among processes. A replica is made when its first request arrives. Only replicas with an
event in an epoch are touched in it: a heap has the next event of each.
"""

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from math import floor, inf, log
from typing import NamedTuple

from engine.control.scheduler import IterationScheduler
from engine.errors import EngineError
from engine.replicas.replica import QueueDelay
from engine.request import Request, State
from engine.research.leaping.replica import Replica
from engine.research.leaping.run import build_replica
from engine.simulated.record import Recorder
from engine.simulated.replay import RecordedOutputs, RecordedRequest
from engine.simulated.run import Setup, is_recorded
from engine.simulated.trace import Arrival

GAP_RATIO = 1.01  # the ratio of two edges of the bins that count inter-token latencies
_LOG_RATIO = log(GAP_RATIO)


class LoadReport(NamedTuple):
    """The load of a replica at the end of an epoch, as it reports it to the router.

    `tokens` counts those produced up to the replica's last event. `delay` is the forecast by how
    many seconds a request that arrives now ends later than on an idle replica; 0 if none is made.
    """

    replica: int
    num_live: int  # requests
    waiting: int  # requests without KV
    tokens: int  # prompt and output tokens of live requests
    waiting_tokens: int  # tokens of requests without KV
    delay: float
    throughput: float = 0.0  # recent tokens/s of prompts and outputs; 0 if no request has KV
    usage: float = 0.0  # share of the KV slots that live requests hold


class Begun(NamedTuple):
    """A request whose replica has ended; `number` is its number in the trace. Times in seconds."""

    number: int
    arrived_at: float
    produced: int  # output tokens
    first_token_at: float | None
    last_token_at: float | None

    def rest(self, arrival: Arrival, now: float) -> Arrival:
        """What is left of it at `now`: its tokens are computed again."""
        lengths = arrival.prompt_len + self.produced, arrival.output_len - self.produced
        return replace(arrival, at=now, prompt_len=lengths[0], output_len=lengths[1])


class Routed(NamedTuple):
    """A request of the trace for a replica; one that goes on there has begun elsewhere, and arrives
    `at` a time of its own."""

    number: int
    replica: int
    begun: Begun | None = None
    at: float = 0.0


@dataclass(slots=True)
class ShardResult:
    """What the replicas of a shard did. One item per finished request: its number in the trace,
    times in seconds, and prompt tokens found in the cache."""

    numbers: "array[int]" = field(default_factory=lambda: array("q"))
    ttft: "array[float]" = field(default_factory=lambda: array("d"))
    jct: "array[float]" = field(default_factory=lambda: array("d"))
    cached: "array[int]" = field(default_factory=lambda: array("q"))
    lost: list[int] = field(default_factory=list)  # numbers of rejected requests
    pauses: list[float] = field(default_factory=list)  # seconds between tokens of two replicas
    gaps: Counter[int] = field(default_factory=Counter)  # by the exponent of `GAP_RATIO`
    busy: dict[int, float] = field(default_factory=dict)  # seconds, by replica
    finished: dict[int, int] = field(default_factory=dict)  # requests, by replica
    num_iterations: int = 0
    num_preempted: int = 0


class GapCounter(Recorder):
    """Counts inter-token latencies in bins of 1 %, and samples no state."""

    def __init__(self, counts: Counter[int]) -> None:
        super().__init__(period=inf)
        self.next_sample = inf
        self._counts = counts

    def add_gap(self, seconds: float, count: int) -> None:
        self._counts[floor(log(seconds) / _LOG_RATIO) if seconds > 0.0 else -10_000] += count


class _Member:
    """A replica of the fleet with its forecast."""

    def __init__(
        self, number: int, setup: Setup, result: ShardResult, *, is_recorded: bool
    ) -> None:
        self.number = number
        self.recorder = GapCounter(result.gaps)
        self.outputs = RecordedOutputs() if is_recorded else None
        self._result = result
        self._trace: dict[int, int] = {}  # numbers in the trace, by request
        self._begun: dict[int, Begun] = {}  # requests that go on here, by those numbers
        self.num_ended = 0
        self.replica: Replica = build_replica(setup, self.recorder, self.outputs, self._ended)
        self._model = setup.cost
        self._delay = QueueDelay(self.replica.scheduler.cost, setup.settings.max_batch_size)

    def add(self, number: int, arrival: Arrival, begun: Begun | None) -> None:
        """A request of the trace arrives; it may be rejected."""
        self.replica.advance(arrival.at)
        try:
            request = self.replica.add(arrival.spec(number), arrival.at)
        except EngineError:
            self._result.lost.append(number)
            return
        self._trace[request.request_id] = number
        if begun is not None:
            self._begun[number] = begun
        if self.outputs is not None and isinstance(arrival, RecordedRequest):
            self.outputs.accepted(request, arrival)

    def _ended(self, request: Request) -> None:
        result = self._result
        self.num_ended += 1
        times = request.times
        assert times.first_token_at is not None, "a finished request has a first token"
        assert times.last_token_at is not None, "a finished request has a last token"
        number = self._trace.pop(request.request_id)
        begun = self._since(number, request)
        assert begun.first_token_at is not None, "it has one since then"
        result.numbers.append(number)
        result.ttft.append(begun.first_token_at - begun.arrived_at)
        result.jct.append(times.last_token_at - begun.arrived_at)
        if (earlier := self._begun.pop(number, None)) and earlier.last_token_at is not None:
            result.pauses.append(times.first_token_at - earlier.last_token_at)
            self.recorder.add_gap(result.pauses[-1], 1)
        result.cached.append(request.num_cached)
        self.recorder.forget(request)
        self._delay.ended(request, self.replica.now)

    def _since(self, number: int, request: Request) -> Begun:
        """What the request has had, also on earlier replicas."""
        times, produced = request.times, len(request.output)
        first, last = times.first_token_at, times.last_token_at
        if (begun := self._begun.get(number)) is None:
            return Begun(number, times.arrived_at, produced, first, last)
        return begun._replace(
            produced=begun.produced + produced,
            first_token_at=first if begun.first_token_at is None else begun.first_token_at,
            last_token_at=begun.last_token_at if last is None else last,
        )

    def live(self) -> list[Begun]:
        """The requests that have not ended."""
        pool = self.replica.scheduler.pool
        return [self._since(self._trace[request.request_id], request) for request in pool]

    def report(self, *, forecasts: bool) -> LoadReport:
        scheduler, delay = self.replica.scheduler, 0.0
        if forecasts:
            delay = self._delay.seconds(scheduler.pool, self._model, self.replica.now)
        return report_of(self.number, scheduler, delay)


def report_of(number: int, scheduler: IterationScheduler, delay: float = 0.0) -> LoadReport:
    """The load of a replica that has this scheduler, and a forecast."""
    pool = scheduler.pool
    return LoadReport(
        number,
        len(pool),
        pool.count(State.WAITING),
        pool.waiting_tokens + sum([request.num_tokens for request in pool.started]),
        pool.waiting_tokens,
        delay,
        scheduler.cost.tokens_per_second if pool.num_admitted else 0.0,
        scheduler.ledger.num_held / scheduler.kv.shape.num_blocks,
    )


class Shard:
    """Replicas that this process advances; `arrivals` are those of the whole fleet. The replicas
    have the setups in turn. With `forecasts` the reports have the delay that a new request would
    have."""

    def __init__(
        self, setups: Sequence[Setup], arrivals: Sequence[Arrival], *, forecasts: bool = False
    ) -> None:
        self._forecasts = forecasts
        self._setups = setups
        self._arrivals = arrivals
        self._is_recorded = is_recorded(arrivals)
        self._members: dict[int, _Member] = {}
        self._events: list[tuple[float, int]] = []  # a heap; may have outdated ones
        self._next_at: dict[int, float] = {}
        self._result = ShardResult()

    def advance(self, until: float, routed: Sequence[Routed]) -> list[LoadReport]:
        """Advance all replicas to the end of an epoch, in which the `routed` requests arrive.
        Returns the reports that changed."""
        touched: set[int] = set()
        for number, replica, begun, at in routed:
            member = self._members.get(replica)
            if member is None:
                member = self._members[replica] = self._new(replica)
            arrival = self._arrivals[number]
            member.add(number, arrival if begun is None else begun.rest(arrival, at), begun)
            touched.add(replica)
        for replica in sorted(touched):
            self._advance(replica, until)
        while self._events and self._events[0][0] < until:
            at, replica = heappop(self._events)
            if self._next_at.get(replica) == at:
                self._advance(replica, until)
                touched.add(replica)
        members = (self._members[replica] for replica in sorted(touched))
        return [member.report(forecasts=self._forecasts) for member in members]

    def _new(self, number: int) -> _Member:
        setup = self._setups[number % len(self._setups)]
        return _Member(number, setup, self._result, is_recorded=self._is_recorded)

    def _advance(self, number: int, until: float) -> None:
        replica = self._members[number].replica
        replica.advance(until)
        self._next_at[number] = at = replica.next_at
        if at < inf:
            heappush(self._events, (at, number))

    def end(self, replicas: Sequence[int], now: float) -> list[Begun]:
        """These replicas end, and begin anew with their next request. Returns the requests that
        they had."""
        live: list[Begun] = []
        for number in replicas:
            if (member := self._members.pop(number, None)) is not None:
                del self._next_at[number]
                member.replica.advance(now)  # through the steps of a leap
                self._count(member)
                live += member.live()
        return live

    def results(self) -> list[ShardResult]:
        """What the replicas did. It is called once."""
        for member in self._members.values():
            self._count(member)
        return [self._result]

    def _count(self, member: _Member) -> None:
        result, recorder, number = self._result, member.recorder, member.number
        result.busy[number] = result.busy.get(number, 0.0) + recorder.busy_seconds
        result.finished[number] = result.finished.get(number, 0) + member.num_ended
        result.num_iterations += recorder.num_iterations
        result.num_preempted += recorder.num_recomputed
