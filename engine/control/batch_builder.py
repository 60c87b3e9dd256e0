"""Draft: the iteration in the making, with the seats and tokens that are left in it."""

from typing import TYPE_CHECKING

from engine.iteration import NO_SWAPS, Iteration, Swaps
from engine.step import LAST_TOKEN, PromptTargets, SampleSpec, Step, StepEntry, StepId

if TYPE_CHECKING:
    from engine.kv.ledger import KVLedger
    from engine.request import Request


class BatchBuilder:
    """Collects entries up to `seats` requests and `tokens_left` tokens; decodes go first.

    `ahead` are requests in flight that may be taken all the same; who is looked at leaves it.
    """

    def __init__(self, seats: int, tokens: int, ahead: "set[Request]") -> None:
        self.seats = seats
        self.tokens_left = tokens
        self.ahead = ahead
        self.passed: list[Request] = []  # wanted to be admitted and did not fit
        self.num_skipped = 0  # ready, looked at and not taken
        self.has_suspect = False
        self.least_crashes = 0  # that a suspect may have seen to be let in
        self.is_cut = False  # a prompt's piece was made short for the others' sake
        self._decodes: list[tuple[Request, StepEntry]] = []
        self._prefills: list[tuple[Request, StepEntry]] = []

    @property
    def is_full(self) -> bool:
        return self.seats == 0

    @property
    def is_late(self) -> bool:
        """Whether there is no time for another prompt."""
        return self.is_cut and bool(self._prefills)

    def keeps_apart(self, suspect: "Request") -> bool:
        """Whether a suspect has to wait for another one."""
        return self.has_suspect or suspect.num_crashes > self.least_crashes

    def add(
        self, request: "Request", num_tokens: int, ledger: "KVLedger", *, is_last: bool
    ) -> None:
        """Take the next `num_tokens` tokens of a request whose slots are reserved; after the last
        that it has, one is drawn."""
        start = request.num_planned
        stop = start + num_tokens
        is_held = is_last and request.num_pending > 0
        is_decode = is_held or (num_tokens == 1 and is_last and bool(request.output))
        if is_held:
            tokens: tuple[int, ...] = (LAST_TOKEN,)
        else:
            tokens = (request.output[-1],) if is_decode else request.tokens(start, stop)
        draw = request.fixed_draw or _num_samples(request) if is_last else None
        blocks = ledger.table(request.request_id)
        entry = StepEntry(request.request_id, start, tokens, blocks, draw)
        if request.spec.prompt_logprobs is not None:
            entry = entry._replace(prompt_logprobs=_targets(request, start, stop))
        (self._decodes if is_decode else self._prefills).append((request, entry))
        self.seats -= 1
        self.tokens_left -= num_tokens
        request.num_planned = stop
        request.num_in_flight += 1
        request.num_pending += is_last
        if request.num_crashes:
            self.has_suspect = True

    @property
    def is_empty(self) -> bool:
        return not self._decodes and not self._prefills

    def iteration(self, step_id: StepId, swaps: Swaps = NO_SWAPS) -> Iteration:
        """What was collected, with the moves that go with it."""
        parts = self._decodes + self._prefills
        entries = tuple([entry for _, entry in parts])
        requests = tuple([request for request, _ in parts])
        return Iteration(Step(step_id, entries, swaps.moves), requests, swaps.riders)


def _num_samples(request: "Request") -> SampleSpec:
    spec = request.spec
    sampling = spec.sampling
    is_constrained = spec.grammar is not None
    if not spec.min_tokens and not sampling.reads_output and not is_constrained:
        request.fixed_draw = SampleSpec(sampling, logprobs=spec.logprobs)
        return request.fixed_draw
    is_early = request.produced + request.num_pending < spec.min_tokens
    banned = spec.end_ids if is_early else spec.avoided_ids
    return SampleSpec(
        sampling=sampling,
        banned=tuple(sorted(banned)),
        prompt=spec.prompt if sampling.repetition_penalty != 1.0 else (),
        output=tuple(request.output) if sampling.reads_output or is_constrained else (),
        logprobs=spec.logprobs,
        grammar=spec.grammar,
        end_ids=tuple(sorted(spec.end_ids)) if is_constrained else (),
        may_be_late=request.awaits_grammar,
    )


def _targets(request: "Request", start: int, stop: int) -> PromptTargets | None:
    """The prompt's tokens after positions `[start, stop)`, without those told before."""
    first = max(start, len(request.prompt_logprobs))
    ids = request.spec.prompt[first + 1 : stop + 1]
    top = request.spec.prompt_logprobs
    return None if top is None or not ids else PromptTargets(top, first - start, ids)
