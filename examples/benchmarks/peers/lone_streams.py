"""Lone streams of servers that are up together: one answer of each after the other, in turn.

    python -m examples.benchmarks.peers.lone_streams SERVERS.toml [--groups NAME ...]
        [--rounds 12] [--tokens 96] [--out DIR]

The memory of a virtual machine is faster at some times than at others, so streams that are measured
minutes apart cannot be compared. Here every round has one answer of each server of a group, whose
time per token is divided by that of the group's first server in the same round, and beside each
answer a plain read of memory. SERVERS.toml is as for `examples.benchmarks.peers`. Writes
lone_streams.json and lone_streams.md to DIR, beside SERVERS.toml if none is named.
"""

import argparse
import os
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from engine.worker.cpu.limits import PlainReads
from examples.benchmarks.peers.servers import Server, read_servers, running
from examples.benchmarks.server.lone_stream import seconds_per_token
from examples.benchmarks.server.start_time import cpu_name
from examples.benchmarks.written import write_files

READ_BYTES = 1 << 30
PAUSE = 0.5  # seconds until the threads of the server before wait no longer in loops
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("servers", type=Path)
    parser.add_argument("--groups", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--out", type=Path, metavar="DIR")
    options = parser.parse_args()
    servers = read_servers(tomllib.loads(options.servers.read_text()))
    groups = options.groups or list(dict.fromkeys(each.group for each in servers))
    out: Path = options.out or options.servers.parent
    reads = PlainReads(os.cpu_count() or 1)
    rows: list[Row] = []
    for group in groups:
        print(group, file=sys.stderr, flush=True)
        here = [each for each in servers if each.group == group]
        rows += measure(here, reads, options.rounds, options.tokens)
        figures = {"cpu": cpu_name(), "cores": os.cpu_count(), "rows": rows}
        write_files(out, {"lone_streams.json": figures, "lone_streams.md": page(figures)})


def measure(
    servers: Sequence[Server], reads: PlainReads, rounds: int, num_tokens: int
) -> list[Row]:
    """A row for each server: seconds per token and bytes per second of plain reads, by round."""
    with ExitStack() as stack:
        found = []
        for server in servers:
            up = stack.enter_context(running(server))
            seconds_per_token(up.url, num_tokens)
            row: Row = {"server": server.name, "group": server.group, "tokens": [], "reads": []}
            found.append((up, row))
        for number in range(rounds):
            for up, row in found if number % 2 == 0 else reversed(found):
                time.sleep(PAUSE)
                row["reads"].append(READ_BYTES / reads.seconds(READ_BYTES))
                row["tokens"].append(seconds_per_token(up.url, num_tokens))
    return [row for _, row in found]


def page(figures: Mapping[str, Any]) -> str:
    first: dict[str, Row] = {}
    for row in figures["rows"]:
        first.setdefault(row["group"], row)
    return "\n".join(
        [
            "# Lone streams, answer by answer",
            "",
            "Written by `python -m examples.benchmarks.peers.lone_streams`: "
            f"{figures['cores']} cores of {figures['cpu']}; the servers of a group are up together"
            " and answer in turn. Medians of the rounds (smallest to largest); a ratio is of the"
            " tokens per second of two answers of one round.",
            "",
            "| | rounds | tokens/s | ratio to the group's first | plain reads, GB/s |",
            "|---|---|---|---|---|",
            *(_line(row, first[row["group"]]) for row in figures["rows"]),
            "",
        ]
    )


def _line(row: Mapping[str, Any], first: Mapping[str, Any]) -> str:
    rates = [1 / seconds for seconds in row["tokens"]]
    ratios = [one / each for one, each in zip(first["tokens"], row["tokens"], strict=True)]
    cells = (
        f"{row['group']}: {row['server']}",
        len(rates),
        _spread(rates, ".1f"),
        _spread(ratios, ".2f") if row is not first else "1",
        _spread([each / 1e9 for each in row["reads"]], ".0f"),
    )
    return "| " + " | ".join(map(str, cells)) + " |"


def _spread(values: Sequence[float], form: str) -> str:
    return f"{median(values):{form}} ({min(values):{form}}–{max(values):{form}})"


if __name__ == "__main__":
    main()
