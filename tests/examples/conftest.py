"""Servers of the examples write into the directory of this run's tests, and measure no costs, which
takes half of a start."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PODWAY_CACHE_DIR", str(tmp_path.parent / "cache"))
    monkeypatch.setenv("PODWAY_COST_MODEL", "none")
