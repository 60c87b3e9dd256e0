"""Plays cases: `python -m tests.fuzz.engine FIRST LAST`; exit code 1 if any failed.

A case that fails is printed with its seed and its error; `FIRST` alone plays that one case and
raises its error. Numbers of what happened in all cases come last.
"""

import sys
import traceback
from collections import Counter

from tests.fuzz.engine.case import Case


def main(first: int, last: int | None) -> int:
    """Play the cases from `first` to `last`, without it; or `first` alone. Returns the exit
    code."""
    if last is None:
        Case(first).play()
        return 0
    counts: Counter[str] = Counter()
    num_failed = 0
    for seed in range(first, last):
        case = Case(seed)
        try:
            case.play()
        except Exception as error:
            num_failed += 1
            _say(f"case {seed} failed: {describe(error)}")
        counts += case.counts
    _say(f"{last - first} cases, {num_failed} failed")
    _say(", ".join(f"{name} {count}" for name, count in sorted(counts.items())))
    return int(num_failed > 0)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def describe(error: BaseException) -> str:
    """The error, or the first of a group, and where it was raised."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({where.filename}:{where.lineno})"


if __name__ == "__main__":
    bounds = [int(argument) for argument in sys.argv[1:3]]
    sys.exit(main(bounds[0], bounds[1] if len(bounds) > 1 else None))
