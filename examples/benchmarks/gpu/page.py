"""The results as a Markdown page and as JSON: figures beside the goals."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from examples.benchmarks.gpu.stages import Outcome

Row = tuple[str, str, str, str]  # what, measured, at least, aim


def write(folder: Path, machine: dict[str, str], outcomes: Sequence[Outcome]) -> Path:
    """Write the page and, beside it, the JSON; returns the page's path. Named by device and
    date."""
    folder.mkdir(parents=True, exist_ok=True)
    day = datetime.fromisoformat(machine["when"]).date().isoformat()
    words = "".join(each if each.isalnum() else "-" for each in machine["device"].lower())
    name = "-".join([*filter(None, words.split("-")), day])
    figures = {"machine": machine, "stages": [asdict(outcome) for outcome in outcomes]}
    (folder / f"{name}.json").write_text(json.dumps(figures, indent=1) + "\n")
    path = folder / f"{name}.md"
    path.write_text(page(machine, outcomes))
    return path


def read(path: Path) -> dict[str, Outcome]:
    """The finished stages of an earlier JSON file, by name."""
    found = [Outcome(**stage) for stage in json.loads(path.read_text())["stages"]]
    return {outcome.name: outcome for outcome in found if outcome.status == "done"}


def page(machine: dict[str, str], outcomes: Sequence[Outcome]) -> str:
    """Markdown."""
    facts = ", ".join(f"{name} {value}" for name, value in machine.items() if name != "device")
    lines = [f"# {machine['device']}", "", f"`python -m examples.benchmarks.gpu`; {facts}.", ""]
    lines += ["| | measured | at least | aim |", "|---|---|---|---|"]
    found = {outcome.name: outcome for outcome in outcomes}
    lines += [f"| {' | '.join(row)} |" for row in goals(found)]
    lines += ["", "| stage | | s |", "|---|---|---|"]
    lines += [f"| {each.name} | {summary(each)} | {each.seconds:.0f} |" for each in outcomes]
    for outcome in outcomes:
        if "rows" in outcome.figures:
            lines += ["", *steps(outcome)]
        if "mixed" in outcome.figures:
            lines += ["", *mixed_steps(outcome.figures)]
        if "unequal" in outcome.figures:
            lines += ["", *unequal(outcome.figures)]
        if "products" in outcome.figures:
            lines += ["", *products(outcome.figures["products"])]
        if "decodes" in outcome.figures:
            lines += ["", *decodes(outcome.figures["decodes"])]
        if outcome.figures.get("numbers"):
            lines += ["", *recorded(outcome)]
    for outcome in outcomes:
        lines += list(complaints(outcome))
    return "\n".join(lines) + "\n"


def goals(found: dict[str, Outcome]) -> Iterator[Row]:
    """The goals, as far as they were measured."""
    alone = next((each for name, each in found.items() if name.startswith("alone")), None)
    for row in alone.figures.get("rows", []) if alone is not None else []:
        shape = alone.figures["shape"] if alone is not None else ""
        size = f"{row['num_requests']} × {row['context']:,}"
        if row["kind"] == "decode":
            yield f"{shape}, decode {size}, of the limit", percent(row["fraction"]), "80 %", "90 %"
            idle = max(0.0, 1 - row["worker_seconds"] / row["pace_seconds"])
            yield f"idle between those steps, {alone_flight(alone)}", percent(idle), "< 3 %", ""
        else:
            yield f"{shape}, prefill {size}, of the limit", percent(row["fraction"]), "60 %", "75 %"
    server = found["server over HTTP"].figures if "server over HTTP" in found else {}
    if server:
        busy = percent(server["as_busy_as_the_worker_alone"])
        yield (
            f"{server['streams']} streams over HTTP, as busy as the worker alone",
            busy,
            "90 %",
            "",
        )


def alone_flight(alone: Outcome | None) -> str:
    number = alone.figures["in_flight"] if alone is not None else 1
    return f"{number} in flight"


def summary(outcome: Outcome) -> str:
    """A stage in one cell."""
    figures = outcome.figures
    if "passed" in figures:
        counts = f"{figures['passed']} passed, {len(figures['failed'])} failed"
        return f"{outcome.status}: {counts}, {figures['skipped']} skipped"
    if "modules" in figures:
        built = len(figures["cached"]) + len(figures["built"])
        return f"{outcome.status}: {built} of {figures['modules']} modules built"
    if "output_tokens_per_second" in figures:
        rate = figures["output_tokens_per_second"]
        return f"{outcome.status}: {rate:,.0f} tokens/s, {figures['failed']} requests failed"
    return outcome.status


def steps(outcome: Outcome) -> Iterator[str]:
    """The table of a worker without server."""
    figures = outcome.figures
    worker, limits = figures["worker"], figures["limits"]
    rates = ", ".join(
        f"{name} {limits[name]['rate'] / 1e12:.2f} T/s ({limits[name]['by']})"
        for name in dict.fromkeys(("read", worker["weights"].split()[0], worker["dtype"]))
    )
    yield f"## {figures['shape']}, {worker['dtype']} with {worker['weights']} weights"
    yield f"\nLimits: {rates}; attention {worker['attention']}; {figures['in_flight']} in flight.\n"
    yield "| | requests | tokens each | cached | ms | floor | bound by | of the limit | tokens/s |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for row in figures["rows"]:
        floor = max(row["floor_read_seconds"], row["floor_compute_seconds"])
        yield (
            f"| {row['kind']} | {row['num_requests']} | {row['num_tokens']} | {row['context']} | "
            f"{row['seconds'] * 1e3:.2f} | {floor * 1e3:.2f} | {row['bound']} | "
            f"{percent(row['fraction'])} | {row['tokens_per_second']:,.0f} |"
        )


def mixed_steps(figures: dict[str, Any]) -> Iterator[str]:
    """The table of steps with pieces of prompts."""
    yield f"## {figures['shape']}: decodes and pieces of prompts in a step"
    yield "\n| decodes | pieces, tokens | graph, rows | ms | eagerly, ms | top-k and top-p, ms |"
    yield "|---|---|---|---|---|---|"
    for row in figures["mixed"]:
        pieces = ", ".join(map(str, row["pieces"])) or "none"
        times = f"{row['seconds'] * 1e3:.2f} | {row['eager_seconds'] * 1e3:.2f}"
        sampled = row["sampled_seconds"]
        times += f" | {sampled * 1e3:.2f}" if sampled else " |"
        yield f"| {row['decodes']} | {pieces} | {row['graph'] or 'none'} | {times} |"


def unequal(figures: dict[str, Any]) -> Iterator[str]:
    """The table of decodes of which one is longer."""
    yield f"## {figures['shape']}: decodes beside a long one"
    yield "\n| decodes | and one of | ms | of equal lengths, ms |"
    yield "|---|---|---|---|"
    for row in figures["unequal"]:
        times = " | ".join(f"{row[name] * 1e3:.2f}" for name in ("seconds", "even_seconds"))
        yield f"| {row['decodes']} × {row['context']:,} | {row['longest']:,} | {times} |"


def products(found: dict[str, Any]) -> Iterator[str]:
    """The table of products by torch and by our kernel in its fastest tiling."""
    yield "## Products\n\n| with a norm before it | torch, µs | ours, µs | tiling |"
    yield "|---|---|---|---|"
    for name, row in found.items():
        times = dict(row["microseconds"])
        by_torch = times.pop("torch")
        best = min(times, key=times.__getitem__)
        yield f"| {name} | {by_torch:.1f} | {times[best]:.1f} | {best} |"


def decodes(found: dict[str, dict[str, float]]) -> Iterator[str]:
    """The table of attention of decodes."""
    names = "floor", "FA2", "ours"
    yield "## Attention of decodes, µs of a layer\n"
    yield f"| | {' | '.join(names)} |\n|---|---|---|---|"
    for case, times in found.items():
        cells = (f"{times[name]:.1f}" if name in times else "" for name in names)
        yield f"| {case} | {' | '.join(cells)} |"


def recorded(outcome: Outcome) -> Iterator[str]:
    """The numbers that tests recorded; a shortfall of at most 1 is right (`tests/gpu/pairs.py`)."""
    yield f"## {outcome.name}\n"
    for name, numbers in outcome.figures["numbers"].items():
        said = ", ".join(f"{what} {value}" for what, value in numbers.items())
        yield f"- `{name}`: {said}"


def complaints(outcome: Outcome) -> Iterator[str]:
    """The errors of a failed stage."""
    failed: dict[str, Any] = outcome.figures.get("failed") or {}
    if isinstance(failed, dict):
        for name, line in failed.items():
            yield f"\n- `{name}`: {line.splitlines()[0] if line else ''}"
    if outcome.output:
        yield f"\n## {outcome.name}: output\n\n```\n{outcome.output}\n```"


def percent(share: float) -> str:
    return f"{share * 100:.0f} %"
