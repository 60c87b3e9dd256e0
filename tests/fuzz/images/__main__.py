"""Plays cases: `python -m tests.fuzz.images FIRST LAST`; exit code 1 if any failed."""

import logging
import sys
from collections import Counter

import torch
import transformers

from tests.fuzz.images.case import play_case


def main(first: int, last: int) -> int:
    """Play the cases from `first` to `last`, without it. Returns the exit code."""
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)  # deaths are drawn
    transformers.utils.logging.disable_progress_bar()
    counts: Counter[str] = Counter()
    failed = 0
    for seed in range(first, last):
        try:
            play_case(seed, counts)
        except AssertionError as error:
            failed += 1
            _say(f"failed: {error}")
    _say(f"{last - first} cases, {failed} failed")
    _say(", ".join(f"{name} {count}" for name, count in sorted(counts.items())))
    return int(failed > 0)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    first = int(sys.argv[1])
    sys.exit(main(first, int(sys.argv[2]) if len(sys.argv) > 2 else first + 1))
