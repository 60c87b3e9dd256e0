"""BatchBuilder: the iteration being planned, with the seats and tokens that are left in it."""

from math import inf

from engine.control.images import Images
from engine.iteration import NO_SWAPS, Iteration, Swaps
from engine.kv.cache import KVCache
from engine.media import EncoderWork, replaced
from engine.request import Request, RequestSpec
from engine.step import (
    LAST_TOKEN,
    OUTPUT_KEPT_STEPS,
    PromptTargets,
    ProposalSpec,
    SampleSpec,
    Step,
    StepEntry,
    StepId,
)

PENDING = (LAST_TOKEN,)
REST = tuple(StepEntry._field_defaults.values())[1:]  # the defaults behind `prompt_logprobs`


class BatchBuilder:
    """Collects entries for up to `seats` requests and `tokens_left` tokens; decodes go first.

    `ahead` are requests in flight that may be planned again (lookahead). A request is removed from
    it once it has been considered.
    """

    def __init__(
        self, step_id: StepId, seats: int, tokens: int, ahead: dict[Request, None]
    ) -> None:
        self.step_id = step_id
        self.seats = seats
        self.tokens_left = self._max_tokens = tokens
        self.ahead = ahead
        self.not_admitted: list[Request] = []  # considered for admission, and did not fit
        self.num_held = 0  # waiting requests that the policy has put behind others in this plan
        self.num_skipped = 0  # ready requests that were considered and not taken
        self.has_suspect = False
        self.least_crashes = 0  # a suspect with more crashes is not taken
        self.is_deferred = False  # a request waits until more of its prefix is hashed
        self.is_cut = False  # a prompt's chunk was shortened for lack of time
        self.background_seconds: float | None = None  # see `BackgroundTime`
        self.looks_ahead = True  # so tokens that may be late are few
        self.decodes: list[tuple[Request, StepEntry]] = []  # `Proposals` changes them
        self.prefills: list[tuple[Request, StepEntry]] = []
        self.images: Images | None = None  # set if requests have images
        self.encodes: tuple[EncoderWork, ...] = ()
        self.dropped: tuple[int, ...] = ()
        self._has_loras = False

    @property
    def is_full(self) -> bool:
        return self.seats == 0

    @property
    def num_tokens(self) -> int:
        """The tokens in the batch."""
        return self._max_tokens - self.tokens_left

    def excludes(self, request: Request) -> bool:
        """Whether a request is a suspect that has to wait for another suspect."""
        crashes = request.num_crashes
        return crashes > 0 and (self.has_suspect or crashes > self.least_crashes)

    def add(self, request: Request, num_tokens: int, kv: KVCache, *, is_last: bool) -> None:
        """Add the next `num_tokens` tokens of a request whose slots are reserved. If they are the
        last of its known tokens (`is_last`), a token is sampled after them, or they are pooled."""
        spec, request_id, start = request.spec, request.request_id, request.num_planned
        stop = start + num_tokens
        rows = self.decodes
        if is_last and request.num_pending:  # continues with a token that is not sampled yet
            tokens: tuple[int, ...] = PENDING
        elif is_last and num_tokens == 1 and request.output:
            tokens = (request.output[-1],)
        else:
            rows, tokens = self.prefills, request.tokens(start, stop)
        samples = is_last and spec.pooling is None
        sample = request.samples.constant or self._sample_spec(request) if samples else None
        targets = None if spec.prompt_logprobs is None else _targets(request, start, stop)
        given = (request_id, start, tokens, kv.table(request_id), sample, targets)
        entry = tuple.__new__(StepEntry, given + REST)  # in half the time of StepEntry(*given)
        if not kv.keeps_all:
            entry = kv.extend(request, entry)
        if spec.lora is not None:
            entry = entry._replace(lora_id=spec.lora.lora_id)
            self._has_loras = True
        if spec.media and self.images is not None:
            entry = entry._replace(media=self.images.entry_media(request, start, stop))
        if is_last and not samples:
            entry = entry._replace(pooling=spec.pooling)
        rows.append((request, entry))
        self.seats -= 1
        self.tokens_left -= num_tokens
        request.num_planned = stop
        request.num_in_flight += 1
        request.num_pending += samples
        if request.num_crashes:
            self.has_suspect = True

    @property
    def has_prefills(self) -> bool:
        return bool(self.prefills)

    def add_drafts(self, index: int, drafts: tuple[int, ...], kv: KVCache) -> None:
        """Let decode number `index`, whose slots are reserved, compute these drafts too."""
        request, entry = self.decodes[index]
        entry = entry._replace(tokens=entry.tokens + drafts, num_drafts=len(drafts))
        self.decodes[index] = (request, kv.extend(request, entry, has_new_drafts=True))
        self.tokens_left -= len(drafts)
        request.num_planned += len(drafts)

    def add_proposal(self, index: int, spec: ProposalSpec, kv: KVCache) -> None:
        """Let the draft model propose tokens behind decode number `index`, whose slots are
        reserved."""
        request, entry = self.decodes[index]
        self.decodes[index] = (request, kv.extend(request, entry)._replace(proposal=spec))
        self.tokens_left -= len(spec.tokens)

    @property
    def is_empty(self) -> bool:
        return not self.decodes and not self.prefills

    def iteration(self, swaps: Swaps = NO_SWAPS, itl_goal: float = inf) -> Iteration:
        """The iteration with all collected entries and these KV moves.

        The decodes of one LoRA adapter follow one another, and so do its prefills, so that workers
        read its weights few times.
        """
        if self._has_loras:
            for group in (self.decodes, self.prefills):
                group.sort(key=lambda row: row[1].lora_id)
        rows = self.decodes + self.prefills
        entries = tuple([entry for _, entry in rows])
        requests = tuple([request for request, _ in rows])
        step = Step(self.step_id, entries, swaps.moves, self.encodes, self.dropped)
        return Iteration(step, requests, swaps.requests, swaps.saves, swaps.loads, itl_goal)

    def _sample_spec(self, request: Request) -> SampleSpec:
        """How to sample the request's next token; remembered if it is the same for all its tokens.

        What a penalty or a grammar reads is sent with the first token after the request got its
        KV. Later the worker has it, unless it has forgotten a request that long did not run.
        """
        spec, samples, sampled_at = request.spec, request.samples, request.samples.sampled_at
        is_kept = sampled_at is not None and self.step_id - sampled_at <= OUTPUT_KEPT_STEPS
        if samples.continuing is not None and is_kept and not self._may_be_late(request):
            samples.sampled_at = self.step_id
            return samples.continuing
        sampling = spec.sampling
        reads_output = sampling.reads_output or spec.grammar is not None
        if not spec.min_tokens and not reads_output:
            samples.constant = SampleSpec(sampling, logprobs=spec.logprobs)
            return samples.constant
        is_early = request.produced + request.num_pending < spec.min_tokens
        banned = tuple(sorted(spec.end_ids if is_early else spec.avoided_ids))
        if not reads_output:
            return SampleSpec(sampling, banned, logprobs=spec.logprobs)
        samples.sampled_at = self.step_id
        end_ids = tuple(sorted(spec.end_ids)) if spec.grammar is not None else ()
        may_be_late = self._may_be_late(request)
        if is_kept:
            sample = SampleSpec(
                sampling,
                banned,
                logprobs=spec.logprobs,
                end_ids=end_ids,
                may_be_late=may_be_late,
                continues=True,
            )
            if not spec.min_tokens and not may_be_late:
                samples.continuing = sample
            return sample
        return SampleSpec(
            sampling,
            banned,
            prompt=_text_ids(spec) if sampling.repetition_penalty != 1.0 else (),
            output=tuple(request.output),
            logprobs=spec.logprobs,
            grammar=spec.grammar,
            end_ids=end_ids,
            may_be_late=may_be_late,
        )

    def _may_be_late(self, request: Request) -> bool:
        """Whether the worker may report the request's next token as late."""
        if not self.looks_ahead or request.spec.grammar is None:
            return not self.looks_ahead
        return request.samples.may_be_late(request.produced + request.num_pending)


def _text_ids(spec: RequestSpec) -> tuple[int, ...]:
    """The prompt without the tokens that stand for images."""
    if not spec.media:
        return spec.prompt
    return tuple([token for token in replaced(spec.prompt, spec.media, None) if token is not None])


def _targets(request: Request, start: int, stop: int) -> PromptTargets | None:
    """The prompt tokens after positions `[start, stop)` whose log-probabilities are still to be
    computed; None if there are none."""
    first = max(start, len(request.prompt_logprobs))
    ids = request.spec.prompt[first + 1 : stop + 1]
    top = request.spec.prompt_logprobs
    return None if top is None or not ids else PromptTargets(top, first - start, ids)
