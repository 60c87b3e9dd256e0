"""Writes the results of a sweep: its rows as JSON, and the page made of them."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Rows = Sequence[dict[str, Any]]


def write_results(out: Path, rows: Rows, page: Callable[[list[dict[str, Any]]], str]) -> None:
    """Write README.md and a JSON file with the name of the folder `out`."""
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{out.name}.json").write_text(json.dumps(rows, indent=1) + "\n")
    (out / "README.md").write_text(page([*rows]))
