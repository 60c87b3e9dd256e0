"""Writes what a benchmark has measured: figures as JSON, and the page made of them."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Rows = Sequence[dict[str, Any]]


def write_files(folder: Path, files: Mapping[str, object]) -> None:
    """Write texts, and what is no text as JSON; the folder is made if it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content, indent=1) + "\n"
        (folder / name).write_text(text)


def write_results(out: Path, rows: Rows, page: Callable[[list[dict[str, Any]]], str]) -> None:
    """Write README.md and a JSON file with the name of the folder `out`."""
    write_files(out, {f"{out.name}.json": rows, "README.md": page([*rows])})
