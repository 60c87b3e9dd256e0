"""Plays the cases of many seeds, in tests and for `python -m tests.fuzz.KIND FIRST LAST`."""

import argparse
import json
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

Play = Callable[[int, "Counter[str]"], object]  # a seed, and counts that the case adds to


def play_all(play: Play, seeds: Iterable[int]) -> "Counter[str]":
    """Play the cases of these seeds. Returns what was counted; raises the error of the first case
    that fails, with its seed."""
    counts: Counter[str] = Counter()
    for seed in seeds:
        try:
            play(seed, counts)
        except BaseException as error:
            raise AssertionError(f"case {seed}: {describe(error)}") from error
    return counts


def main(play: Play) -> None:
    """Play the cases from the command's first number to its second, without it. Prints those that
    fail and what was counted in the others, also as JSON into the file `--out`; exits with 1 if any
    failed. The first number alone plays that one case and raises its error."""
    parser = argparse.ArgumentParser()
    parser.add_argument("first", type=int)
    parser.add_argument("last", type=int, nargs="?")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.last is None:
        play(given.first, Counter())
        return
    counts: Counter[str] = Counter()
    num_failed = 0
    for seed in range(given.first, given.last):
        try:
            play(seed, counts)
        except Exception as error:
            num_failed += 1
            _say(f"case {seed} failed: {describe(error)}")
    _say(f"{given.last - given.first} cases, {num_failed} failed")
    _say(", ".join(f"{name} {count}" for name, count in sorted(counts.items())))
    if given.out is not None:
        found = {"first": given.first, "last": given.last, "failed": num_failed}
        text = json.dumps(found | {"counts": dict(sorted(counts.items()))}, indent=1)
        given.out.write_text(text + "\n")
    sys.exit(int(num_failed > 0))


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def describe(error: BaseException) -> str:
    """The error, or the first of a group, and where it was raised."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({where.filename}:{where.lineno})"
