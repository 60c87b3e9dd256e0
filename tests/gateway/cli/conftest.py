"""A directory and an environment in which nothing is set."""

import os
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The empty current directory of the test; no PODWAY_* variable is set."""
    for name in [name for name in os.environ if name.startswith("PODWAY_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    return tmp_path
