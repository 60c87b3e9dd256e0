"""Timelines: what happened to each request, recorded by an observer of the engine.

`QueueWatch` knows for how long the queue has been blocked by which shortage: after each plan the
oldest waiting request shows what ended the plan, and the time until the next plan is added to that
cause. So the difference between two readings says why a request waited in between, however many
requests wait.

Live requests and the last `KEEP` ended ones are kept, the latter without their tokens. An
iteration costs one test per row; all else happens at arrivals, admissions, preemptions and ends.
`gateway.observe.explanation` divides a timeline into phases, and says what cost the most time.
"""

from collections import OrderedDict
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import islice
from typing import NamedTuple, Protocol

from engine.control.admission import Admission
from engine.control.scheduler import IterationScheduler
from engine.iteration import Iteration, Observer
from engine.request import CACHED, FoundPrefix, Request, Samples, State
from engine.step import BlockMove, Direction, RequestId
from gateway.observe.prefixes import PrefixHistory, PrefixReport

KEEP = 1000  # ended requests
MIN_BEGIN = 6  # characters of a shortened label
LABELS = 4096  # labels for which the times that a client did not read are known
PAUSE = 0.05  # seconds without an iteration after which a request that holds KV counts as paused
MAX_INTERRUPTIONS = 256  # interruptions of a request; later ones are not recorded
MAX_READER_WAITS = 64  # waits of one label; later ones are added to the last
MAX_MESSAGES = 4096  # with more in a request, the ends of messages are not kept
MAX_SEARCH = 1024  # live requests among which a waiting one is looked for


class Cause(StrEnum):
    """What a waiting request lacks."""

    KV = "KV"
    SEAT = "a seat"
    TOKENS = "tokens of a step"
    WORKER = "the worker's restart"
    STEP = "the step in flight"  # it arrived while a step ran


WAITING, STEP = State.WAITING, Cause.STEP  # bound once (see engine.pool)


class Pressure(NamedTuple):
    """The load while requests waited."""

    num_waiting: int
    num_running: int
    kv_share: float  # the share of the blocks that are held, 0 to 1


class QueueWatch:
    """Seconds for which requests waited, by cause."""

    def __init__(self, scheduler: IterationScheduler) -> None:
        self._scheduler = scheduler
        self._seconds = dict.fromkeys(Cause, 0.0)
        self._cause = Cause.STEP
        self._since = 0.0
        self.pressure = Pressure(0, 0, 0.0)  # after the last plan that left requests waiting

    def seconds(self, now: float) -> dict[Cause, float]:
        """Seconds by cause since the start of the server."""
        self._seconds[self._cause] += now - self._since
        self._since = now
        return dict(self._seconds)

    def planned(self, num_requests: int, now: float) -> None:
        """A plan put `num_requests` requests into an iteration; 0 if none could be planned."""
        self._begin(self._blocked_by(num_requests), now)

    def worker_lost(self, now: float) -> None:
        """Until the next plan, requests wait for the new worker."""
        self._begin(Cause.WORKER, now)

    def _begin(self, cause: Cause, now: float) -> None:
        if cause is not self._cause:
            self._seconds[self._cause] += now - self._since
            self._cause, self._since = cause, now

    def _blocked_by(self, num_requests: int) -> Cause:
        scheduler = self._scheduler
        pool = scheduler.pool
        num_waiting = pool.count(WAITING)
        if not num_waiting:
            return STEP
        held = scheduler.kv_counts.device.held / scheduler.kv.shape.num_blocks
        self.pressure = Pressure(num_waiting, pool.num_admitted, held)
        oldest = next((each for each in islice(pool, MAX_SEARCH) if each.state is WAITING), None)
        return Cause.TOKENS if oldest is None else lacks(oldest, scheduler, num_requests)


def lacks(request: Request, scheduler: IterationScheduler, num_requests: int) -> Cause:
    """What a waiting request lacks, given that the last iteration had `num_requests` requests.

    Changes nothing: blocks that the request may share count only once the scheduler found them.
    """
    kv = scheduler.kv
    grows = scheduler.settings.admission is Admission.GROW
    slots = request.num_tokens if grows else request.spec.max_slots
    headroom = scheduler.pool.num_admitted * len(kv.groups) if grows else 0
    found = request.block_hashes[: request.found.num_matched]
    if kv.missing(request, slots, found).blocks + headroom > 0:
        return Cause.KV
    if num_requests >= scheduler.settings.max_batch_size:
        return Cause.SEAT
    return Cause.TOKENS


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
    message_ends: Sequence[int] = ()  # tokens of the prompt up to the end of each message

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

    def note_messages(self, label: str, tenant: str, ends: Sequence[int]) -> None:
        """The messages of a request that has arrived end behind so many tokens of its prompt."""
        if len(ends) <= MAX_MESSAGES:
            for each in self.find(label, tenant):
                each.message_ends = each.message_ends or ends

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
