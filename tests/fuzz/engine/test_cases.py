"""The engine is right under random loads and faults. `python -m tests.fuzz.engine FIRST LAST` plays
more cases."""

from tests.fuzz.engine.case import Case, play
from tests.fuzz.playing import play_all

CASES = range(4500, 4565)
# What they have seen, so that it is known to be right.
EVENTS = (
    "accepted",
    "ahead",
    "cancelled by label",
    "draft model slots read",
    "ended: DeadlineExceeded",
    "failed steps",
    "faults",
    "finished",
    "in disk",
    "in disk state",
    "in host",
    "in host state",
    "in store",
    "in store state",
    "kills",
    "late",
    "left",
    "outputs read",
    "preempted",
    "slots read",
    "states read",
    "swapped in awaited",
    "swapped out awaited",
    "switched",
    "unread",
    "vectors",
)


def test_the_engine_is_right_under_random_loads_and_faults() -> None:
    counts = play_all(play, CASES)
    assert [event for event in EVENTS if not counts[event]] == []


def test_a_victim_is_swapped_out_over_the_prefix_of_the_request_that_needs_its_blocks() -> None:
    """The request does not start then; it ended the engine."""
    Case(705468).play()
