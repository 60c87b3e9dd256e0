"""SpeculationBudget: the seconds that speculation may still lose, so that it never costs much.

A small share of the time of all iterations is paid in. Looking for drafts is paid from it. An
iteration with drafts pays in what it saved, or takes out what it lost, as measured:

    plain seconds x tokens / decodes  -  seconds since the iteration before it was committed

Plain seconds are what such an iteration takes without drafts: in the worker, by the live cost, and
in the event loop, by the last iterations without drafts. While nothing is left, no drafts are
computed and none are looked for. So all of speculation loses hardly more than the share, whatever
the cost model or the acceptance rates say, and what it gains may be spent to find more drafts.
"""

from collections import Counter
from collections.abc import Collection

from engine.cost.live import MAX_ERROR, NEWS_SHARE, LiveCost
from engine.iteration import Iteration
from engine.ports import Clock
from engine.request import Request
from engine.step import StepId

# The share of the workers' time. What text without matches loses with it is in the rows `hostile`
# and `stories` of examples/benchmarks/results/speculation/README.md, column "on / off".
SHARE = 0.003
# Swept in results/constants
FIRST_STEPS, MAX_STEPS = 4.0, 16.0  # lone decodes whose seconds are there at first, and at most
ASK_SECONDS = 5e-5  # the event loop's time to guess for one request, until it is measured
DRAFT_SECONDS = 1e-5  # the event loop's time per draft, until it is measured
USUAL_DRAFTS = 8.0  # drafts per iteration that tell as much of their seconds as of the rest
WARM_UPS = 2  # iterations of a size whose kernel calls may be new: what they lose is not counted


class SpeculationBudget:
    """Keeps the seconds that are left, and what guesses and drafts cost beside the cost model."""

    def __init__(self, cost: LiveCost, clock: Clock | None = None) -> None:
        """The time of guesses is measured by `clock`, and estimated without one."""
        lone = cost.model.decodes(1, 1)
        self.seconds = FIRST_STEPS * lone
        self.ask_seconds = ASK_SECONDS  # per request that is asked for a guess
        self.draft_seconds = DRAFT_SECONDS  # per draft, in the event loop
        self.draft_gap = 0.0  # more seconds in which the worker waits, if an iteration has drafts
        self.wait_for: StepId | None = None  # a step ahead of which nothing is planned, for drafts
        self._follows_wait = False  # whether nothing was planned ahead of the last iteration
        self._num_measured = 0  # iterations from which seconds of drafts were learned
        self._clock = clock
        self._began = 0.0  # the guesses that are being made
        self._num_asks = 0
        self._most = MAX_STEPS * lone
        self._cost = cost
        self._gap = 0.0  # seconds between plain iterations, beside `CostModel.idle`
        self._committed_at = 0.0
        self._num_of_size: Counter[int] = Counter()  # iterations with drafts, by their tokens

    @property
    def is_spent(self) -> bool:
        """Whether nothing is left."""
        return self.seconds < 0.0

    @property
    def allows_ask(self) -> bool:
        """Whether another request may be asked for a guess."""
        return self.seconds >= self.ask_seconds

    def begin_asking(self) -> None:
        """Requests will be asked for guesses."""
        self._num_asks = 0
        if self._clock is not None:
            self._began = self._clock()

    def ask(self) -> None:
        """A request is asked; the expected seconds are taken out."""
        self._num_asks += 1
        self.seconds -= self.ask_seconds

    def end_asking(self, *, is_free: bool) -> None:
        """Take out what the guesses took instead of what was expected. They are free in an
        iteration with drafts, because its whole time is counted when it is committed."""
        count = self._num_asks
        if not count:
            return
        expected = count * self.ask_seconds
        took = expected if self._clock is None else self._clock() - self._began
        self.seconds += expected - (0.0 if is_free else took)
        latest = min(took / count, MAX_ERROR * self.ask_seconds)
        self.ask_seconds += NEWS_SHARE * (latest - self.ask_seconds)

    def between(self, num_entries: int) -> float:
        """Seconds from the end of a worker's step to the start of the next one without drafts."""
        return max(0.0, self._cost.model.idle(num_entries) + self._gap)

    def miss(self, num_requests: int, ahead: Collection[Request]) -> None:
        """So many of the requests miss an iteration without drafts that all could be in."""
        count = len(ahead)
        slots = sum([request.num_planned for request in ahead]) + count
        self.seconds -= self._cost.decodes(count, slots) * num_requests / count

    def iteration_took(self, iteration: Iteration, seconds: float, now: float) -> None:
        """An iteration without drafts was committed; the worker took `seconds`. If nothing was
        planned ahead of the last one, to wait for drafts or behind them, the time between the two
        is taken out, as far as it is usual and no requests have arrived in it."""
        entries = iteration.step.entries
        if self._follows_wait and iteration.step.num_tokens == len(entries):
            extra = now - self._committed_at - seconds - self.between(len(entries))
            self.seconds -= min(max(0.0, extra), self.draft_gap)
        self._committed_at = now
        self._follows_wait = iteration.step.step_id == self.wait_for
        self.seconds += SHARE * seconds

    def plain_took(self, iteration: Iteration, seconds: float, now: float) -> None:
        """An iteration without drafts was committed, for which nothing else of speculation was
        done: learn the time between steps."""
        gap = now - self._committed_at - seconds - self._cost.model.idle(len(iteration.requests))
        most = 1e-4 + 2.0 * abs(self._gap)  # requests may have arrived after a pause
        self._gap += NEWS_SHARE * (max(-most, min(most, gap)) - self._gap)
        self.iteration_took(iteration, seconds, now)
        self.seconds = min(self._most, self.seconds)

    def drafts_took(
        self, iteration: Iteration, seconds: float, now: float, num_accepted: int
    ) -> None:
        """An iteration with drafts, or in which the draft model proposed tokens, was committed."""
        took, self._committed_at = now - self._committed_at, now
        self._follows_wait = True
        entries, size = iteration.step.entries, iteration.step.num_tokens
        count = len(entries)
        self._num_of_size[size] += 1
        if not count:
            return
        is_new = self._num_of_size[size] <= WARM_UPS
        between = self.between(count)
        plain = self._cost.decodes(count, sum([entry.start for entry in entries]) + count)
        plain = max(plain + between, 1e-9)
        if size > count and not is_new:
            self._learn(min(took, MAX_ERROR * plain) - seconds - between, size - count)
        saved = plain * (1.0 + num_accepted / count) - min(took, MAX_ERROR * plain)
        saved = max(saved, 0.0 if is_new else -plain)
        self.seconds = min(self._most, self.seconds + saved + SHARE * seconds)

    def _learn(self, extra: float, num_drafts: int) -> None:
        """An iteration with drafts took `extra` seconds beside the worker's: correct the fixed and
        the proportional part of its prediction (normalized least mean squares)."""
        self._num_measured += 1
        share = num_drafts / USUAL_DRAFTS
        error = extra - self.draft_gap - self.draft_seconds * num_drafts
        error *= max(NEWS_SHARE, 1.0 / self._num_measured) / (1.0 + share * share)
        self.draft_gap = max(0.0, self.draft_gap + error)
        self.draft_seconds = max(0.0, self.draft_seconds + error * share / USUAL_DRAFTS)
