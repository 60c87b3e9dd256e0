"""Timelines: the phases of each request, and one sentence about what cost it the most time.

An observer of the engine. Live requests and the last `KEEP` ended ones are kept. An iteration costs
one test per row; everything else happens at arrivals, preemptions, swaps and ends.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from engine.events import NullObserver
from engine.request import State
from engine.step import Direction

if TYPE_CHECKING:
    from engine.control.scheduler import IterationScheduler
    from engine.iteration import Iteration
    from engine.request import Request
    from engine.step import BlockMove, RequestId

KEEP = 1000  # ended requests
LABELS = 4096  # of which the time that a client did not read is known
SHORT = 0.05  # seconds; a shorter wait explains nothing


class Pressure(NamedTuple):
    """What a request found when it arrived."""

    num_waiting: int
    num_running: int
    num_seats: int
    num_missing_blocks: int  # to start; 0 if enough were free
    kv_share: float  # of the blocks that are held, 0 to 1


class Span(NamedTuple):
    """A phase of a request. `start` is seconds after its arrival."""

    phase: str
    start: float
    seconds: float
    tokens: int | None = None


@dataclass(slots=True, eq=False)
class Interruption:
    """A time in which a started request had no KV on the device: swapped out or preempted."""

    kind: str  # "swapped" or "preempted"
    began: float
    produced: int  # output tokens at that time
    resumed: float | None = None  # planned again
    ended: float | None = None  # produced a token again


@dataclass(slots=True, eq=False)
class Timeline:
    """What happened to one request. Times are seconds of the engine's clock."""

    request: "Request"
    pressure: Pressure
    pieces: list[tuple[float, int]] = field(default_factory=list)  # prompt chunks: planned, tokens
    interruptions: list[Interruption] = field(default_factory=list)
    num_restarts: int = 0  # of the worker while it was live

    @property
    def is_interrupted(self) -> bool:
        return bool(self.interruptions) and self.interruptions[-1].ended is None

    def spans(self, now: float) -> list[Span]:
        """Its phases in order. A live request's last phase ends now."""
        request, began = self.request, self.request.arrived_at
        end = now if request.ended_at is None else request.ended_at
        admitted = end if request.admitted_at is None else request.admitted_at
        first = end if request.first_token_at is None else request.first_token_at
        found = [Span("queued", 0.0, admitted - began)]
        found += self._phase("prefill", admitted, first, sum(size for _, size in self.pieces))
        if request.first_token_at is not None:
            found += self._phase("decode", first, end, request.produced)
        return [span for span in found if span.seconds > 0 or span.phase == "queued"]

    def _phase(self, name: str, start: float, end: float, tokens: int) -> list[Span]:
        """A phase, cut where the request was interrupted."""
        began, found, at = self.request.arrived_at, [], start
        for each in self.interruptions:
            if not start <= each.began < end:
                continue
            resumed = end if each.resumed is None else min(each.resumed, end)
            ended = end if each.ended is None else min(each.ended, end)
            found.append(Span(name, at - began, each.began - at))
            found.append(Span(each.kind, each.began - began, resumed - each.began))
            again = "recomputed" if each.kind == "preempted" else name
            found.append(Span(again, resumed - began, ended - resumed))
            at = ended
        found.append(Span(name, at - began, end - at, tokens))
        return found


class Timelines(NullObserver):
    """Records timelines; `attach` it to the scheduler that it observes before requests arrive."""

    def __init__(
        self, keep: int = KEEP, on_end: "Callable[[Timeline], None] | None" = None
    ) -> None:
        self._keep = keep
        self._on_end = on_end
        self._scheduler: IterationScheduler | None = None
        self._live: dict[RequestId, Timeline] = {}
        self._ended: OrderedDict[RequestId, Timeline] = OrderedDict()
        self._interrupted: dict[RequestId, Timeline] = {}
        self._reader_waits: OrderedDict[str, float] = OrderedDict()  # seconds by label

    def attach(self, scheduler: "IterationScheduler") -> None:
        """Use this scheduler's queue and KV cache to explain waits."""
        self._scheduler = scheduler

    def find(self, label: str, tenant: str) -> list[Timeline]:
        """The timelines of the choices of a caller's request, in their order; empty if unknown."""
        both = (*self._ended.values(), *self._live.values())
        found = [each for each in both if each.request.spec.label == label]
        own = [each for each in found if each.request.spec.tenant == tenant]
        return sorted(own, key=lambda each: each.request.request_id)

    def reader_waited(self, label: str, seconds: float) -> None:
        """The client did not read for this long while tokens were ready."""
        waits = self._reader_waits
        waits[label] = waits.pop(label, 0.0) + seconds
        if len(waits) > LABELS:
            waits.popitem(last=False)

    def reader_wait(self, label: str) -> float:
        """Seconds in which the client did not read although tokens were ready."""
        return self._reader_waits.get(label, 0.0)

    def arrived(self, request: "Request", now: float) -> None:
        self._live[request.request_id] = Timeline(request, self._pressure(request))

    def planned(self, iteration: "Iteration", now: float) -> None:
        for entry, request in zip(iteration.step.entries, iteration.requests, strict=True):
            if not entry.is_decode and (found := self._live.get(request.request_id)):
                found.pieces.append((now, len(entry.tokens)))
        if self._interrupted:
            for request in iteration.requests:
                found = self._interrupted.get(request.request_id)
                if found is not None and found.interruptions[-1].resumed is None:
                    found.interruptions[-1].resumed = now

    def committed(self, iteration: "Iteration", seconds: float, now: float) -> None:
        if not self._interrupted:
            return
        for request in iteration.requests:
            found = self._interrupted.get(request.request_id)
            if found is not None and request.produced > found.interruptions[-1].produced:
                found.interruptions[-1].ended = now
                del self._interrupted[request.request_id]

    def preempted(self, request: "Request", now: float) -> None:
        self._interrupt(request, "preempted", now)

    def swapped(self, request: "Request", move: "BlockMove", now: float) -> None:
        if move.direction is Direction.OUT:
            self._interrupt(request, "swapped", now)

    def worker_lost(self, now: float) -> None:
        for each in self._live.values():
            each.num_restarts += 1

    def ended(self, request: "Request", now: float) -> None:
        found = self._live.pop(request.request_id, None)
        self._interrupted.pop(request.request_id, None)
        if found is not None:
            self._ended[request.request_id] = found
            if self._on_end is not None:
                self._on_end(found)
            if len(self._ended) > self._keep:
                self._ended.popitem(last=False)

    def _interrupt(self, request: "Request", kind: str, now: float) -> None:
        found = self._live.get(request.request_id)
        if found is not None and not found.is_interrupted:
            found.interruptions.append(Interruption(kind, now, request.produced))
            self._interrupted[request.request_id] = found

    def _pressure(self, request: "Request") -> Pressure:
        scheduler = self._scheduler
        assert scheduler is not None, "attached before requests arrive"
        pool, ledger = scheduler.pool, scheduler.ledger
        missing = ledger.blocks_for(request.num_tokens) - ledger.num_free
        return Pressure(
            num_waiting=pool.count(State.WAITING) - 1,
            num_running=pool.num_admitted,
            num_seats=scheduler.settings.max_batch_size,
            num_missing_blocks=max(0, missing),
            kv_share=ledger.num_held / ledger.num_blocks,
        )


def slowest(timelines: "Sequence[Timeline]", now: float) -> Timeline:
    """The choice of a request that took the longest."""
    return max(timelines, key=lambda each: sum(span.seconds for span in each.spans(now)))


def phase_seconds(timeline: Timeline, now: float) -> dict[str, float]:
    """Seconds by phase, in order of the phases' first occurrence."""
    seconds: dict[str, float] = {}
    for span in timeline.spans(now):
        seconds[span.phase] = seconds.get(span.phase, 0.0) + span.seconds
    return seconds


def explain(timelines: "Sequence[Timeline]", reader_wait: float, now: float) -> str:
    """One sentence: the phase that cost a request the most time, its cause, and what would help."""
    longest = slowest(timelines, now)
    costs = {"reader": reader_wait, **phase_seconds(longest, now)}
    costs["preempted"] = costs.get("preempted", 0.0) + costs.pop("recomputed", 0.0)
    delays = {
        phase: costs.get(phase, 0.0) for phase in ("queued", "preempted", "swapped", "reader")
    }
    phase = max(delays, key=lambda each: delays[each])
    work = costs.get("prefill", 0.0) + costs.get("decode", 0.0)
    if delays[phase] < max(SHORT, 0.1 * work):
        return _working(longest, costs)
    return _DELAYS[phase](longest, delays[phase])


def _working(timeline: Timeline, costs: dict[str, float]) -> str:
    prefill, decode = costs.get("prefill", 0.0), costs.get("decode", 0.0)
    restart = " A worker restarted meanwhile." if timeline.num_restarts else ""
    if prefill > decode:
        cached = f", {timeline.request.num_cached} of them from the prefix cache"
        return (
            f"It did not wait: computing its {timeline.request.prompt_len} prompt tokens{cached} "
            f"took {prefill:.2f} s in {len(timeline.pieces)} pieces.{restart}"
        )
    produced = timeline.request.produced
    each = decode / max(1, produced - 1) * 1e3
    return (
        f"It did not wait: its {produced} output tokens took {decode:.2f} s, {each:.1f} ms each."
        f"{restart}"
    )


def _queued(timeline: Timeline, seconds: float) -> str:
    found = timeline.pressure
    if found.num_missing_blocks:
        return (
            f"It waited {seconds:.2f} s for KV: {found.num_running} requests held "
            f"{found.kv_share:.0%} of it; a larger --kv-memory or --host-kv-memory would have "
            "started it sooner."
        )
    if found.num_running >= found.num_seats:
        return (
            f"It waited {seconds:.2f} s for a seat: all {found.num_seats} seats of a batch were "
            "taken; a larger --max-batch-size would have started it sooner."
        )
    return (
        f"It waited {seconds:.2f} s in the queue behind {found.num_waiting} requests; more "
        "capacity or another --policy would have started it sooner."
    )


def _preempted(timeline: Timeline, seconds: float) -> str:
    times = timeline.request.num_preemptions
    return (
        f"It was preempted {times} times because KV ran short, and computed again: {seconds:.2f} "
        "s; --host-kv-memory keeps the KV of preempted requests, a larger --kv-memory avoids it."
    )


def _swapped(timeline: Timeline, seconds: float) -> str:
    return (
        f"Its KV was swapped out to the host {timeline.request.num_swaps} times, {seconds:.2f} s "
        "in all, while other requests used the memory; a larger --kv-memory avoids it."
    )


def _reader(timeline: Timeline, seconds: float) -> str:
    return (
        f"Its client did not read for {seconds:.2f} s while tokens were ready: the client or its "
        "network was slow, not the engine."
    )


_DELAYS = {"queued": _queued, "preempted": _preempted, "swapped": _swapped, "reader": _reader}
