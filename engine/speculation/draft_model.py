"""DraftModelProposer: tokens that a small model in the worker proposes (`ProposalSpec`).

The worker proposes at the end of a step, so the number of tokens is decided when the step is
planned: as many as raise the expected tokens per second of the next iteration,

    (decodes + probabilities of the drafts) / (seconds with the drafts + seconds of the proposals)

The draft model has to compute the KV of a request's earlier tokens first. A few are computed with
the next proposals. Many, a prompt, are computed in pieces, if drafts will probably save more time
than that takes. Requests for which proposals do not pay are asked again now and then, within a
small share of the workers' time, so that better times are noticed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine.cost.live import MAX_ERROR, NEWS_SHARE, LiveCost
from engine.iteration import Iteration
from engine.request import Request
from engine.speculation.acceptance import AcceptanceRates
from engine.speculation.budget import ASK_SECONDS, DRAFT_SECONDS, SHARE
from engine.speculation.gain import MAX_SLOWDOWN, MIN_GAIN
from engine.speculation.proposers import NO_PROPOSAL, Proposal
from engine.step import ProposalSpec, RequestId, StepEntry, StepResult

PLAN_SHARE = SHARE / 2  # workers' time to plan and to probe, while proposals do not pay
# Swept in results/constants
MIN_PIECE = 32  # tokens of a prompt; as many missing tokens are computed with the proposals
PROBE_DRAFTS = 3
FIRST_PROBES = 6  # probes that need no credit, so that a server soon knows the rates
MAX_PROBED = 512  # missing tokens of a request that is probed without credit
MAX_CREDIT = 1.0  # seconds


class Candidate(NamedTuple):
    """A decode that the draft model may propose tokens for, with the probabilities that the first
    1, 2, … of them are right."""

    place: int  # among the decodes
    request: Request
    entry: StepEntry
    probabilities: Sequence[float]
    num_missing: int  # tokens before the entry's own whose KV the draft model has not computed

    def spec(self, count: int, num_tokens: int | None = None) -> ProposalSpec:
        """Compute the missing tokens, or that many of them, and propose `count`."""
        start = min(self.request.num_drafted, self.entry.start)
        stop = self.entry.start if num_tokens is None else start + num_tokens
        return ProposalSpec(count, start, self.request.tokens(start, stop))


@dataclass(frozen=True, slots=True)
class _Proposed:
    """Tokens that were proposed after the first `produced` tokens of the output."""

    produced: int
    tokens: tuple[int, ...]


class DraftModelProposer:
    """Keeps the draft model's proposals, and decides how many it makes."""

    name = "draft_model"

    def __init__(self, cost: LiveCost, size_ratio: float) -> None:
        """`size_ratio` is that of the draft model's parameters to the model's."""
        self._cost = cost
        self._ratio = size_ratio  # seconds of a pass divided by those of a step of as many tokens
        self._proposed: dict[RequestId, _Proposed] = {}
        self._in_flight: set[RequestId] = set()
        self._probe_credit = 0.0  # seconds, to probe requests with
        self._num_free_probes = FIRST_PROBES
        self._plan_credit = 0.0  # seconds, likewise
        self._pays_now = True  # whether proposals paid in the last plan; the first one finds out
        self._first = 0  # the candidate at which the next probe begins to look

    # The port of proposers

    def propose(self, request: Request, count: int) -> Proposal:
        """What is left of the last proposal, if the output has followed it."""
        proposed = self._proposed.get(request.request_id)
        if proposed is None:
            return NO_PROPOSAL
        since = tuple(request.output[proposed.produced :])
        if since != proposed.tokens[: len(since)]:
            return NO_PROPOSAL
        return Proposal(proposed.tokens[len(since) :][:count], 1 + len(since))

    def forget(self, request: Request) -> None:
        self._proposed.pop(request.request_id, None)
        self._in_flight.discard(request.request_id)

    # Results

    def is_proposing(self, request: Request) -> bool:
        """Whether an iteration in flight proposes tokens for the request."""
        return request.request_id in self._in_flight

    @property
    def proposes(self) -> bool:
        """Whether an iteration in flight proposes tokens for any request."""
        return bool(self._in_flight)

    @property
    def has_proposals(self) -> bool:
        """Whether tokens were proposed for any request."""
        return bool(self._proposed)

    def has_proposal(self, request: Request) -> bool:
        """Whether tokens were proposed that have not been looked up yet; older ones are dropped."""
        proposed = self._proposed.get(request.request_id)
        if proposed is None:
            return False
        if 0 <= request.produced - proposed.produced < len(proposed.tokens):
            return True
        del self._proposed[request.request_id]
        return False

    def sent(self, request: Request, spec: ProposalSpec) -> None:
        """An iteration with this spec was planned."""
        if spec.num_tokens:
            self._in_flight.add(request.request_id)

    def committed(self, iteration: Iteration, result: StepResult) -> None:
        """The iteration's output was appended: keep the tokens that were proposed behind it, learn
        what that took, and allow as much probing and planning as a share of the time."""
        self._probe_credit = min(MAX_CREDIT, self._probe_credit + PLAN_SHARE * result.seconds)
        self._plan_credit = min(MAX_CREDIT, self._plan_credit + PLAN_SHARE * result.seconds)
        if not result.proposals:
            return
        late, proposals = set(result.late), iter(result.proposals)
        specs: list[ProposalSpec] = []
        num_fed = 0
        rows = zip(iteration.step.entries, iteration.requests, strict=True)
        for number, (entry, request) in enumerate(rows):
            if (spec := entry.proposal) is None:
                continue
            specs.append(spec)
            self._keep(request, next(proposals))
            if not request.is_started:
                continue  # it has ended, or lost its KV
            request.num_drafted = min(spec.start + len(spec.tokens), request.num_computed)
            if spec.num_tokens and number not in late:
                num_fed += 1 + request.num_computed - entry.start
                request.num_drafted = request.num_computed
        self._learn(specs, num_fed, result.proposal_seconds)

    def _keep(self, request: Request, tokens: tuple[int, ...]) -> None:
        self._in_flight.discard(request.request_id)
        if tokens and request.is_started:
            self._proposed[request.request_id] = _Proposed(request.produced, tokens)

    def _learn(self, specs: Sequence[ProposalSpec], num_fed: int, seconds: float) -> None:
        """The draft model took `seconds` for these specs, and for `num_fed` tokens of the step."""
        if seconds <= 0.0:
            return
        deepest = max([spec.num_tokens for spec in specs])
        rows = [sum([spec.num_tokens > depth for spec in specs]) for depth in range(1, deepest)]
        first = sum([len(spec.tokens) for spec in specs]) + num_fed
        predicted = self._pass_seconds(first, rows)
        ratio = self._ratio * seconds / predicted
        self._ratio += NEWS_SHARE * (min(ratio, MAX_ERROR * self._ratio) - self._ratio)

    def lost(self) -> None:
        """The worker died: no iteration in flight will return."""
        self._in_flight.clear()

    # Planning

    def candidates(
        self,
        decodes: Sequence[tuple[Request, StepEntry]],
        rates_of: Callable[[Request], AcceptanceRates],
        num_drafts: int,
    ) -> list[Candidate]:
        """The decodes that at most `num_drafts` tokens can be proposed for. Background requests are
        among them only if there are no others."""
        candidates: list[Candidate] = []
        only_background = all(request.spec.is_background for request, _ in decodes)
        for place, (request, entry) in enumerate(decodes):
            if request.spec.is_background and not only_background:
                continue
            limit = request.spec.max_tokens - request.produced - request.num_pending - 1
            limit = min(num_drafts, limit - entry.num_drafts)
            if limit > 0 and entry.sample is not None:
                probabilities = rates_of(request).cumulative(1, limit)
                num_missing = max(0, entry.start - request.num_drafted)
                candidates.append(Candidate(place, request, entry, probabilities, num_missing))
        return candidates

    def may_plan(self, num_decodes: int) -> bool:
        """Whether to plan for an iteration of so many decodes: always while proposals pay, else as
        often as the credit allows."""
        if self._pays_now:
            return True
        seconds = DRAFT_SECONDS * num_decodes
        if self._plan_credit < seconds:
            return False
        self._plan_credit -= seconds
        return True

    def plan(
        self,
        candidates: list[Candidate],
        num_rows: int,
        seconds: float,
        most: int,
        max_seconds: float,
    ) -> dict[int, ProposalSpec]:
        """What the draft model does in an iteration of `num_rows` rows that takes `seconds`, by the
        place of the decode. The iteration computes at most `most` more tokens, and takes at most
        `max_seconds`."""
        ready = [decode for decode in candidates if decode.num_missing <= MIN_PIECE]
        num_missing = sum(decode.num_missing for decode in ready)
        depth = self._depth(ready, num_rows, seconds, max_seconds) if num_missing <= most else 0
        specs = {
            decode.place: decode.spec(min(depth, len(decode.probabilities)))
            for decode in ready
            if depth and decode.probabilities
        }
        if specs or len(ready) < len(candidates):
            left = min(
                max_seconds - seconds, seconds * (MAX_SLOWDOWN - 1.0 if num_rows > 1 else 1.0)
            )
            behind = [decode for decode in candidates if decode.num_missing > MIN_PIECE]
            specs |= self._pieces(behind, num_rows, seconds, most - num_missing, left)
        self._pays_now = bool(specs)
        return specs or self._probe(candidates, most)

    def _depth(
        self, ready: list[Candidate], num_rows: int, seconds: float, max_seconds: float
    ) -> int:
        """How many tokens to propose for each of these decodes; 0 if none pay."""
        model = self._cost.model
        missing = sum(decode.num_missing for decode in ready)
        expected, best, best_rate = float(num_rows), 0, MIN_GAIN * num_rows / max(seconds, 1e-9)
        rows: list[int] = []
        num_drafts = 0
        for depth in range(max((len(decode.probabilities) for decode in ready), default=0)):
            deep = [decode for decode in ready if len(decode.probabilities) > depth]
            expected += sum(decode.probabilities[depth] for decode in deep)
            num_drafts += len(deep)
            rows.append(len(deep))
            verifying = model.tokens(num_rows + num_drafts) - model.tokens(num_rows)
            verifying += num_drafts * (model.per_draw + ASK_SECONDS)
            drafting = self._pass_seconds(missing + 2 * rows[0], rows[1:])
            total = seconds + verifying + drafting
            if total > max_seconds:
                break
            if expected / total > best_rate:
                best, best_rate = depth + 1, expected / total
        return best

    def _pieces(
        self, behind: list[Candidate], num_rows: int, seconds: float, most: int, max_seconds: float
    ) -> dict[int, ProposalSpec]:
        """Pieces of prompts for the draft model to compute, as far as they pay."""
        specs: dict[int, ProposalSpec] = {}
        for decode in behind:
            if most < MIN_PIECE or max_seconds <= 0.0:
                break
            if not self._pays(decode, num_rows, seconds):
                continue
            count = min(decode.num_missing, most)
            while count > MIN_PIECE and self._pass_seconds(count, ()) > max_seconds:
                count //= 2
            specs[decode.place] = decode.spec(0, count)
            most -= count
            max_seconds -= self._pass_seconds(count, ())
        return specs

    def _pays(self, decode: Candidate, num_rows: int, seconds: float) -> bool:
        """Whether drafts will probably save more time than computing the request's prompt takes, if
        all requests of the iteration have as good ones."""
        model, gain, saved = self._cost.model, 1.0, 0.0
        for depth, probability in enumerate(decode.probabilities, 1):
            gain += probability
            slower = model.tokens(num_rows * (1 + depth)) - model.tokens(num_rows)
            slower += num_rows * depth * (model.per_draw + ASK_SECONDS)
            slower += self._pass_seconds(2 * num_rows, [num_rows] * (depth - 1))
            if gain * seconds > MIN_GAIN * (seconds + slower):
                saved = max(saved, (seconds - (seconds + slower) / gain) / num_rows)
        if saved <= 0.0:  # per token of the request
            return False
        expected = (decode.request.spec.max_tokens - decode.request.produced) / 2
        return saved * expected > self._pass_seconds(decode.num_missing, ())

    def _probe(self, candidates: list[Candidate], most: int) -> dict[int, ProposalSpec]:
        """Proposals for one request, if there is credit for them."""
        if not candidates:
            return {}
        self._first = (self._first + 1) % len(candidates)
        decode = candidates[self._first]
        seconds = self._pass_seconds(decode.num_missing + 2, [1] * (PROBE_DRAFTS - 1))
        is_free = self._num_free_probes > 0 and decode.num_missing <= MAX_PROBED
        if decode.num_missing > most or not (is_free or seconds <= self._probe_credit):
            return {}
        if is_free:
            self._num_free_probes -= 1
        else:
            self._probe_credit -= seconds
        return {decode.place: decode.spec(PROBE_DRAFTS)}

    def _pass_seconds(self, first: int, later: Sequence[int]) -> float:
        """Seconds of the draft model for a pass of `first` tokens, and passes of `later` tokens."""
        tokens = self._cost.model.tokens
        return self._ratio * (tokens(first) + sum([tokens(count) for count in later]))
