"""Plays cases: `python -m tests.fuzz.replicas FIRST LAST`; the first that fails raises."""

import sys
from collections import Counter

from tests.fuzz.replicas.case import Case


def main(first: int, last: int) -> None:
    """Play the cases from `first` to `last`, without it."""
    counts: Counter[str] = Counter()
    for seed in range(first, last):
        try:
            counts += Case(seed).run().counts
        except BaseException as error:
            raise RuntimeError(f"case {seed} failed") from error
    sys.stdout.write(f"{last - first} cases: {dict(counts)}\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
