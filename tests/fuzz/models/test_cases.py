"""Random configurations give transformers' logits. `python -m tests.fuzz.models FIRST LAST` plays
more."""

from collections import Counter
from pathlib import Path

import pytest

from tests.fuzz.models.case import play

FIRST, LAST, CHUNK = 0, 24, 8


@pytest.mark.parametrize("first", range(FIRST, LAST, CHUNK))
def test_random_configurations_give_transformers_logits(first: int, tmp_path: Path) -> None:
    counts: Counter[str] = Counter()
    for seed in range(first, first + CHUNK):
        directory = tmp_path / str(seed)
        directory.mkdir()
        try:
            play(seed, directory, counts)
        except Exception as error:
            raise AssertionError(f"python -m tests.fuzz.models {seed}") from error
    assert counts["compared"] >= CHUNK / 2
