"""Random configurations give transformers' logits. `python -m tests.fuzz.models FIRST LAST` plays
more."""

import pytest

from tests.fuzz.models.case import play
from tests.fuzz.playing import play_all

FIRST, LAST, CHUNK = 0, 24, 8


@pytest.mark.parametrize("first", range(FIRST, LAST, CHUNK))
def test_random_configurations_give_transformers_logits(first: int) -> None:
    counts = play_all(play, range(first, first + CHUNK))
    assert counts["compared"] >= CHUNK / 2
