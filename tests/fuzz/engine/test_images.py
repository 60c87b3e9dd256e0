from tests.fuzz.engine.images import play
from tests.fuzz.playing import play_all

CASES = 20
EVENTS = (
    "accepted",
    "dropped images",
    "encoded",
    "failed steps",
    "finished",
    "image rows",
    "in disk",
    "in host",
    "kills",
    "left",
    "preempted",
    "slots read",
    "split images",
    "states read",
    "swapped out awaited",
)


def test_what_stands_for_an_image_is_computed_with_it() -> None:
    counts = play_all(play, range(CASES))
    assert [event for event in EVENTS if not counts[event]] == []
