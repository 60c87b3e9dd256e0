"""AcceptanceRates: how likely a guessed token is right, by the length of the match before it.

Every guess is compared with the token that follows, whether or not it was computed as a draft. So
the rates are known without computing drafts for the purpose.
"""

from dataclasses import dataclass, field

from engine.speculation.proposers import Proposal

# fixed: classes of lengths of matches, each with many guesses; longer ones are in the last
_BUCKETS = (0, 1, 2, 3, 4, *[5] * 3, *[6] * 8)
NUM_BUCKETS = _BUCKETS[-1] + 2
UNKNOWN = 0.5  # fixed: a guess that nothing is known of is as likely right as wrong
# Swept in results/constants
WEIGHT = 4.0  # guesses by which the prior rate counts
MEMORY = 0.995  # per guess, of all requests
OWN_MEMORY = 0.9  # per guess, of one request
MIN_PROBABILITY = 0.01  # guesses with a smaller probability are not computed


def bucket_of(length: int) -> int:
    """The bucket of a match of so many tokens."""
    return _BUCKETS[length] if length < len(_BUCKETS) else NUM_BUCKETS - 1


class AcceptanceRates:
    """Rates of a request, or of all requests (`prior` None)."""

    __slots__ = ("_hits", "_memory", "_prior", "_trials")

    def __init__(self, prior: "AcceptanceRates | None" = None) -> None:
        self._prior = prior
        self._memory = MEMORY if prior is None else OWN_MEMORY
        self._hits = [0.0] * NUM_BUCKETS
        self._trials = [0.0] * NUM_BUCKETS

    def rate(self, bucket: int) -> float:
        """The probability that a guess of this bucket is right."""
        prior = UNKNOWN if self._prior is None else self._prior.rate(bucket)
        return (self._hits[bucket] + WEIGHT * prior) / (self._trials[bucket] + WEIGHT)

    def cumulative(self, length: int, count: int) -> list[float]:
        """A probability for each of `count` guesses behind a match of `length`: that it and all
        before it are right, up to the first that is below `MIN_PROBABILITY`."""
        rates: list[float] = []
        probability, rate, last = 1.0, 1.0, -1
        for matched in range(length, length + count):
            bucket = _BUCKETS[matched] if matched < len(_BUCKETS) else NUM_BUCKETS - 1
            if bucket != last:
                rate, last = self.rate(bucket), bucket
            probability *= rate
            if probability < MIN_PROBABILITY:
                break
            rates.append(probability)
        return rates

    def observe(self, bucket: int, *, is_right: bool) -> None:
        """Count a guess, here and in the prior."""
        self._hits[bucket] = self._hits[bucket] * self._memory + is_right
        self._trials[bucket] = self._trials[bucket] * self._memory + 1.0
        if self._prior is not None:
            self._prior.observe(bucket, is_right=is_right)

    def compare(self, proposal: Proposal, tokens: list[int]) -> None:
        """Count the guesses of `proposal` whose tokens are known by now."""
        for behind, (guess, token) in enumerate(zip(proposal.tokens, tokens, strict=False)):
            self.observe(bucket_of(proposal.length + behind), is_right=guess == token)
            if guess != token:
                return


@dataclass(slots=True)
class DraftCounts:
    """Totals for metrics. `by_position[i]` counts the accepted drafts that had i before them."""

    num_entries: int = 0  # decodes with drafts
    num_drafts: int = 0
    num_accepted: int = 0
    by_position: list[int] = field(default_factory=list)
