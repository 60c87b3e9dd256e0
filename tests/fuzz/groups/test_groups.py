"""Cases with several models, deaths, cancels, unloads and failed loads."""

from collections import Counter

from tests.fuzz.groups.case import Case

NUM_CASES = 150


def test_several_models_lose_nothing_under_deaths_unloads_and_cancels() -> None:
    counts: Counter[str] = Counter()
    for seed in range(NUM_CASES):
        try:
            tally = Case(seed).run()
        except BaseException as error:
            raise AssertionError(f"case {seed}") from error
        counts += tally.counts
    for name in ("complete", "failed", "cancelled", "deaths", "loads"):
        assert counts[name] > 20, counts
