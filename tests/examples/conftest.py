"""Files that servers of the examples write go into the directory of this run's tests."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PODWAY_CACHE_DIR", str(tmp_path.parent / "cache"))
