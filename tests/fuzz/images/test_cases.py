"""What disturbs requests with images changes no bit. `python -m tests.fuzz.images FIRST LAST` plays
more cases."""

from collections import Counter

from tests.fuzz.images.case import play_case

CASES = 48
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
    counts: Counter[str] = Counter()
    for seed in range(CASES):
        play_case(seed, counts)
    assert [event for event in EVENTS if not counts[event]] == []
