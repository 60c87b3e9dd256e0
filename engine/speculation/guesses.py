"""Guesses: what the proposers guess for each request, and how likely each guess is right.

Each proposer's guess has a probability of being right, from the acceptance rates. A guess costs the
event loop's time, so a request is asked only as far as the budget allows: requests that had drafts
first, then others.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.request import Request
from engine.speculation.acceptance import AcceptanceRates
from engine.speculation.budget import SpeculationBudget
from engine.speculation.draft_model import DraftModelProposer
from engine.speculation.prediction import PredictionProposer
from engine.speculation.proposers import NO_PROPOSAL, Proposal, Proposer
from engine.step import LAST_TOKEN, RequestId, StepEntry

MIN_EXPECTED = 0.5  # accepted drafts for which to wait, not to plan ahead (results/constants)


@dataclass(slots=True)
class _Drafting:
    """What is known of one request: its rates by proposer, and its last guess."""

    rates: dict[str, AcceptanceRates]
    proposals: dict[str, Proposal] = field(default_factory=dict)
    proposed_at: int = 0  # output tokens when they were made
    source: str = ""  # the proposer of the drafts in flight
    expected: tuple[float, ...] = ()  # the probabilities of the drafts in flight


class Candidate(NamedTuple):
    """A guess for a decode, with the probabilities that its first 1, 2, … tokens are right."""

    place: int  # among the decodes
    drafting: _Drafting
    source: str
    tokens: tuple[int, ...]
    probabilities: list[float]


class Guesses:
    """Asks proposers, within the budget, and keeps what is known of each request's guesses."""

    def __init__(
        self,
        proposers: Sequence[Proposer],
        num_drafts: int,
        budget: SpeculationBudget,
        draft_model: DraftModelProposer | None,
    ) -> None:
        """Propose at most `num_drafts` for a request; `draft_model` is one more proposer."""
        self._proposers = [*proposers, draft_model] if draft_model is not None else proposers
        self._num_drafts = num_drafts
        self._budget = budget
        self._draft_model = draft_model
        self._rates = {proposer.name: AcceptanceRates() for proposer in self._proposers}
        self._draftings: dict[RequestId, _Drafting] = {}
        self._asked: set[RequestId] = set()  # requests that had drafts, and are asked again
        self._first = 0  # the decode at which the next iteration begins to ask

    @property
    def may_ask(self) -> bool:
        """Whether any request can have drafts now."""
        return self._may_ask(had_drafts=bool(self._asked))

    def _may_ask(self, *, had_drafts: bool) -> bool:
        """Whether a request that had drafts, or had none, can have drafts now."""
        model = self._draft_model
        if model is not None and model.has_proposals:
            return True
        return self._budget.allows_ask or (had_drafts and not self._budget.is_spent)

    def candidates(self, decodes: Sequence[tuple[Request, StepEntry]]) -> list[Candidate]:
        """The guesses for these decodes, as far as they may be asked; each time another one is
        asked first."""
        candidates: list[Candidate] = []
        only_background = all(request.spec.is_background for request, _ in decodes)
        self._first = first = (self._first + 1) % max(1, len(decodes))
        for place in (*range(first, len(decodes)), *range(first)):
            if not self.may_ask:
                break
            request, entry = decodes[place]
            if request.spec.is_background and not only_background:
                continue
            if entry.sample is not None and entry.tokens[0] != LAST_TOKEN:
                candidate = self._candidate(place, request)
                if candidate is not None:
                    candidates.append(candidate)
        return candidates

    def hopeful(self, requests: Iterable[Request]) -> dict[Request, Sequence[float]]:
        """The requests that will probably have drafts behind the token in flight, with the
        probabilities of the drafts."""
        hopeful: dict[Request, Sequence[float]] = {}
        for request in requests:
            if self._may_ask(had_drafts=request.request_id in self._asked):
                candidate = self._candidate(len(hopeful), request)
                if candidate is not None and sum(candidate.probabilities) >= MIN_EXPECTED:
                    candidate.drafting.source = candidate.source
                    self._asked.add(request.request_id)
                    hopeful[request] = candidate.probabilities
        return hopeful

    def chosen(self, candidate: Candidate, request: Request, count: int) -> tuple[int, ...]:
        """The first `count` tokens of a candidate, which become the request's drafts."""
        candidate.drafting.source = candidate.source
        candidate.drafting.expected = tuple(candidate.probabilities[:count])
        self._asked.add(request.request_id)
        return candidate.tokens[:count]

    def expected(self, request: Request) -> Sequence[float] | None:
        """The probabilities of the request's drafts in flight; None if it is not known."""
        drafting = self._draftings.get(request.request_id)
        return None if drafting is None else drafting.expected

    def returned(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """The drafts of a request were verified."""
        if self._draftings[request.request_id].source == PredictionProposer.name:
            request.num_accepted_prediction += num_accepted
            request.num_rejected_prediction += num_drafts - num_accepted

    def rates_of_draft_model(self, request: Request) -> AcceptanceRates:
        """The request's own rates of the draft model's proposals."""
        assert self._draft_model is not None, "there is a draft model"
        return self._drafting(request).rates[self._draft_model.name]

    def forget(self, request: Request) -> None:
        """The request has ended."""
        self._draftings.pop(request.request_id, None)
        self._asked.discard(request.request_id)
        for proposer in self._proposers:
            proposer.forget(request)

    def _candidate(self, place: int, request: Request) -> Candidate | None:
        """The best guess for a request; None if it has none, or is not asked now."""
        drafting = self._drafting(request)
        model = self._draft_model
        is_known = bool(drafting.source) or (model is not None and model.has_proposal(request))
        if not is_known and not self._budget.allows_ask:
            return None
        self._budget.ask()
        drafting.source = ""
        self._asked.discard(request.request_id)
        since = request.output[drafting.proposed_at :]
        for name, proposal in drafting.proposals.items():
            drafting.rates[name].compare(proposal, since)
        drafting.proposed_at = request.produced
        limit = self._most_drafts(request)
        best: Candidate | None = None
        for proposer in self._proposers:
            proposal = proposer.propose(request, limit) if limit > 0 else NO_PROPOSAL
            proposal = proposal.before(request.spec.end_ids)
            drafting.proposals[proposer.name] = proposal
            if not proposal.tokens:
                continue
            rates = drafting.rates[proposer.name]
            probabilities = rates.cumulative(proposal.length, len(proposal.tokens))
            if probabilities and (best is None or sum(probabilities) > sum(best.probabilities)):
                best = Candidate(place, drafting, proposer.name, proposal.tokens, probabilities)
        return best

    def _drafting(self, request: Request) -> _Drafting:
        drafting = self._draftings.get(request.request_id)
        if drafting is None:
            rates = {name: AcceptanceRates(all_) for name, all_ in self._rates.items()}
            drafting = self._draftings[request.request_id] = _Drafting(rates)
        return drafting

    def _most_drafts(self, request: Request) -> int:
        """Drafts that the request can use: none behind its last token, nor behind the one from
        which end tokens are allowed (`min_tokens`), since the rows of an entry ban the same ids."""
        spec, produced = request.spec, request.produced
        most = min(self._num_drafts, spec.max_tokens - produced - 1)
        return min(most, spec.min_tokens - 1 - produced) if produced < spec.min_tokens else most
