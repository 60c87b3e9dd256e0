"""The page of larger models: medians of each server, and what was not run."""

import os
from collections.abc import Callable, Sequence
from typing import Any

from examples.benchmarks.peers.loads import Load
from examples.benchmarks.peers.tables import Pick, processor, table

Run = dict[str, Any]


def page(
    runs: Sequence[Run], loads: Sequence[Load], groups: Sequence[str], missing: Sequence[str]
) -> str:
    """`groups` are all that can be measured; `missing` are servers left out, with the reason."""
    parts = ["# Larger models beside other servers\n", _circumstances(runs)]
    for group in groups:
        here = [run for run in runs if run["group"] == group]
        if here:
            parts += [f"## {group}\n", _speed(here, loads), _standing(here)]
    parts += ["## Not run\n", *not_run(runs, loads, groups), *(f"- {line}" for line in missing)]
    return "\n".join(parts) + "\n"


def _circumstances(runs: Sequence[Run]) -> str:
    rounds = dict.fromkeys((run["group"] for run in runs), 0)
    for group in rounds:
        rounds[group] = len({run["round"] for run in runs if run["group"] == group})
    done = [load for run in runs for load in run["loads"].values() if "wall_seconds" in load]
    others = sum(load["other_cpu_seconds"] for load in done)
    cores = os.cpu_count() or 1
    share = others / sum(load["wall_seconds"] for load in done) / cores
    counted = "; ".join(f"{group}: {count}" for group, count in rounds.items())
    return (
        "Made by `python -m examples.benchmarks.peers.larger PEERS`: as many servers of a table are"
        " up at a time as memory holds, and each load runs on one after the other. Medians of the"
        f" rounds (smallest to largest); rounds of each table: {counted}.\n{cores} cores of"
        f" {processor()}; the load client and all else took {share:.0%} of the CPU seconds.\n"
    )


def _speed(here: Sequence[Run], loads: Sequence[Load]) -> str:
    """Alone: tokens/s after the first token, and TTFT. Of streams: tokens/s with their prompts."""
    columns: list[str] = []
    picks: list[Pick] = []

    def add(title: str, pick: Pick) -> None:
        columns.append(title)
        picks.append(pick)

    for load in loads:
        if not any(load.name in run["loads"] for run in here):
            continue
        if load.name.startswith("C="):
            add(f"{load.name} tokens/s", _of(load.name, "output_rate", lambda each: each))
        else:
            add(f"{load.name}: tokens/s", _of(load.name, "itl_p50", lambda each: 1 / each))
            add("TTFT s", _of(load.name, "ttft_p50", lambda each: each))
    return table(columns, here, picks)


def _of(load: str, key: str, convert: Callable[[float], float]) -> Pick:
    def pick(run: Run) -> float | None:
        value = run["loads"][load].get(key)
        return None if value is None else convert(value)

    return pick


def _standing(here: Sequence[Run]) -> str:
    columns = ["first token after s", "PSS MiB at start", "PSS MiB after load"]
    keys = ("first_token_seconds", "pss_mib_at_start", "pss_mib_after")
    return table(columns, here, [_field(key) for key in keys])


def _field(key: str) -> Pick:
    return lambda run: float(run[key])


def not_run(runs: Sequence[Run], loads: Sequence[Load], groups: Sequence[str]) -> list[str]:
    """A line for each group that lacks loads or all of them."""
    lines = []
    for group in groups:
        done = {name for run in runs if run["group"] == group for name in run["loads"]}
        lacking = [load.name for load in loads if load.name not in done]
        if lacking:
            lines.append(f"- {group}: {', '.join(lacking) if done else 'all loads'}")
    return lines
