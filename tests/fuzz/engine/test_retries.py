from tests.fuzz.engine.retries import play
from tests.fuzz.playing import play_all

CASES = 20
EVENTS = (
    "kills",
    "left",
    "left in flight",
    "retries that found something",
    "sessions",
    "snapshots",
    "states read",
)


def test_a_retry_of_a_prompt_computes_only_what_the_attempt_before_had_not() -> None:
    counts = play_all(play, range(CASES))
    assert [event for event in EVENTS if not counts[event]] == []
