"""Drafter: how many drafts each decode of an iteration gets.

The guesses for its decodes (`Guesses`) become drafts as long as they raise the expected tokens per
second (`DraftGain`).

Guesses cost the event loop's time, and drafts may take longer than predicted. So requests without
drafts in their last iteration are asked in rotation, as often as the budget allows, and nothing is
done at all while it is spent (`SpeculationBudget`).
"""

from collections.abc import Callable, Collection, Sequence
from math import inf

from engine.cost.live import LiveCost
from engine.iteration import Iteration, Observer
from engine.ports import Clock
from engine.request import Request
from engine.speculation.acceptance import DraftCounts
from engine.speculation.budget import SpeculationBudget
from engine.speculation.draft_model import DraftModelProposer
from engine.speculation.gain import DraftGain, Guess
from engine.speculation.guesses import MIN_EXPECTED, Guesses
from engine.speculation.prediction import PredictionProposer
from engine.speculation.proposers import NgramProposer, Proposer, SuffixProposer
from engine.speculation.settings import MTP, SpeculationSettings
from engine.step import ProposalSpec, StepEntry, StepId, StepResult

# Swept in results/constants
CHECK_EVERY = 8  # iterations after which an inactive drafter sees whether it may be active
MAX_PAUSE = 31  # iterations in which requests are planned ahead, after drafts were not worth it

PROPOSERS: dict[str, tuple[Callable[[SpeculationSettings], Proposer], ...]] = {
    "ngram": (NgramProposer,),
    "suffix": (SuffixProposer,),
    "prediction": (),
    "draft_model": (),
    MTP: (),
}


class Drafter(Observer):
    """Proposes and chooses drafts; observes the ends of requests."""

    def __init__(
        self,
        proposers: Sequence[Proposer],
        num_drafts: int,
        cost: LiveCost,
        draft_model: DraftModelProposer | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Propose at most `num_drafts` per request and iteration; `draft_model` is one more
        proposer. The time of guesses is measured by `clock`, and estimated without one."""
        self.budget = SpeculationBudget(cost, clock)
        self.counts = DraftCounts(by_position=[0] * num_drafts)
        self._num_drafts = num_drafts
        self._gain = DraftGain(cost, self.budget)
        self._cost = cost
        self._draft_model = draft_model
        self._guesses = Guesses(proposers, num_drafts, self.budget, draft_model)
        self.is_active = True  # whether the next iteration may have drafts or proposals
        self._num_inactive = 0  # iterations since it was found out
        self._speculates = False  # whether the iteration being planned has drafts or proposals
        self._in_flight: set[StepId] = set()  # steps that have
        self._num_accepted = 0  # in the iteration being committed
        self._pause = 0  # iterations, the longer the more often drafts were not worth it
        self._num_paused = 0  # paused requests that are left

    @classmethod
    def build(
        cls,
        settings: SpeculationSettings,
        cost: LiveCost,
        size_ratio: float = 1.0,
        clock: Clock | None = None,
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
        self, decodes: Sequence[tuple[Request, StepEntry]], most: int, max_seconds: float = inf
    ) -> dict[int, tuple[int, ...]]:
        """The drafts of an iteration that consists of these decodes, at most `most` in all, by the
        place of the decode. With them, the iteration takes at most `max_seconds`.

        Where not every decode has a guess, drafts do not delay the others' tokens much. Background
        requests have drafts only if there are no others.
        """
        if not self._guesses.may_ask:
            return {}
        self.budget.begin_asking()
        candidates = self._guesses.candidates(decodes)
        counts: dict[int, int] = {}
        if candidates:
            guesses = [Guess(candidate.place, candidate.probabilities) for candidate in candidates]
            starts = [entry.start for _, entry in decodes]
            counts = self._gain.counts(guesses, starts, most, max_seconds)
        chosen: dict[int, tuple[int, ...]] = {}
        for candidate in candidates:
            if count := counts.get(candidate.place, 0):
                request, _ = decodes[candidate.place]
                chosen[candidate.place] = self._guesses.chosen(candidate, request, count)
        self.budget.end_asking(is_free=bool(chosen))
        if chosen:
            self._num_paused = self._pause = 0
        elif candidates:
            self._wait_longer()
        self._speculates = bool(chosen)
        return chosen

    def waiting(self, oldest: Iteration, ahead: Collection[Request]) -> set[Request]:
        """The requests that could be planned ahead of the `oldest` iteration in flight, but
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
        if self._num_paused or not self._guesses.may_ask:
            return set()
        self.budget.begin_asking()
        hopeful = self._guesses.hopeful(ahead)
        for request, entry in zip(oldest.requests, oldest.step.entries, strict=True):
            expected = self._guesses.expected(request) if entry.num_drafts else None
            if expected is not None:
                hopeful[request] = expected
        self.budget.end_asking(is_free=False)
        if not hopeful:
            return set()
        if self._gain.is_worth_waiting(oldest, ahead, hopeful, self._num_drafts):
            self.budget.wait_for = oldest.step.step_id
            return set(ahead)
        few = {r for r in ahead if sum(hopeful.get(r, ())) >= 1.0 + MIN_EXPECTED}
        if len(few) in (0, len(ahead)):
            self._wait_longer()
            return set()
        self.budget.miss(len(few), ahead)
        return few

    def _wait_longer(self) -> None:
        """Drafts are not worth it: plan ahead for more iterations than the last time."""
        self._num_paused = self._pause = min(MAX_PAUSE, 2 * self._pause + 1)

    def returned(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """The drafts of a request were verified."""
        self._guesses.returned(request, num_drafts, num_accepted)
        self._num_accepted += num_accepted
        counts = self.counts
        counts.num_entries += 1
        counts.num_drafts += num_drafts
        counts.num_accepted += num_accepted
        for position in range(num_accepted):
            counts.by_position[position] += 1

    def proposals(
        self, decodes: Sequence[tuple[Request, StepEntry]], most: int, max_seconds: float = inf
    ) -> dict[int, ProposalSpec]:
        """What the draft model does in an iteration that consists of these decodes, by the place
        of the decode: it computes at most `most` tokens beside its proposals. With it, the
        iteration takes at most `max_seconds`."""
        model = self._draft_model
        if model is None or self.budget.is_spent or not model.may_plan(len(decodes)):
            return {}
        candidates = model.candidates(decodes, self._guesses.rates_of_draft_model, self._num_drafts)
        num_rows = sum([len(entry.tokens) for _, entry in decodes])
        seconds = self._gain.fixed_seconds([entry.start for _, entry in decodes])
        seconds += self._cost.model.tokens(num_rows)
        return model.plan(candidates, len(decodes), seconds, most, max_seconds)

    def will_propose(self, request: Request, spec: ProposalSpec) -> None:
        """The next iteration has this spec for the request."""
        self._speculates = True
        if self._draft_model is not None:
            self._draft_model.sent(request, spec)

    def worker_lost(self, now: float) -> None:
        """No iteration in flight will return."""
        self._in_flight.clear()
        if self._draft_model is not None:
            self._draft_model.lost()

    def sent(self, step_id: StepId) -> None:
        """A step was planned; it is remembered if it has drafts or proposals."""
        if self._speculates:
            self._speculates = False
            self._in_flight.add(step_id)

    def dropped(self, iteration: Iteration) -> None:
        """Forget an iteration that raised an error."""
        self._in_flight.discard(iteration.step.step_id)

    def iteration_took(self, iteration: Iteration, result: StepResult, now: float) -> None:
        """The iteration's result is committed: keep its proposals, and count its time. While
        nothing is active this does next to nothing."""
        seconds = result.seconds
        if self._num_paused:
            self._num_paused -= 1
        if self._draft_model is not None:
            self._draft_model.committed(iteration, result)
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
        return self._guesses.may_ask

    def ended(self, request: Request, now: float) -> None:
        """Forget the request."""
        self._guesses.forget(request)
