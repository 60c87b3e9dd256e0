"""Masks of constrained rows, computed in threads beside the forward pass. Only on the last stage.

    begin(step) ──mask threads──▶ … the layers run … ──▶ collect(wanted)

Each request has a matcher, which has read the request's output so far. Matchers are cached: one
that is missing, or that has read another output (after a preemption, in a new worker), is made
again from the output. Grammars are compiled in threads of their own, more than there are slow
grammars at once: those that the gateway lets in take up to 5 s, others a millisecond.

A row whose grammar is not compiled yet, or whose mask takes long, is late: the other rows of the
batch wait for it for at most a share of the step's time, and its token is sampled in a later step,
which takes the mask that is still being computed. If that takes more than `MASK_SECONDS` of CPU
time, or `WITHOUT_CORE` times as long on a busy machine, the row fails. Rows whose last mask was
slow are not waited for at all, unless no row of the batch has its mask. They have a thread of their
own, so that other rows do not queue behind them. It has the lowest priority: it uses what the
compute threads leave of the cores, since a step waits for each of these threads.

Drafts of a request are rows behind its own, with equal request id. Their masks are computed after
its mask, by a copy of its matcher that reads the drafts. They are only waited for as late rows are:
a draft without a mask, or that the grammar does not allow, counts as late.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple, cast
from weakref import WeakSet

from engine.errors import EngineError
from engine.grammar import GrammarCompiler, GrammarError, Mask, Matcher
from engine.priority import lower_thread_priority
from engine.step import Grammar, RequestId, SampleSpec, Step
from engine.worker.sampling.mask_threads import MASK_WAIT_SECONDS, MaskThreads, ThreadClock
from engine.worker.sampling.sampler import NO_MASKS, Masks, RowFault

MAX_GRAMMARS = 64  # compiled grammars in the cache
MAX_MATCHERS = 512
COMPILE_THREADS = 4  # the gateway compiles two slow grammars at a time before they come here
MASK_WAIT_SHARE = 0.25  # a batch waits for late rows for this share of its step's time so far
MIN_WAIT_SECONDS = 0.0005  # the same in a step that has just begun
MASK_WAIT_SECONDS_ALONE = 0.1  # the same, for the first mask, if all rows of the batch are late
MASK_SECONDS = 2.0  # CPU time after which a row fails
WITHOUT_CORE = 10.0  # times `MASK_SECONDS`, after which it fails in any case


class _MatcherPosition:
    """A request's matcher and the output tokens that it has read, or is reading."""

    __slots__ = ("clock", "drafts", "grammar", "is_slow", "mask", "matcher", "seen")

    def __init__(self, grammar: Grammar, matcher: Matcher) -> None:
        self.grammar = grammar
        self.matcher = matcher
        self.seen: tuple[int, ...] = ()
        self.mask: Future[Mask] | None = None  # after the tokens `seen`
        self.clock: ThreadClock | None = None  # while a thread computes the mask
        self.is_slow = False  # whether the last mask was
        self.drafts: _DraftMasks | None = None  # the masks of the last step with drafts, if any

    def is_for(self, spec: SampleSpec) -> bool:
        if self.mask is not None and not self.mask.done() and spec.output != self.seen:
            return False  # the matcher is in use
        return self.grammar == spec.grammar and spec.output[: len(self.seen)] == self.seen

    def start(self, threads: "MaskThreads", output: tuple[int, ...]) -> None:
        """Compute the mask after `output`, unless that has already begun."""
        if self.mask is None or output != self.seen:
            unread, self.seen = output[len(self.seen) :], output
            pool = threads.masking(is_slow=self.is_slow)
            self.mask = pool.submit(self._compute, unread, threads, self.is_slow)

    @property
    def is_overdue(self) -> bool:
        clock = self.clock
        if clock is None:
            return False
        return clock.seconds > MASK_SECONDS or clock.age > WITHOUT_CORE * MASK_SECONDS

    def _compute(self, unread: tuple[int, ...], threads: "MaskThreads", was_slow: bool) -> Mask:
        self.clock = clock = ThreadClock()
        try:
            if was_slow:
                threads.reading.submit(threads.read_slowly, self.matcher, unread).result()
            else:
                threads.read(self.matcher, unread)
            return self.matcher.mask()
        finally:
            self.clock = None
            self.is_slow = clock.seconds > threads.wait_seconds


class _DraftMasks:
    """The masks after each draft of a request, computed one after the other in a thread."""

    def __init__(self, matcher: Matcher, drafts: tuple[int, ...]) -> None:
        self._matcher = matcher
        self._drafts = drafts
        self._masks: list[Mask] = []
        self._has_ended = False
        self._changed = threading.Condition()

    def mask(self, num_drafts: int, deadline: float) -> Mask | None:
        """The mask after so many drafts; None if it is not there by the deadline."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._has_ended or len(self._masks) >= num_drafts, _seconds_until(deadline)
            )
            return self._masks[num_drafts - 1] if num_drafts <= len(self._masks) else None

    def end(self) -> None:
        """Compute no more masks; the request's matcher is not used any more."""
        with self._changed:
            self._has_ended = True
            self._changed.notify()

    def compute(self) -> None:
        """Compute the masks, up to a draft that the grammar does not allow."""
        try:
            with self._changed:
                copied = None if self._has_ended else self._matcher.copy()
            for draft in self._drafts:
                if copied is None or self._has_ended:
                    return
                copied.feed((draft,))
                mask = copied.mask()
                with self._changed:
                    self._masks.append(mask)
                    self._changed.notify()
        except GrammarError:
            return  # the row before cannot sample this draft
        finally:
            self.end()


class _MaskJob(NamedTuple):
    """A row that needs a mask; `position` is None while its grammar is being compiled. `num_drafts`
    of its request's drafts are before the row."""

    row: int
    request_id: RequestId
    spec: SampleSpec
    compiled: "Future[Matcher] | None"
    position: _MatcherPosition | None
    num_drafts: int = 0


@dataclass(frozen=True, slots=True)
class MaskRequest:
    """The constrained rows of one step, which samples `num_rows` tokens."""

    rows: list[_MaskJob] = field(default_factory=list)
    num_rows: int = 0
    begun_at: float = field(default_factory=time.perf_counter)

    @property
    def wait_seconds(self) -> float:
        """Seconds that the step still waits for late rows: a share of its time so far."""
        share = MASK_WAIT_SHARE * (time.perf_counter() - self.begun_at)
        return min(max(share, MIN_WAIT_SECONDS), MASK_WAIT_SECONDS)


@dataclass(slots=True)
class _Collected:
    """The outcome of each row, by number."""

    allowed: dict[int, Mask] = field(default_factory=dict)
    faults: dict[int, RowFault] = field(default_factory=dict)
    late: dict[int, _MaskJob] = field(default_factory=dict)


class Constraints:
    """Computes grammar masks with the compiler that `open_compiler` opens.

    The first row with a grammar opens it: opening takes a second of CPU time and 120 MiB for
    151,000 tokens, which a start and a server without grammars need not spend. It holds the GIL
    several times, each for less than half a second, so it has a thread of the usual priority.
    """

    def __init__(self, open_compiler: Callable[[], GrammarCompiler]) -> None:
        self._open_compiler = open_compiler
        self._opened: Future[GrammarCompiler] | None = None
        self._compiling = ThreadPoolExecutor(COMPILE_THREADS, "grammar", lower_thread_priority)
        self._threads = MaskThreads()
        self._compiled: OrderedDict[Grammar, Future[Matcher]] = OrderedDict()
        self._slow_to_compile: WeakSet[Future[Matcher]] = WeakSet()
        self._positions: OrderedDict[RequestId, _MatcherPosition] = OrderedDict()

    def _open(self) -> "Future[GrammarCompiler]":
        """Open the compiler, once; errors are those of the first mask."""
        if self._opened is None:
            opening = ThreadPoolExecutor(1, "open grammars")
            self._opened = opening.submit(self._open_compiler)
            opening.shutdown(wait=False)
        return self._opened

    def begin(self, step: Step) -> MaskRequest:
        """Start computing the masks of a step whose tokens are all known."""
        specs = [
            (entry.request_id, entry.sample) for entry in step.entries if entry.sample is not None
        ]
        rows: list[_MaskJob] = []
        if all(spec.grammar is None for _, spec in specs):
            self._threads.has_others = bool(specs)
            return MaskRequest(rows, len(specs))
        self._threads.has_others = not all(self._was_slow(request_id) for request_id, _ in specs)
        for request_id, group in groupby(enumerate(specs), lambda numbered: numbered[1][0]):
            places = [(row, spec) for row, (_, spec) in group]
            (row, spec), behind = places[0], places[1:]
            if spec.grammar is None:
                continue
            job = self._want(row, request_id, spec)
            rows.append(job)
            rows += [
                job._replace(row=row, num_drafts=count) for count, (row, _) in enumerate(behind, 1)
            ]
            if behind and job.position is not None:
                self._start_drafts(job.position, behind[-1][1].output[len(spec.output) :])
        return MaskRequest(rows, len(specs))

    def _start_drafts(self, position: _MatcherPosition, drafts: tuple[int, ...]) -> None:
        """Compute the masks after each draft, once the mask before the first one is there."""
        assert position.mask is not None, "the mask before the drafts is being computed"
        masks = position.drafts = _DraftMasks(position.matcher, drafts)
        pool = self._threads.masking(is_slow=position.is_slow)
        position.mask.add_done_callback(lambda _: pool.submit(masks.compute))

    def collect(self, wanted: MaskRequest) -> Masks:
        """The masks, waited for; rows that may be late are waited for only briefly."""
        if not wanted.rows:
            return NO_MASKS
        found = _Collected()
        wait_seconds = self._threads.wait_seconds = wanted.wait_seconds
        deadline = time.perf_counter() + wait_seconds
        for one in wanted.rows:
            self._collect_row(one, 0.0 if self._is_slow(one) else deadline, found)
        if len(found.late) == wanted.num_rows:  # no row has a token otherwise
            late = [one for one in found.late.values() if not one.num_drafts]
            wait(map(self._pending, late), MASK_WAIT_SECONDS_ALONE, FIRST_COMPLETED)
            for one in late:
                self._collect_row(found.late.pop(one.row), 0.0, found)
        for one in wanted.rows:
            if one.position is not None and one.position.drafts is not None:
                one.position.drafts.end()
        return Masks(found.allowed, found.faults, frozenset(found.late))

    def _collect_row(self, one: _MaskJob, deadline: float, found: "_Collected") -> None:
        """The row's mask, waited for until `deadline` if it may be late."""
        try:
            mask = (self._draft_mask if one.num_drafts else self._mask)(one, deadline)
        except (GrammarError, EngineError) as error:
            line = f"grammar: {error}"
            fault = RowFault(line, is_caller_error=isinstance(error, GrammarError))
            found.faults[one.row] = fault
            return
        if mask is not None:
            found.allowed[one.row] = mask
            return
        found.late[one.row] = one
        if one.num_drafts:
            return
        if (position := self._positions.get(one.request_id)) is not None:
            position.is_slow = True
        elif one.compiled is not None:
            self._slow_to_compile.add(one.compiled)

    def _pending(self, one: _MaskJob) -> "Future[object]":
        """What a late row waits for: its mask, or else its grammar."""
        position = self._positions.get(one.request_id)
        future = one.compiled if position is None else position.mask
        assert future is not None, "a late row waits for its grammar or for its mask"
        return cast("Future[object]", future)

    def _is_slow(self, one: _MaskJob) -> bool:
        """Whether the row was waited for in vain: for its grammar, or for its last mask."""
        if one.position is None:
            return one.compiled in self._slow_to_compile
        return one.position.is_slow

    def _was_slow(self, request_id: RequestId) -> bool:
        """Whether the last mask of the request was slow."""
        position = self._positions.get(request_id)
        return position is not None and position.is_slow

    def _want(self, row: int, request_id: RequestId, spec: SampleSpec) -> _MaskJob:
        position = self._positions.pop(request_id, None)
        if position is None or not position.is_for(spec):
            assert spec.grammar is not None, "only constrained rows are wanted"
            compiled = self._compile(spec.grammar)
            if not compiled.done() or compiled.exception() is not None:
                return _MaskJob(row, request_id, spec, compiled, None)
            position = _MatcherPosition(spec.grammar, compiled.result().copy())
        self._start(request_id, position, spec)
        return _MaskJob(row, request_id, spec, None, position)

    def _draft_mask(self, one: _MaskJob, deadline: float) -> Mask | None:
        """The mask of a row behind drafts; None if it cannot be used in this step."""
        if one.position is None or one.position.drafts is None:
            return None
        return one.position.drafts.mask(one.num_drafts, deadline)

    def _mask(self, one: _MaskJob, deadline: float) -> Mask | None:
        """The mask; None if the row is late. Raises `GrammarError`; the matcher is then unusable.

        Rows that may be late are waited for until `deadline`.
        """
        position = one.position
        if position is None:
            assert one.compiled is not None, "a row waits for its grammar or for its mask"
            assert one.spec.grammar is not None, "only constrained rows are wanted"
            wait([one.compiled], _seconds_until(deadline) if one.spec.may_be_late else None)
            if not one.compiled.done():
                return None
            position = _MatcherPosition(one.spec.grammar, one.compiled.result().copy())
            self._start(one.request_id, position, one.spec)
        assert position.mask is not None, "the mask is being computed"
        if one.spec.may_be_late:
            wait([position.mask], _seconds_until(deadline))
            if not position.mask.done() and not position.is_overdue:
                return None
        else:
            wait([position.mask], MASK_SECONDS)
        # This process may have been suspended meanwhile: its threads get a last chance.
        wait([position.mask], MASK_WAIT_SECONDS)
        if not position.mask.done():
            self._positions.pop(one.request_id, None)
            raise GrammarError(f"the allowed tokens cannot be computed within {MASK_SECONDS:g} s")
        return position.mask.result()

    def _start(self, request_id: RequestId, position: _MatcherPosition, spec: SampleSpec) -> None:
        self._keep(request_id, position)
        position.start(self._threads, spec.output)

    def _keep(self, request_id: RequestId, position: _MatcherPosition) -> None:
        self._positions[request_id] = position
        if len(self._positions) > MAX_MATCHERS:
            self._positions.popitem(last=False)

    def _compile(self, grammar: Grammar) -> "Future[Matcher]":
        compiled = self._compiled.pop(grammar, None)
        if compiled is None:
            opened = self._open()
            compiled = self._compiling.submit(lambda: opened.result().compile(grammar))
        self._compiled[grammar] = compiled
        if len(self._compiled) > MAX_GRAMMARS:
            self._compiled.popitem(last=False)
        return compiled


def _seconds_until(deadline: float) -> float:
    return max(0.0, deadline - time.perf_counter())
