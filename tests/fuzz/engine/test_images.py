"""Prompts with images are computed with their own images, under random loads and faults."""

from collections import Counter

import pytest

from tests.fuzz.engine.images import play

CASES, CHUNK = 240, 120
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


@pytest.mark.parametrize("first", range(0, CASES, CHUNK))
def test_what_stands_for_an_image_is_computed_with_it(first: int) -> None:
    counts: Counter[str] = Counter()
    for seed in range(first, first + CHUNK):
        play(seed, counts)
    assert [event for event in EVENTS if not counts[event]] == []
