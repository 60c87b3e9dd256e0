"""Metrics: an `Observer` of the engine that counts its events; `exposition` renders them.

An event costs a few additions. Names, labels and cumulative buckets are made on a scrape.
"""

import asyncio
from bisect import bisect_left
from collections import Counter
from math import inf

from engine.iteration import Iteration, Observer
from engine.request import Abort, FinishReason, Request
from engine.step import BlockMove, Direction, RequestId

SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0,
    300.0,
)  # fmt: skip
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
TOKENS = (
    1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000,
    500_000, 1_000_000,
)  # fmt: skip
ITERATIONS = (0, 1, 2, 3, 4, 8)


class Histogram:
    """A histogram; an observation costs one bisection."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Observe `value` `times` times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts by upper bound, in the format of `prometheus_client`."""
        total = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound == float("inf") else repr(float(bound)), total))
        return buckets

    @property
    def sum(self) -> float:
        return self._sum


class RequestMetrics(Observer):
    """Counters and histograms of the events of single requests."""

    def __init__(self) -> None:
        self.outcomes = Counter(dict.fromkeys(("finished", "cancelled", "failed", "expired"), 0))
        self.finishes = Counter(dict.fromkeys((reason.value for reason in FinishReason), 0))
        self.aborts = Counter(dict.fromkeys(Abort, 0))
        self.preemptions = Counter(dict.fromkeys(("recompute", "reactive", "proactive"), 0))
        self.swapped_blocks = Counter(dict.fromkeys(Direction, 0))
        self.request_seconds = Histogram(SECONDS)
        self.queue_seconds = Histogram(SECONDS)
        self.prefill_seconds = Histogram(SECONDS)
        self.decode_seconds = Histogram(SECONDS)
        self.prompt_tokens = Histogram(TOKENS)
        self.generation_tokens = Histogram(TOKENS)
        self.max_generation_tokens = Histogram(TOKENS)  # tokens of a request's longest choice
        self.cancel_to_free = Histogram(ITERATIONS)
        self._choices: dict[str, tuple[int, int]] = {}  # by label: live choices, most tokens

    def arrived(self, request: Request, now: float) -> None:
        """Count the choices of its request."""
        live, most = self._choices.get(request.spec.label, (0, 0))
        self._choices[request.spec.label] = live + 1, most

    def preempted(self, request: Request, now: float) -> None:
        self.preemptions["recompute"] += 1

    def swapped(self, request: Request, move: BlockMove, now: float) -> None:
        """Count the blocks; a request that is swapped out counts as preempted."""
        self.swapped_blocks[move.direction] += move.num_blocks
        if move.direction is Direction.OUT:
            self.preemptions["reactive" if move.is_awaited else "proactive"] += 1

    def ended(self, request: Request, now: float) -> None:
        """Count its outcome and its durations."""
        self.outcomes[request.outcome] += 1
        if request.abort is not None:
            self.aborts[request.abort] += 1
        if request.outcome == "finished":
            self.finishes[request.finish.value if request.finish else "stop"] += 1
            self.request_seconds.add(now - request.times.arrived_at)
            self._count_phases(request, now)
        if request.times.admitted_at is not None:
            self.queue_seconds.add(request.times.admitted_at - request.times.arrived_at)
        self._count_choice(request)

    def _count_choice(self, request: Request) -> None:
        """The last choice of a request counts the tokens of the longest one."""
        live, most = self._choices.pop(request.spec.label, (1, 0))
        most = max(most, request.produced)
        if live > 1:
            self._choices[request.spec.label] = live - 1, most
        elif not request.spec.is_pooling:
            self.max_generation_tokens.add(most)

    def _count_phases(self, request: Request, now: float) -> None:
        """A finished request's tokens, and its time before and after the first token. Without
        output all of its time since its admission is prefill."""
        self.prompt_tokens.add(request.prompt_len)
        first, admitted = request.times.first_token_at, request.times.admitted_at
        if request.spec.is_pooling:
            first = now
        else:
            self.generation_tokens.add(request.produced)
        if first is not None and admitted is not None:
            self.prefill_seconds.add(first - admitted)
            if not request.spec.is_pooling:
                self.decode_seconds.add(now - first)

    def freed(self, request: Request, iterations: int) -> None:
        self.cancel_to_free.add(iterations)


class Metrics(Observer):
    """Counters and histograms of iterations and of the server; `LoopWatch` fills `loop_lag`.

    `requests`, an observer too, has those of single requests; a `StepMetrics` of each scheduler
    counts its iterations.
    """

    def __init__(self) -> None:
        self.requests = RequestMetrics()
        self.num_iterations = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0  # prompt tokens found in the prefix cache
        self.num_output_tokens = 0
        self.goal_steps = Counter(dict.fromkeys(("met", "exceeded"), 0))  # with an ITL goal
        self.num_workers_lost = 0
        self.num_dropped_traces = 0
        self.num_dropped_kv_events = 0  # batches
        self.kv_lookups = dict.fromkeys(("found", "missing", "failed"), 0)  # in a shared store
        self.iteration_seconds = Histogram(SECONDS)
        self.iteration_requests = Histogram(SIZES)
        self.iteration_tokens = Histogram(SIZES)
        self.time_to_first_token = Histogram(SECONDS)
        self.inter_token = Histogram(SECONDS)
        self.loop_lag = Histogram(SECONDS)

    def ended(self, request: Request, now: float) -> None:
        """Count the prompt of a request that has no first token."""
        if request.spec.is_pooling and request.outcome == "finished":
            self.count_prompt(request)

    def count_prompt(self, request: Request) -> None:
        """The prompt of a request has been computed."""
        self.num_prompt_tokens += request.spec.own_len
        self.num_cached_tokens += request.own_cached


class StepMetrics(Observer):
    """Counts the iterations of one scheduler in the metrics of its model."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._produced: dict[RequestId, int] = {}  # by requests with drafts in flight

    def planned(self, iteration: Iteration, now: float) -> None:
        """Remember what requests with drafts have produced."""
        if iteration.step.has_drafts:
            for request, entry in zip(iteration.requests, iteration.step.entries, strict=True):
                if entry.num_drafts:
                    self._produced[request.request_id] = request.produced

    def committed(self, iteration: Iteration, seconds: float, now: float) -> None:
        """Count the iteration; requests with the same previous iteration share one gap."""
        metrics = self._metrics
        earlier = [
            request.times.earlier_token_at
            for request, entry in zip(iteration.requests, iteration.step.entries, strict=True)
            if entry.sample is not None and request.times.last_token_at == now
        ]
        for last, times in Counter(earlier).items():
            if last is not None:
                metrics.inter_token.add(now - last, times)
        if None in earlier:
            self._count_first_tokens(iteration, now)
        metrics.num_iterations += 1
        metrics.num_output_tokens += len(earlier)
        if self._produced:
            self._count_accepted(iteration)
        metrics.iteration_seconds.add(seconds)
        if iteration.itl_goal < inf:
            metrics.goal_steps["met" if seconds <= iteration.itl_goal else "exceeded"] += 1
        metrics.iteration_requests.add(len(iteration.requests))
        metrics.iteration_tokens.add(iteration.step.num_tokens)

    def _count_accepted(self, iteration: Iteration) -> None:
        """Count the tokens that requests with drafts have produced besides one each."""
        metrics = self._metrics
        for request in iteration.requests:
            before = self._produced.pop(request.request_id, request.produced)
            metrics.num_output_tokens += max(0, request.produced - before - 1)

    def _count_first_tokens(self, iteration: Iteration, now: float) -> None:
        metrics = self._metrics
        for request in iteration.requests:
            if request.produced == 1 and request.times.first_token_at == now:
                metrics.time_to_first_token.add(now - request.times.arrived_at)
                metrics.count_prompt(request)

    def worker_lost(self, now: float) -> None:
        self._metrics.num_workers_lost += 1
        self._produced.clear()


class LoraUsage(Observer):
    """Counts the requests of each adapter."""

    def __init__(self, max_loras: int = 0) -> None:
        """`max_loras` is the largest number of adapters that may be loaded at once."""
        self.max_loras = max_loras
        self.tokens: Counter[tuple[str, str]] = Counter()  # by name, "" for the base, and kind
        self.tokens.update({("", "prompt"): 0, ("", "output"): 0})
        self._live: Counter[int] = Counter()  # requests, by id
        self._idle: dict[int, asyncio.Event] = {}  # awaited, by id

    def arrived(self, request: Request, now: float) -> None:
        if (lora := request.spec.lora) is not None:
            self._live[lora.lora_id] += 1

    def ended(self, request: Request, now: float) -> None:
        """Count its tokens; the last request of an adapter ends `wait_until_idle`."""
        lora = request.spec.lora
        name = "" if lora is None else lora.name
        self.tokens[name, "prompt"] += request.spec.own_len
        self.tokens[name, "output"] += request.produced
        if lora is None:
            return
        self._live[lora.lora_id] -= 1
        if not self._live[lora.lora_id]:
            del self._live[lora.lora_id]
            if (idle := self._idle.get(lora.lora_id)) is not None:
                idle.set()

    def num_live(self, lora_id: int) -> int:
        """Requests of an adapter that have not ended."""
        return self._live[lora_id]

    async def wait_until_idle(self, lora_id: int) -> None:
        """Wait until no live request uses the adapter; no new one may be accepted meanwhile."""
        if self.num_live(lora_id):
            idle = self._idle.setdefault(lora_id, asyncio.Event())
            await idle.wait()
            self._idle.pop(lora_id, None)
