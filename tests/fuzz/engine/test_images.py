"""Prompts with images are computed with their own images, under random loads and faults."""

from collections import Counter

from tests.fuzz.engine.images import play

CASES = 120
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
    counts: Counter[str] = Counter()
    for seed in range(CASES):
        play(seed, counts)
    assert [event for event in EVENTS if not counts[event]] == []
