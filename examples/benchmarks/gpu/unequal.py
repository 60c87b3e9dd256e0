"""Times decodes of which one has a much longer context, and as many decodes of equal length with as
many keys.

A worker with random weights in this process, two steps in flight as under a server. A case is
DECODES×CONTEXT+LONGEST, in tokens. Prints JSON in the last line.

    python -m examples.benchmarks.gpu.unequal [--shape Llama-3.1-8B] [--device cuda]
        [--cases 40x1024+32768 64x1024+131071 16x1024+32768] [--seconds 1]
"""

import argparse
import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from engine.worker.process.worker import Worker
from examples.benchmarks.gpu.mixed_steps import load, pace, paged

CASES = ("40x1024+32768", "64x1024+131071", "16x1024+32768")


class Case(NamedTuple):
    """Decodes of `context` tokens, and one of `longest`."""

    decodes: int
    context: int
    longest: int

    @classmethod
    def of(cls, words: str) -> "Case":
        return cls(*map(int, re.split(r"[x+]", words)))

    @property
    def lengths(self) -> list[int]:
        return [self.context] * self.decodes + [self.longest]

    @property
    def even(self) -> list[int]:
        """Equal lengths with as many keys."""
        return [sum(self.lengths) // (self.decodes + 1)] * (self.decodes + 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="Llama-3.1-8B")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--cases", nargs="+", default=CASES)
    parser.add_argument("--seconds", type=float, default=1.0, help="for each case, twice")
    args = parser.parse_args()
    cases = [Case.of(case) for case in args.cases]
    worker = load(args, [case.lengths for case in cases])
    rows = [measure(worker, case, args.seconds) for case in cases]
    device = worker.report.device
    print(json.dumps({"shape": args.shape, "device": device, "unequal": rows}))


def measure(worker: Worker, case: Case, seconds: float) -> dict[str, Any]:
    """Median seconds from step to step."""
    size = worker.parts.limits.block_size

    def timed(lengths: Sequence[int]) -> float:
        entries = paged([(each - 1, 1) for each in lengths], size)
        return pace(worker, worker.parts.stage, entries, seconds)

    found = {"seconds": timed(case.lengths), "even_seconds": timed(case.even)}
    return {**case._asdict(), **found}


if __name__ == "__main__":
    main()
