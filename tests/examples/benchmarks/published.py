"""Reads published results: pages of text, and the JSON files that they are made from."""

import json
from typing import Any

from tests.examples.running import ROOT

RESULTS = ROOT / "examples" / "benchmarks" / "results"


def read(name: str) -> Any:
    return json.loads((RESULTS / name).read_text())


def plain(text: str) -> str:
    """Without line breaks and bold type."""
    return " ".join(text.replace("**", "").split())


def brief(number: float) -> str:
    """Three digits, as in the tables."""
    return f"{number:,.0f}" if number >= 99.95 else f"{number:.3g}"
