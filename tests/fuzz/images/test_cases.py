"""What disturbs requests with images changes no bit. `python -m tests.fuzz.images FIRST LAST` plays
more cases."""

from tests.fuzz.images.case import play_case
from tests.fuzz.playing import play_all

CASES = range(12, 37)
EVENTS = (
    "cached tokens",
    "chunks within an image",
    "deaths amid an image",
    "dropped images",
    "images in several iterations",
    "left",
    "swapped",
    "whole outputs",
)


def test_no_disturbance_changes_a_bit_of_requests_with_images() -> None:
    counts = play_all(play_case, CASES)
    assert [event for event in EVENTS if not counts[event]] == []
