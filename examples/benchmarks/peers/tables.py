"""The page of a comparison: medians over the rounds, with the smallest and largest."""

import os
import platform
from collections.abc import Callable, Sequence
from contextlib import suppress
from statistics import median
from typing import Any

from examples.benchmarks.peers.loads import Load

Rounds = Sequence[dict[str, Any]]
MODULE = "examples.benchmarks.peers"


def page(arguments: object, rounds: Rounds, loads: Sequence[Load], module: str = MODULE) -> str:
    """Markdown: one section for each group of servers."""
    parts = ["# Servers side by side\n", circumstances(f"{module} {arguments}", rounds)]
    for group in dict.fromkeys(one["group"] for one in rounds):
        here = [one for one in rounds if one["group"] == group]
        parts += [f"## {group}\n", _closed(here, loads), _open(here, loads), _standing(here)]
    return "\n".join(part for part in parts if part)


def circumstances(command: str, rounds: Rounds) -> str:
    """The machine, the rounds, and the CPU share of other processes."""
    runs = [load for one in rounds for load in one["loads"].values() if "wall_seconds" in load]
    if not runs:
        raise SystemExit(f"no load succeeded: {rounds[0]['loads']}")
    wall = sum(run["wall_seconds"] for run in runs)
    others = sum(run["other_cpu_seconds"] for run in runs)
    cores = os.cpu_count() or 1
    return (
        f"Made by `python -m {command}`: alternating,"
        f" rounds: {1 + max(one['round'] for one in rounds)}, medians (smallest to largest).\n"
        f"{cores} cores of {processor()}; the load client and all else took"
        f" {others / wall / cores:.0%} of the CPU seconds.\n"
    )


def processor() -> str:
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        names = [line.split(":")[1].strip() for line in file if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _closed(rounds: Rounds, loads: Sequence[Load]) -> str:
    names = [load.name for load in loads if not load.is_open]
    columns = [f"{name} tokens/s" for name in names] + [f"{name} TTFT p50 ms" for name in names]
    return table(
        columns,
        rounds,
        [_of_load(name, "output_rate", 1.0) for name in names]
        + [_of_load(name, "ttft_p50", 1e3) for name in names],
    )


def _open(rounds: Rounds, loads: Sequence[Load]) -> str:
    names = [load.name for load in loads if load.is_open]
    measures = (
        ("tokens/s", "output_rate", 1.0),
        ("ITL p99 ms", "itl_p99", 1e3),
        ("TTFT p50 ms", "ttft_p50", 1e3),
    )
    columns = [f"{name}: {title}" for name in names for title, *_ in measures]
    picks = [_of_load(name, key, unit) for name in names for _, key, unit in measures]
    return table(columns, rounds, picks)


def _standing(rounds: Rounds) -> str:
    columns = ["first token after s", "PSS MiB at start", "PSS MiB after load"]
    keys = ("first_token_seconds", "pss_mib_at_start", "pss_mib_after")
    return table(columns, rounds, [_of_server(key) for key in keys])


Pick = Callable[[dict[str, Any]], float | None]


def _of_load(name: str, key: str, unit: float) -> Pick:
    def pick(one: dict[str, Any]) -> float | None:
        value = one["loads"][name].get(key)
        return None if value is None else value * unit

    return pick


def _of_server(key: str) -> Pick:
    return lambda one: float(one[key])


def table(columns: Sequence[str], rounds: Rounds, picks: Sequence[Pick]) -> str:
    if not columns:
        return ""
    lines = [f"| | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
    for server in dict.fromkeys(one["server"] for one in rounds):
        mine = [one for one in rounds if one["server"] == server]
        lines.append(f"| {server} | {' | '.join(_cell(pick, mine) for pick in picks)} |")
    return "\n".join(lines) + "\n"


def _cell(pick: Pick, rounds: Rounds) -> str:
    found: list[float | None] = []
    for one in rounds:
        with suppress(KeyError):  # a load that was not run
            found.append(pick(one))
    values = [value for value in found if value is not None]
    if not values:
        return "failed" if found else "not run"
    text = _short(median(values))
    return text if len(values) == 1 else f"{text} ({_short(min(values))}–{_short(max(values))})"


def _short(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"
