"""The fractions of the machine's limits that steps reach, for each weight format of the CPU.

    python -m examples.benchmarks.layers.fractions OUT [--shape Qwen2.5-0.5B] [--formats int8 int4]
        [--seconds 1]

Runs `podway bench --offline` once per format, which loads random weights, and writes figures.json
and README.md with the tables to OUT. Run it on a machine without other jobs. Before each step a
process without a model reads as many bytes as the step from memory: a step that is bound by reads
is compared with these reads, because memory of a virtual machine is faster at some times than at
others. Between the two an equal step runs, during which the timed one is known, as in a server.
`step_kernels` says which kernels take the rest.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from examples.benchmarks.server.start_time import cpu_name
from examples.benchmarks.written import write_files

FORMATS = {  # the flags of each
    "float32": ("--dtype", "float32", "--weights", "float32"),
    "bfloat16": ("--dtype", "bfloat16"),
    "int8": ("--weights", "int8"),
    "int4": ("--weights", "int4"),
}
ROWS, CONTEXT, PROMPTS = (1, 2, 4, 8, 16, 32, 64), 160, (128, 512)


def main() -> None:
    options = parse()
    limits: Path | None = None
    runs: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name in options.formats:
            path = Path(scratch) / f"{name}.json"
            run(options, name, path, limits)
            limits = limits or path  # measured once, before and after the first format
            runs[name] = json.loads(path.read_text())
    figures = {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "shape": options.shape,
        "is_known": True,  # each timed step, while the one before it runs
        "runs": runs,
    }
    write_files(options.out, {"figures.json": figures, "README.md": page(figures)})
    print(page(figures))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", default="Qwen2.5-0.5B")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--seconds", type=float, default=1.0, help="for each kind of step")
    return parser.parse_args()


def run(options: argparse.Namespace, name: str, path: Path, limits: Path | None) -> None:
    """One format; raises `CalledProcessError` if it cannot be measured."""
    command = [sys.executable, "-m", "gateway", "bench", "--offline", options.shape]
    command += [*FORMATS[name], "--context", str(CONTEXT), "--seconds", str(options.seconds)]
    command += ["--batch-sizes", ",".join(map(str, ROWS))]
    command += ["--prompt-lengths", ",".join(map(str, PROMPTS)), "--json", str(path)]
    command += [] if limits is None else ["--limits", str(limits)]
    subprocess.run(command, check=True)


def page(figures: Mapping[str, Any]) -> str:
    """The fractions as a table, with the times of the steps below."""
    runs: Mapping[str, Any] = figures["runs"]
    any_run = next(iter(runs.values()))
    steps = [title(row) for row in any_run["rows"]]
    loads = [load for each in runs.values() for load in each["load"]]
    limits = {name: each for run in runs.values() for name, each in run["limits"].items()}
    known = "; each step is known while the one before runs" if figures.get("is_known") else ""
    return "\n".join(
        [
            "# How much of the machine's limits a worker reaches",
            "",
            f"Written by `python -m examples.benchmarks.layers.fractions`: {figures['shape']}, "
            f"random weights, decodes at {CONTEXT} tokens{known}. "
            f"{figures['cpu']}, {figures['cores']} cores, "
            f"load average {min(loads):.1f} to {max(loads):.1f}. "
            "A fraction is the minimum time over that of the fastest step. The minimum time for "
            "reads is that of the fastest plain read of as many bytes, of one before each step; "
            "for computation it follows from "
            + ", ".join(
                f"{limits[name]['rate'] / 1e9:,.0f} G{name} operations/s"
                for name in runs
                if name in limits
            )
            + f". Windows of 128 MiB were read at {limits['read']['rate'] / 1e9:.1f} GB/s at best.",
            "",
            "[Which kernels take the rest](step_kernels.md).",
            "",
            "Fractions:",
            "",
            *table(steps, {name: cells(run["rows"], fraction) for name, run in runs.items()}),
            "",
            "Medians of the steps' times:",
            "",
            *table(steps, {name: cells(run["rows"], milliseconds) for name, run in runs.items()}),
            "",
            "The fastest plain reads, GB/s:",
            "",
            *table(steps, {name: cells(run["rows"], read_rate) for name, run in runs.items()}),
            "",
        ]
    )


def table(steps: Sequence[str], rows: Mapping[str, Sequence[str]]) -> list[str]:
    """One column per step, one row per format."""
    return [
        f"| | {' | '.join(steps)} |",
        "|---|" + "---|" * len(steps),
        *(f"| {name} | {' | '.join(found)} |" for name, found in rows.items()),
    ]


def cells(rows: Sequence[Mapping[str, Any]], show: Callable[[Mapping[str, Any]], str]) -> list[str]:
    return [show(row) for row in rows]


def title(row: Mapping[str, Any]) -> str:
    """The step in words."""
    if row["kind"] == "decode":
        return f"{row['num_requests']} {'row' if row['num_requests'] == 1 else 'rows'}"
    return f"prefill {row['num_tokens']}"


def fraction(row: Mapping[str, Any]) -> str:
    """Of the limit, and which limit it is."""
    return f"{100 * row['fraction']:.0f} % {row['bound']}"


def read_rate(row: Mapping[str, Any]) -> str:
    """Of the fastest plain read beside the steps."""
    return f"{row['read_rate'] / 1e9:.1f}"


def milliseconds(row: Mapping[str, Any]) -> str:
    return f"{1e3 * row['seconds']:.1f} ms"


if __name__ == "__main__":
    main()
