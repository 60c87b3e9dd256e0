"""Timelines: the phases of each request, recorded by an observer of the engine.

Live requests and the last `KEEP` ended ones are kept, the latter without their tokens. An
iteration costs one test per row; all else happens at arrivals, admissions, preemptions and ends.
`gateway.observe.explanation` says in one sentence what cost a request the most time.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from engine.control.scheduler import IterationScheduler
from engine.iteration import Iteration, Observer
from engine.request import CACHED, FoundPrefix, Request, Samples, State
from engine.step import BlockMove, Direction, RequestId
from gateway.observe.prefixes import PrefixHistory, PrefixReport
from gateway.observe.queueing import Cause, Pressure, QueueWatch

KEEP = 1000  # ended requests
MIN_BEGIN = 6  # characters of a shortened label
LABELS = 4096  # labels for which the times that a client did not read are known
PAUSE = 0.05  # seconds without an iteration after which a request that holds KV counts as paused
MAX_INTERRUPTIONS = 256  # interruptions of a request; later ones are not recorded
MAX_READER_WAITS = 64  # waits of one label; later ones are added to the last


class Span(NamedTuple):
    """A phase of a request. `start` is seconds after its arrival."""

    phase: str
    start: float
    seconds: float
    tokens: int | None = None


class Wait(NamedTuple):
    """A time in which a client did not read although tokens were ready."""

    began: float
    seconds: float


@dataclass(slots=True, eq=False)
class Interruption:
    """A time in which a started request was not computed: it had no KV on the device, or (paused)
    the policy ran others."""

    kind: str  # "swapped", "preempted", "paused" or "restart": the worker was lost
    began: float
    produced: int  # output tokens at that time
    resumed: float | None = None  # planned again
    ended: float | None = None  # produced a token again


@dataclass(slots=True, eq=False)
class Timeline:
    """What happened to one request. Times are seconds of the engine's clock."""

    request: Request
    queue: QueueWatch  # the queue of the replica where it waits
    blocked: dict[Cause, float]  # `QueueWatch.seconds` at its arrival; from its admission on, the
    pressure: Pressure | None = None  # seconds that it waited; the load while it waited
    pieces: list[tuple[float, int]] = field(default_factory=list)  # prompt chunks: planned, tokens
    interruptions: list[Interruption] = field(default_factory=list)
    num_restarts: int = 0  # restarts of the worker while it was live
    prefix: PrefixReport | None = None  # set once the request has ended

    @property
    def is_interrupted(self) -> bool:
        return bool(self.interruptions) and self.interruptions[-1].ended is None

    def settle(self, now: float) -> None:
        """The request does not wait for its admission any more."""
        if self.pressure is None:
            self.blocked, self.pressure = self._waited(now)

    def move(self, queue: QueueWatch, now: float) -> None:
        """The request waits at another replica, unless it has been admitted before."""
        if self.pressure is None:
            waited, _ = self._waited(now)
            seconds = queue.seconds(now)
            self.blocked = {cause: seconds[cause] - before for cause, before in waited.items()}
        self.queue = queue

    def waited(self, now: float) -> tuple[Cause, Pressure]:
        """What the request lacked for the longest while it waited, and the load at that time."""
        blocked, pressure = self._waited(now)
        return max(blocked, key=lambda cause: blocked[cause]), pressure

    def _waited(self, now: float) -> tuple[dict[Cause, float], Pressure]:
        if self.pressure is not None:
            return self.blocked, self.pressure
        seconds = self.queue.seconds(now)
        waited = {cause: seconds[cause] - before for cause, before in self.blocked.items()}
        return waited, self.queue.pressure

    def interrupt(self, kind: str, now: float) -> bool:
        """Whether the request is interrupted from now on, and was not before."""
        if self.is_interrupted or len(self.interruptions) == MAX_INTERRUPTIONS:
            return False
        self.interruptions.append(Interruption(kind, now, self.request.produced))
        return True

    def note_pause(self, now: float) -> None:
        """The request was not in the iteration before: it was paused if that was long ago."""
        last = self.request.times.last_token_at
        if last is None or now - last < PAUSE or self.is_interrupted:
            return
        since = self.interruptions[-1].ended if self.interruptions else None
        if len(self.interruptions) < MAX_INTERRUPTIONS and (since is None or since <= last):
            pause = Interruption("paused", last, self.request.produced, now, now)
            self.interruptions.append(pause)

    def spans(self, now: float) -> list[Span]:
        """Its phases in order. A live request's last phase ends now."""
        times, began = self.request.times, self.request.times.arrived_at
        end = now if times.ended_at is None else times.ended_at
        admitted = end if times.admitted_at is None else times.admitted_at
        first = end if times.first_token_at is None else times.first_token_at
        wanted = times.images_wanted_at
        encoding = admitted if wanted is None else min(wanted, admitted)
        found = [Span("queued", 0.0, encoding - began)]
        found.append(Span("encoding", encoding - began, admitted - encoding))
        found += self._phase("prefill", admitted, first, sum(size for _, size in self.pieces))
        if times.first_token_at is not None:
            found += self._phase("decode", first, end, self.request.produced)
        return _joined(span for span in found if span.seconds > 0 or span.phase == "queued")

    def _phase(self, name: str, start: float, end: float, tokens: int) -> list[Span]:
        """A phase, cut where the request was interrupted."""
        began, found, at = self.request.times.arrived_at, [], start
        for each in self.interruptions:
            if not start <= each.began < end:
                continue
            resumed = end if each.resumed is None else min(each.resumed, end)
            ended = end if each.ended is None else min(each.ended, end)
            found.append(Span(name, at - began, each.began - at))
            found.append(Span(each.kind, each.began - began, resumed - each.began))
            again = "recomputed" if each.kind in ("preempted", "restart") else name
            found.append(Span(again, resumed - began, ended - resumed))
            at = ended
        found.append(Span(name, at - began, end - at, tokens))
        return found


def _joined(spans: Iterable[Span]) -> list[Span]:
    """The spans, of which consecutive ones of the same phase are one."""
    found: list[Span] = []
    for span in spans:
        if found and found[-1].phase == span.phase:
            last = found.pop()
            tokens = span.tokens if last.tokens is None else last.tokens
            span = Span(span.phase, last.start, last.seconds + span.seconds, tokens)
        found.append(span)
    return found


class TimelineListener(Protocol):
    """What timelines are reported to while the server runs."""

    def ended(self, timeline: Timeline) -> None: ...

    def reader_waited(self, label: str, wait: Wait) -> None: ...


class ReaderWaits:
    """The times in which clients did not read although tokens were ready, by label."""

    def __init__(self) -> None:
        self.listener: TimelineListener | None = None
        self._waits: OrderedDict[str, list[Wait]] = OrderedDict()

    def of(self, label: str) -> list[Wait]:
        """The waits of the client of the requests with this label."""
        return self._waits.get(label, [])

    def add(self, label: str, wait: Wait) -> None:
        """The client of these requests did not read."""
        waits = self._waits.setdefault(label, [])
        if len(waits) < MAX_READER_WAITS:
            waits.append(wait)
        else:
            waits[-1] = Wait(waits[-1].began, waits[-1].seconds + wait.seconds)
        self._waits.move_to_end(label)
        if len(self._waits) > LABELS:
            self._waits.popitem(last=False)
        if self.listener is not None:
            self.listener.reader_waited(label, wait)


class Timelines(Observer):
    """Records timelines; `attach` it to the scheduler that it observes before requests arrive."""

    def __init__(self, keep: int = KEEP) -> None:
        self.reader_waits = ReaderWaits()
        self.prefixes = PrefixHistory()
        self._keep = keep
        self._scheduler: IterationScheduler | None = None
        self._queue: QueueWatch | None = None
        self._live: dict[RequestId, Timeline] = {}
        self._ended: OrderedDict[RequestId, Timeline] = OrderedDict()
        self._interrupted: dict[RequestId, Timeline] = {}
        self._running: tuple[Request, ...] = ()  # in the latest iteration
        self._by_label: dict[str, list[Timeline]] = {}

    def attach(self, scheduler: IterationScheduler) -> None:
        """Observe this scheduler's queue to explain waits, and its prompts."""
        self._scheduler = scheduler
        self._queue = QueueWatch(scheduler)
        self.prefixes.attach(scheduler)

    def beside(self) -> "Timelines":
        """The observer of another replica of the model, which records in the same timelines; it is
        attached to the replica's scheduler."""
        other = copy(self)
        other._running = ()
        return other

    def report_to(self, listener: TimelineListener) -> None:
        """Report ended requests and reader waits to this listener from now on."""
        self.reader_waits.listener = listener

    @property
    def queue(self) -> QueueWatch:
        """The queue of the scheduler that this is attached to."""
        assert self._queue is not None, "attached before requests arrive"
        return self._queue

    def labels(self, begin: str, tenant: str) -> list[str]:
        """The label `begin` of a caller's request; if there is none, those that begin with it, of
        which it must have enough characters."""
        if self.find(begin, tenant):
            return [begin]
        if len(begin) < MIN_BEGIN:
            return []
        return [
            label
            for label in self._by_label
            if label.startswith(begin) and self.find(label, tenant)
        ]

    def find(self, label: str, tenant: str) -> list[Timeline]:
        """The timelines of the choices of a caller's request, in their order; empty if unknown."""
        found = self._by_label.get(label, ())
        own = [each for each in found if each.request.spec.tenant == tenant]
        return sorted(own, key=lambda each: each.request.request_id)

    def arrived(self, request: Request, now: float) -> None:
        found = Timeline(request, self.queue, self.queue.seconds(now))
        self._live[request.request_id] = found
        self._by_label.setdefault(request.spec.label, []).append(found)

    def adopted(self, request: Request, now: float) -> None:
        self._live[request.request_id].move(self.queue, now)

    def planned(self, iteration: Iteration, now: float) -> None:
        for entry, request in zip(iteration.step.entries, iteration.requests, strict=True):
            if request.times.first_token_at is None or not entry.is_decode:
                timeline = self._live[request.request_id]
                timeline.settle(now)
                timeline.pieces.append((now, len(entry.tokens)))
        if iteration.requests != self._running:
            for request in set(iteration.requests).difference(self._running):
                self._live[request.request_id].note_pause(now)
            self._running = iteration.requests
        if self._interrupted:
            for request in iteration.requests:
                interrupted = self._interrupted.get(request.request_id)
                if interrupted is not None and interrupted.interruptions[-1].resumed is None:
                    interrupted.interruptions[-1].resumed = now
        self.queue.planned(len(iteration.requests), now)

    def idled(self, now: float) -> None:
        self.queue.planned(0, now)

    def committed(self, iteration: Iteration, seconds: float, now: float) -> None:
        if not self._interrupted:
            return
        for request in iteration.requests:
            interrupted = self._interrupted.get(request.request_id)
            if interrupted is None:
                continue
            if request.produced > interrupted.interruptions[-1].produced:
                interrupted.interruptions[-1].ended = now
                del self._interrupted[request.request_id]

    def preempted(self, request: Request, now: float) -> None:
        self._interrupt(request, "preempted", now)

    def swapped(self, request: Request, move: BlockMove, now: float) -> None:
        if move.direction is Direction.OUT:
            self._interrupt(request, "swapped", now)

    def worker_lost(self, now: float) -> None:
        self.queue.worker_lost(now)
        assert self._scheduler is not None, "attached before requests arrive"
        for request in self._scheduler.pool:
            each = self._live[request.request_id]
            each.num_restarts += 1
            if each.request.state is not State.WAITING:
                self._interrupt(each.request, "restart", now)

    def ended(self, request: Request, now: float) -> None:
        found = self._live.pop(request.request_id, None)
        self._interrupted.pop(request.request_id, None)
        if found is not None:
            found.settle(now)
            self._ended[request.request_id] = found
            found.prefix = self.prefixes.ended(request)
            found.request = _without_tokens(request)
            if (listener := self.reader_waits.listener) is not None:
                listener.ended(found)
            if len(self._ended) > self._keep:
                self._forget(self._ended.popitem(last=False)[1])

    def _forget(self, timeline: Timeline) -> None:
        label = timeline.request.spec.label
        same = self._by_label[label]
        same.remove(timeline)
        if not same:
            del self._by_label[label]

    def _interrupt(self, request: Request, kind: str, now: float) -> None:
        found = self._live[request.request_id]
        if found.interrupt(kind, now):
            self._interrupted[request.request_id] = found


def _without_tokens(request: Request) -> Request:
    """A copy of an ended request that does not keep its prompt, of which it may have 100,000
    tokens: ranges of equal length stand for prompt and output."""
    kept = copy(request)
    prompt, output = range(request.prompt_len), range(request.produced)
    kept.spec = replace(request.spec, prompt=prompt, grammar=None, behind=None, caching=CACHED)  # type: ignore[arg-type] # has len
    kept.output = output  # type: ignore[assignment] # has len
    kept.block_hashes, kept.prompt_logprobs = [], []
    kept.found, kept.samples = FoundPrefix(), Samples()
    return kept


def slowest(timelines: Sequence[Timeline], now: float) -> Timeline:
    """The choice of a request that took the longest."""
    return max(timelines, key=lambda each: sum(span.seconds for span in each.spans(now)))


def phase_seconds(timeline: Timeline, now: float) -> dict[str, float]:
    """Seconds by phase, in order of the phases' first occurrence."""
    seconds: dict[str, float] = {}
    for span in timeline.spans(now):
        seconds[span.phase] = seconds.get(span.phase, 0.0) + span.seconds
    return seconds
