"""Prints a digest of all plans of some cases: `python -m tests.fuzz.engine.plans NUM_CASES JUNK`.

The cases have drafts and lookahead. Between them `JUNK` objects are allocated, so that the same
objects lie at other addresses in every process.
"""

import sys
from itertools import count, islice
from random import Random

from tests.fuzz.engine.case import Case
from tests.fuzz.engine.drawing import draw


def main(num_cases: int, num_junk: int) -> None:
    """Print the seed and the digest of each case."""
    kept: list[bytearray] = []  # half of the junk, so that there are holes
    settings = ((seed, draw(Random(seed))) for seed in count())
    seeds = (seed for seed, drawn in settings if drawn.method and drawn.lookahead)
    for seed in islice(seeds, num_cases):
        kept += [bytearray(24 + 8 * (place % 60)) for place in range(num_junk)][::2]
        sys.stdout.write(f"{seed} {Case(seed, records=True).play()}\n")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))
