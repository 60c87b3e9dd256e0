"""A prompt that is given up goes on where it stopped when it is sent again."""

from collections import Counter

import pytest

from tests.fuzz.engine.retries import RetryCase, many_snapshots

CASES, CHUNK = 120, 40
EVENTS = (
    "kills",
    "left",
    "left in flight",
    "retries that found something",
    "sessions",
    "snapshots",
    "states read",
)


@pytest.mark.parametrize("first", range(0, CASES, CHUNK))
def test_a_retry_of_a_prompt_computes_only_what_the_attempt_before_had_not(first: int) -> None:
    counts: Counter[str] = Counter()
    with many_snapshots():
        for seed in range(first, first + CHUNK):
            case = RetryCase(seed)
            try:
                case.play()
            except Exception as error:
                raise AssertionError(f"case {seed}: {case.settings}") from error
            counts += case.counts
    assert [event for event in EVENTS if not counts[event]] == []
