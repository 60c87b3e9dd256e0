"""Cases with several replicas of a model, deaths, cancels, deadlines and policy switches."""

from collections import Counter

from tests.fuzz.replicas.case import Case

NUM_CASES = 100


def test_replicas_lose_nothing_under_deaths_moves_and_cancels() -> None:
    counts: Counter[str] = Counter()
    for seed in range(NUM_CASES):
        try:
            tally = Case(seed).run()
        except BaseException as error:
            raise AssertionError(f"case {seed}") from error
        counts += tally.counts
    for name in ("complete", "failed", "cancelled", "deaths", "moved", "recomputed", "cached"):
        assert counts[name] > 20, counts
