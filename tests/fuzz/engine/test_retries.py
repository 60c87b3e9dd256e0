"""A prompt that is given up goes on where it stopped when it is sent again."""

import pytest

from tests.fuzz.engine.retries import play
from tests.fuzz.playing import play_all

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
    counts = play_all(play, range(first, first + CHUNK))
    assert [event for event in EVENTS if not counts[event]] == []
