"""Masks of constrained rows, computed in threads beside the forward pass. Only on the last stage.

    begin(step) ──mask threads──▶ … the layers run … ──▶ collect(wanted)

Each request has a place in its grammar: a matcher and the tokens it has seen. Places are a cache.
A request's output comes with every draw, so a place that is missing or was made for another output
(after a preemption, in a new worker) is made again. A grammar is compiled in one more thread; a
request whose grammar is not ready is late: its batch mates do not wait for it, and its token
is drawn in a later step.
"""

import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.errors import EngineError
from engine.grammar import GrammarCompiler, GrammarError, Mask, Matcher
from engine.step import Grammar, RequestId, SampleSpec, Step
from engine.worker.sampling.sampler import Masks, RowFault

MASK_THREADS = 2
MAX_GRAMMARS = 64  # compiled ones that are kept
MAX_PLACES = 512
PATIENCE = 0.005  # seconds that batch mates wait for grammars in the making
PATIENCE_ALONE = 0.1  # the same where nobody else is in the batch


class _MatcherPosition:
    """Where one output stands in its grammar; `seen` are its tokens up to there."""

    __slots__ = ("grammar", "matcher", "seen")

    def __init__(self, grammar: Grammar, matcher: Matcher) -> None:
        self.grammar = grammar
        self.matcher = matcher
        self.seen: tuple[int, ...] = ()

    def is_for(self, draw: SampleSpec) -> bool:
        return self.grammar == draw.grammar and draw.output[: len(self.seen)] == self.seen

    def mask(self, output: tuple[int, ...]) -> Mask:
        self.matcher.feed(output[len(self.seen) :])
        self.seen = output
        return self.matcher.mask()


class _MaskJob(NamedTuple):
    """A row whose mask is wanted; `mask` None while its grammar is being compiled."""

    row: int
    request_id: RequestId
    draw: SampleSpec
    compiled: "Future[Matcher] | None"
    mask: "Future[Mask] | None"


@dataclass(frozen=True, slots=True)
class MaskRequest:
    """The constrained rows of one step, of `num_rows` that draw."""

    rows: list[_MaskJob] = field(default_factory=list)
    num_rows: int = 0


class Constraints:
    """Computes what grammars allow, over what `open_compiler` opens.

    Opening reads the vocabulary, which holds the interpreter's lock for long: `open` does it
    before there are steps that it could hold up.
    """

    def __init__(self, open_compiler: Callable[[], GrammarCompiler]) -> None:
        self._open_compiler = open_compiler
        self._opened: Future[GrammarCompiler] | None = None
        self._compiling = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._masking = ThreadPoolExecutor(MASK_THREADS, thread_name_prefix="mask")
        self._compiled: OrderedDict[Grammar, Future[Matcher]] = OrderedDict()
        self._places: OrderedDict[RequestId, _MatcherPosition] = OrderedDict()

    def open(self) -> "Future[GrammarCompiler]":
        """Open the compiler, once, in the thread that compiles."""
        if self._opened is None:
            self._opened = self._compiling.submit(self._open_compiler)
        return self._opened

    def wait_until_open(self) -> None:
        """Return when what `open` began is done; what went wrong is told to who asks for masks."""
        if self._opened is not None:
            wait([self._opened])

    def begin(self, step: Step) -> MaskRequest:
        """Start on the masks of a step whose tokens are all known."""
        draws = [
            (entry.request_id, entry.sample) for entry in step.entries if entry.sample is not None
        ]
        rows = [
            self._want(row, request_id, draw)
            for row, (request_id, draw) in enumerate(draws)
            if draw.grammar is not None
        ]
        return MaskRequest(rows, len(draws))

    def collect(self, wanted: MaskRequest) -> Masks:
        """The masks, waited for; who may come late is given little time."""
        if not wanted.rows:
            return Masks()
        is_alone = len(wanted.rows) == wanted.num_rows
        deadline = time.perf_counter() + (PATIENCE_ALONE if is_alone else PATIENCE)
        allowed: dict[int, Mask] = {}
        faults: dict[int, RowFault] = {}
        late: set[int] = set()
        for one in wanted.rows:
            if one.compiled is not None and one.draw.may_be_late:
                wait([one.compiled], max(0.0, deadline - time.perf_counter()))
                if not one.compiled.done():
                    late.add(one.row)
                    continue
            try:
                allowed[one.row] = self._mask(one)
            except (GrammarError, EngineError) as error:
                line = f"its grammar: {error}"
                faults[one.row] = RowFault(line, is_caller_error=isinstance(error, GrammarError))
        return Masks(allowed, faults, frozenset(late))

    def _want(self, row: int, request_id: RequestId, draw: SampleSpec) -> _MaskJob:
        place = self._places.pop(request_id, None)
        if place is None or not place.is_for(draw):
            assert draw.grammar is not None, "only constrained rows are wanted"
            compiled = self._compile(draw.grammar)
            if not compiled.done() or compiled.exception() is not None:
                return _MaskJob(row, request_id, draw, compiled, None)
            place = _MatcherPosition(draw.grammar, compiled.result().copy())
        self._keep(request_id, place)
        mask = self._masking.submit(place.mask, draw.output)
        return _MaskJob(row, request_id, draw, None, mask)

    def _mask(self, one: _MaskJob) -> Mask:
        """Raises `GrammarError`; the place is then of no use."""
        if one.mask is None:
            assert one.compiled is not None, "a row waits for its grammar or for its mask"
            assert one.draw.grammar is not None, "only constrained rows are wanted"
            place = _MatcherPosition(one.draw.grammar, one.compiled.result().copy())
            self._keep(one.request_id, place)
            return place.mask(one.draw.output)
        return one.mask.result()

    def _keep(self, request_id: RequestId, place: _MatcherPosition) -> None:
        self._places[request_id] = place
        if len(self._places) > MAX_PLACES:
            self._places.popitem(last=False)

    def _compile(self, grammar: Grammar) -> "Future[Matcher]":
        compiled = self._compiled.pop(grammar, None)
        if compiled is None:
            opened = self.open()
            compiled = self._compiling.submit(lambda: opened.result().compile(grammar))
        self._compiled[grammar] = compiled
        if len(self._compiled) > MAX_GRAMMARS:
            self._compiled.popitem(last=False)
        return compiled
