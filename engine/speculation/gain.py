"""DraftGain: how many drafts raise the expected tokens per second of an iteration.

    (decodes + sum of the probabilities of the drafts) / predicted seconds until it is committed

Drafts are added in the order of their probability. Beside what the worker takes, an iteration with
drafts takes seconds of the event loop (`SpeculationBudget.draft_gap`): with lookahead no iteration
can be planned behind drafts, so the worker waits for the loop.
"""

from collections.abc import Container, Mapping, Sequence
from math import inf
from typing import NamedTuple

from engine.cost.live import LiveCost
from engine.iteration import Iteration
from engine.request import Request
from engine.speculation.budget import SpeculationBudget

# Swept in results/constants
MIN_GAIN = 1.02  # drafts are computed if the expected tokens per second grow by this factor
MAX_SLOWDOWN = 1.25  # an iteration may take so much longer for decodes that gain nothing by it


class Guess(NamedTuple):
    """The probabilities that the first 1, 2, … guessed tokens of a decode are right."""

    place: int  # among the decodes
    probabilities: Sequence[float]


class DraftGain:
    """Predicts from the live cost, and from what drafts were measured to take beside it."""

    def __init__(self, cost: LiveCost, budget: SpeculationBudget) -> None:
        self._cost = cost
        self._budget = budget

    def fixed_seconds(self, starts: Sequence[int]) -> float:
        """Predicted seconds of an iteration of decodes at these positions without drafts, but for
        those that depend on the number of its tokens alone."""
        model, count = self._cost.model, len(starts)
        seconds = model.per_slot * (sum(starts) + count) + model.per_draw * count
        return seconds + self._budget.between(count)

    def counts(
        self, guesses: Sequence[Guess], starts: Sequence[int], most: int, max_seconds: float = inf
    ) -> dict[int, int]:
        """How many drafts each decode gets, by its place; `starts` are the decodes' positions. At
        most `most` in all, with which the iteration takes at most `max_seconds`; little longer than
        without them if some decodes have no guess."""
        model, budget, num_decodes = self._cost.model, self._budget, len(starts)
        ranked = sorted(
            (-probability, count, guess.place)
            for guess in guesses
            for count, probability in enumerate(guess.probabilities, 1)
        )
        seconds = self.fixed_seconds(starts)
        expected = float(num_decodes)
        without = self._cost.decodes(num_decodes, sum(starts) + num_decodes)
        without = max(without + budget.between(num_decodes), 1e-9)
        if len(guesses) < num_decodes:
            max_seconds = min(max_seconds, MAX_SLOWDOWN * without)
        best_rate, best = MIN_GAIN * expected / without, 0
        seconds += budget.draft_gap
        per_draft = model.per_draw + budget.draft_seconds
        for count, (negative, _, place) in enumerate(ranked[:most], 1):
            expected -= negative
            seconds += model.per_slot * (starts[place] + 1) + per_draft
            total = max(seconds + model.tokens(num_decodes + count), 1e-9)
            if total > max_seconds:
                break
            if expected > best_rate * total:
                best, best_rate = count, expected / total
        return {place: count for _, count, place in ranked[:best]}

    def is_worth_waiting(
        self,
        oldest: Iteration,
        ahead: Container[Request],
        likely: Mapping[Request, Sequence[float]],
        num_drafts: int,
    ) -> bool:
        """Whether the iteration behind the `oldest` one is worth being planned when its tokens are
        known, with drafts for requests as `likely` as this and all that could be planned ahead."""
        guesses, starts = list[Guess](), list[int]()
        for request, entry in zip(oldest.requests, oldest.step.entries, strict=True):
            if request in likely:
                guesses.append(Guess(len(starts), likely[request]))
            if request in likely or request in ahead:
                starts.append(entry.start)
        return bool(self.counts(guesses, starts, len(starts) * num_drafts))
