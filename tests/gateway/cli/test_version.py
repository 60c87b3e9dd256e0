from importlib import metadata
from pathlib import Path

import pytest

from gateway import version


def test_a_checkout_that_is_not_installed_knows_its_version(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def not_installed(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", not_installed)
    monkeypatch.setattr(version, "PYPROJECT", tmp_path / "pyproject.toml")
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "7.8.9"\n')
    version.podway_version.cache_clear()
    try:
        assert version.podway_version() == "7.8.9"
    finally:
        version.podway_version.cache_clear()
