"""Drafter: how many drafts each decode of an iteration gets.

Each proposer's guess has a probability of being right, from the acceptance rates. Drafts are added
as long as they raise the expected tokens per second (`DraftGain`).

Guesses cost the event loop's time, and drafts may take longer than predicted. So requests without
drafts in their last iteration are asked in rotation, as often as the budget allows, and nothing is
done at all while it is spent (`SpeculationBudget`).
"""

from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from engine.events import Observer
from engine.speculation.acceptance import AcceptanceRates, DraftCounts
from engine.speculation.budget import SpeculationBudget
from engine.speculation.draft_model import Candidate as ProposalCandidate
from engine.speculation.draft_model import DraftModelProposer
from engine.speculation.gain import DraftGain, Guess
from engine.speculation.ngram import NgramProposer
from engine.speculation.prediction import PredictionProposer
from engine.speculation.proposers import NO_PROPOSAL, Proposal, Proposer
from engine.speculation.settings import MTP
from engine.speculation.suffix import SuffixProposer
from engine.step import LAST_TOKEN, ProposalSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from engine.cost.live import LiveCost
    from engine.iteration import Iteration
    from engine.ports import Clock
    from engine.request import Request
    from engine.speculation.settings import SpeculationSettings
    from engine.step import RequestId, StepEntry, StepId, StepResult

MIN_EXPECTED = 0.5  # accepted drafts for which a request is not planned ahead
CHECK_EVERY = 8  # iterations after which an inactive drafter sees whether it may be active
MAX_PAUSE = 31  # iterations in which requests are planned ahead, after drafts were not worth it

PROPOSERS: "dict[str, tuple[Callable[[SpeculationSettings], Proposer], ...]]" = {
    "ngram": (NgramProposer,),
    "suffix": (SuffixProposer,),
    "prediction": (),
    "draft_model": (),
    MTP: (),
}


@dataclass(slots=True)
class _Drafting:
    """What is known of one request: its rates by proposer, and its last guess."""

    rates: "dict[str, AcceptanceRates]" = field(default_factory=dict)
    proposals: "dict[str, Proposal]" = field(default_factory=dict)
    proposed_at: int = 0  # output tokens when they were made
    source: str = ""  # the proposer of the drafts in flight
    expected: "tuple[float, ...]" = ()  # the probabilities of the drafts in flight


class _Candidate(NamedTuple):
    """A guess for a decode, with the probabilities that its first 1, 2, … tokens are right."""

    place: int  # among the decodes
    drafting: _Drafting
    source: str
    tokens: tuple[int, ...]
    probabilities: list[float]


class Drafter(Observer):
    """Proposes and chooses drafts; observes the ends of requests."""

    def __init__(
        self,
        proposers: "Sequence[Proposer]",
        num_drafts: int,
        cost: "LiveCost",
        draft_model: DraftModelProposer | None = None,
        clock: "Clock | None" = None,
    ) -> None:
        """At most `num_drafts` per request and iteration; `draft_model` is one more proposer. The
        time of guesses is measured by `clock`, and estimated without one."""
        self.budget = SpeculationBudget(cost, clock)
        self.counts = DraftCounts(by_position=[0] * num_drafts)
        self._num_drafts = num_drafts
        self._gain = DraftGain(cost, self.budget)
        self._cost = cost
        self._draft_model = draft_model
        self._proposers = [*proposers, draft_model] if draft_model is not None else proposers
        self._rates = {proposer.name: AcceptanceRates() for proposer in self._proposers}
        self._draftings: dict[RequestId, _Drafting] = {}
        self.is_active = True  # whether the next iteration may have drafts or proposals
        self._num_inactive = 0  # iterations since it was found out
        self._asked: set[RequestId] = set()  # requests that had drafts, and are asked again
        self._speculates = False  # whether the iteration being planned has drafts or proposals
        self._in_flight: set[StepId] = set()  # steps that have
        self._num_accepted = 0  # in the iteration being committed
        self._first = 0  # the decode at which the next iteration begins to ask
        self._pause = 0  # iterations, the longer the more often drafts were not worth it
        self._num_paused = 0  # of them that are left

    @classmethod
    def build(
        cls,
        settings: "SpeculationSettings",
        cost: "LiveCost",
        size_ratio: float = 1.0,
        clock: "Clock | None" = None,
    ) -> "Drafter":
        """A drafter with the proposers of a method, and the one for predictions.

        `size_ratio` is that of the parameters of what proposes in the worker to the model's.
        """
        proposers = [new(settings) for new in PROPOSERS[settings.method]]
        draft_model = None
        if settings.model or settings.method == MTP:
            draft_model = DraftModelProposer(cost, size_ratio)
        every = [PredictionProposer(), *proposers]
        return cls(every, settings.num_drafts, cost, draft_model, clock)

    def choose(
        self, decodes: "Sequence[tuple[Request, StepEntry]]", most: int, max_seconds: float = inf
    ) -> dict[int, tuple[int, ...]]:
        """The drafts of an iteration that consists of these decodes, at most `most` in all, by the
        place of the decode. With them, the iteration takes at most `max_seconds`.

        Where not every decode has a guess, drafts do not delay the others' tokens much. Background
        requests have drafts only if there are no others.
        """
        if not self._may_find(bool(self._asked)):
            return {}
        self.budget.begin_asking()
        found = self._candidates(decodes)
        counts: dict[int, int] = {}
        if found:
            guesses = [Guess(each.place, each.probabilities) for each in found]
            starts = [entry.start for _, entry in decodes]
            counts = self._gain.counts(guesses, starts, most, max_seconds)
        chosen: dict[int, tuple[int, ...]] = {}
        for candidate in found:
            count = counts.get(candidate.place, 0)
            if count:
                candidate.drafting.source = candidate.source
                candidate.drafting.expected = tuple(candidate.probabilities[:count])
                self._asked.add(decodes[candidate.place][0].request_id)
                chosen[candidate.place] = candidate.tokens[:count]
        self.budget.end_asking(is_free=bool(chosen))
        if chosen:
            self._num_paused = self._pause = 0
        elif found:
            self._wait_longer()
        self._speculates = bool(chosen)
        return chosen

    def _may_find(self, has_asked: bool) -> bool:
        """Whether any request can have drafts now."""
        model = self._draft_model
        if model is not None and model.has_proposals:
            return True
        return self.budget.allows_ask or (has_asked and not self.budget.is_spent)

    def _candidates(self, decodes: "Sequence[tuple[Request, StepEntry]]") -> "list[_Candidate]":
        """The guesses for these decodes, as far as they may be asked."""
        found = []
        only_background = all(request.spec.is_background for request, _ in decodes)
        self._first = first = (self._first + 1) % max(1, len(decodes))
        for place in (*range(first, len(decodes)), *range(first)):
            if not self._may_find(bool(self._asked)):
                break
            request, entry = decodes[place]
            if request.spec.is_background and not only_background:
                continue
            if entry.sample is not None and entry.tokens[0] != LAST_TOKEN:
                candidate = self._candidate(place, request)
                if candidate is not None:
                    found.append(candidate)
        return found

    def waiting(self, oldest: "Iteration", ahead: "Collection[Request]") -> "set[Request]":
        """Which of the requests that could be planned ahead of the `oldest` iteration in flight
        wait for their tokens instead, because drafts will probably follow them.

        All of them do, so that the next iteration has them all, if drafts are worth that the worker
        waits for the event loop. Otherwise only those which expect more than the token that they
        miss. While drafts are not worth it, requests are planned ahead for longer and longer.
        """
        model = self._draft_model
        if model is not None and model.proposes:
            return {request for request in ahead if model.is_proposing(request)}
        if self.budget.wait_for == oldest.step.step_id:
            return set(ahead)  # as decided before
        if self._num_paused or not self._may_find(bool(self._asked)):
            return set()
        self.budget.begin_asking()
        hopeful = self._hopeful(ahead)
        for request, entry in zip(oldest.requests, oldest.step.entries, strict=True):
            if entry.num_drafts and request.request_id in self._draftings:
                hopeful[request] = self._draftings[request.request_id].expected
        self.budget.end_asking(is_free=False)
        if not hopeful:
            return set()
        if self._gain.is_worth_waiting(oldest, ahead, hopeful, self._num_drafts):
            self.budget.wait_for = oldest.step.step_id
            return set(ahead)
        few = {one for one in ahead if sum(hopeful.get(one, ())) >= 1.0 + MIN_EXPECTED}
        if len(few) in (0, len(ahead)):
            self._wait_longer()
            return set()
        self.budget.miss(len(few), ahead)
        return few

    def _wait_longer(self) -> None:
        """Drafts are not worth it: plan ahead for more iterations than the last time."""
        self._num_paused = self._pause = min(MAX_PAUSE, 2 * self._pause + 1)

    def _hopeful(self, requests: "Iterable[Request]") -> "dict[Request, Sequence[float]]":
        """Those of the requests that will probably have drafts behind the token in flight, with the
        probabilities of the drafts."""
        found: dict[Request, Sequence[float]] = {}
        for request in requests:
            if self._may_find(request.request_id in self._asked):
                candidate = self._candidate(len(found), request)
                if candidate is not None and sum(candidate.probabilities) >= MIN_EXPECTED:
                    candidate.drafting.source = candidate.source
                    self._asked.add(request.request_id)
                    found[request] = candidate.probabilities
        return found

    def returned(self, request: "Request", num_drafts: int, num_accepted: int) -> None:
        """The drafts of a request were verified."""
        drafting = self._draftings[request.request_id]
        if drafting.source == PredictionProposer.name:
            request.num_accepted_prediction += num_accepted
            request.num_rejected_prediction += num_drafts - num_accepted
        self._num_accepted += num_accepted
        counts = self.counts
        counts.num_entries += 1
        counts.num_drafts += num_drafts
        counts.num_accepted += num_accepted
        for position in range(num_accepted):
            counts.by_position[position] += 1

    def proposals(
        self,
        decodes: "Sequence[tuple[Request, StepEntry]]",
        most: int,
        max_seconds: float = inf,
    ) -> dict[int, ProposalSpec]:
        """What the draft model does in an iteration that consists of these decodes, by the place
        of the decode: it computes at most `most` tokens beside its proposals. With it, the
        iteration takes at most `max_seconds`."""
        if self._draft_model is None or self.budget.is_spent:
            return {}
        if not self._draft_model.may_plan(len(decodes)):
            return {}
        only_background = all(request.spec.is_background for request, _ in decodes)
        found = []
        for place, (request, entry) in enumerate(decodes):
            if request.spec.is_background and not only_background:
                continue
            limit = request.spec.max_tokens - request.produced - request.num_pending - 1
            limit = min(self._num_drafts, limit - entry.num_drafts)
            if limit > 0 and entry.sample is not None:
                rates = self._drafting(request).rates[DraftModelProposer.name]
                missing = max(0, entry.start - request.num_drafted)
                probabilities = rates.cumulative(1, limit)
                found.append(ProposalCandidate(place, request, entry, probabilities, missing))
        num_rows = sum([len(entry.tokens) for _, entry in decodes])
        seconds = self._gain.fixed_seconds([entry.start for _, entry in decodes])
        seconds += self._cost.model.tokens(num_rows)
        return self._draft_model.plan(found, len(decodes), seconds, most, max_seconds)

    def will_propose(self, request: "Request", spec: ProposalSpec) -> None:
        """The next iteration has this spec for the request."""
        self._speculates = True
        if self._draft_model is not None:
            self._draft_model.sent(request, spec)

    def _keep(self, iteration: "Iteration", result: "StepResult") -> None:
        """Keep what the draft model proposed, and learn what it took."""
        model = self._draft_model
        if model is None:
            return
        late = set(result.late)
        proposals, specs, num_fed = iter(result.proposals), [], 0
        for number, (entry, request) in enumerate(
            zip(iteration.step.entries, iteration.requests, strict=True)
        ):
            if (spec := entry.proposal) is None:
                continue
            specs.append(spec)
            tokens = next(proposals)
            model.returned(request, tokens)
            if not request.is_started:
                continue  # it has ended, or lost its KV
            request.num_drafted = min(spec.start + len(spec.tokens), request.num_computed)
            if spec.num_tokens and number not in late:
                num_fed += 1 + request.num_computed - entry.start
                request.num_drafted = request.num_computed
        model.learn(specs, num_fed, result.proposal_seconds)

    def worker_lost(self, now: float) -> None:
        """No iteration in flight will return."""
        self._in_flight.clear()
        if self._draft_model is not None:
            self._draft_model.lost()

    def sent(self, step_id: "StepId") -> None:
        """A step was planned; it is remembered if it has drafts or proposals."""
        if self._speculates:
            self._speculates = False
            self._in_flight.add(step_id)

    def dropped(self, iteration: "Iteration") -> None:
        """Forget an iteration that raised an error."""
        self._in_flight.discard(iteration.step.step_id)

    def iteration_took(self, iteration: "Iteration", result: "StepResult", now: float) -> None:
        """The iteration's result is committed: keep its proposals, and count its time. While
        nothing is active this does next to nothing."""
        seconds = result.seconds
        if result.proposals:
            self._keep(iteration, result)
        if self._num_paused:
            self._num_paused -= 1
        if self._draft_model is not None:
            self._draft_model.iteration_took(seconds)
        budget, step_id = self.budget, iteration.step.step_id
        if step_id in self._in_flight:
            self._in_flight.remove(step_id)
            budget.drafts_took(iteration, seconds, now, self._num_accepted)
            self._num_accepted = 0
        elif self.is_active or self._num_inactive % CHECK_EVERY:
            budget.iteration_took(iteration, seconds, now)
        else:
            budget.plain_took(iteration, seconds, now)
        if self.is_active or self._num_inactive % CHECK_EVERY == 0:
            self.is_active = self._may_speculate()
            self._num_inactive = 0
        self._num_inactive += 1

    def _may_speculate(self) -> bool:
        if self._draft_model is not None and not self.budget.is_spent:
            return True
        return self._may_find(bool(self._asked))

    def ended(self, request: "Request", now: float) -> None:
        """Forget the request."""
        self._draftings.pop(request.request_id, None)
        self._asked.discard(request.request_id)
        for proposer in self._proposers:
            proposer.forget(request)

    def _candidate(self, index: int, request: "Request") -> _Candidate | None:
        """The best guess for a request; None if it has none, or is not asked now."""
        drafting = self._drafting(request)
        model = self._draft_model
        is_known = bool(drafting.source) or (model is not None and model.has_proposal(request))
        if not is_known and not self.budget.allows_ask:
            return None
        self.budget.ask()
        drafting.source = ""
        self._asked.discard(request.request_id)
        since = request.output[drafting.proposed_at :]
        for name, proposal in drafting.proposals.items():
            drafting.rates[name].compare(proposal, since)
        drafting.proposed_at = request.produced
        limit = self._most_drafts(request)
        best: _Candidate | None = None
        for proposer in self._proposers:
            proposal = proposer.propose(request, limit) if limit > 0 else NO_PROPOSAL
            proposal = proposal.before(request.spec.end_ids)
            drafting.proposals[proposer.name] = proposal
            if not proposal.tokens:
                continue
            rates = drafting.rates[proposer.name]
            probabilities = rates.cumulative(proposal.length, len(proposal.tokens))
            if probabilities and (best is None or sum(probabilities) > sum(best.probabilities)):
                best = _Candidate(index, drafting, proposer.name, proposal.tokens, probabilities)
        return best

    def _drafting(self, request: "Request") -> _Drafting:
        drafting = self._draftings.get(request.request_id)
        if drafting is None:
            drafting = self._draftings[request.request_id] = _Drafting()
            drafting.rates = {name: AcceptanceRates(all_) for name, all_ in self._rates.items()}
        return drafting

    def _most_drafts(self, request: "Request") -> int:
        """Drafts that the request can use: none behind its last token, nor behind the one from
        which end tokens are allowed (`min_tokens`), since the rows of an entry ban the same ids."""
        spec, produced = request.spec, request.produced
        most = min(self._num_drafts, spec.max_tokens - produced - 1)
        return min(most, spec.min_tokens - 1 - produced) if produced < spec.min_tokens else most
