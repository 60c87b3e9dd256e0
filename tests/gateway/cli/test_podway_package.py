import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from setuptools.config.expand import find_packages

import gateway.podway
from adapters.models.checks.architecture import PAGE
from gateway.console import ROOT
from gateway.offline import Generation, Podway


def test_its_names_are_those_of_the_engine_and_the_gateway() -> None:
    assert gateway.podway.Podway is Podway
    assert gateway.podway.Generation is Generation
    assert issubclass(gateway.podway.StartupError, gateway.podway.EngineError)
    assert "Podway" in dir(gateway.podway)
    with pytest.raises(AttributeError, match="'podway' has no attribute 'Server'"):
        _ = gateway.podway.Server


def test_it_runs_as_the_console_script_does() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "gateway.podway", "--version"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout.startswith("podway ")


def test_a_wheel_has_the_page_that_the_error_of_an_unknown_architecture_names() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    patterns = setuptools["package-data"]["adapters"]
    assert any(Path(PAGE).match(f"adapters/{each}") for each in patterns)


def test_a_wheel_has_it_at_the_top_level_and_only_there() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders: dict[str, str] = {}
    found = setuptools["packages"]["find"]
    packages = find_packages(**found, root_dir=str(ROOT), fill_package_dir=folders)
    assert folders["podway"] == "gateway/podway"
    assert {"podway", "gateway.serve", "engine.worker.cuda", "adapters"} <= set(packages)
    assert not [name for name in packages if name.startswith(("gateway.podway", "tests"))]
