import json
import shutil
import signal
import subprocess
import sys
import urllib.request
import venv
import zipfile
from pathlib import Path

import pytest

from gateway.commands import manual
from gateway.console import ROOT
from tests.conftest import read_url, start_server

SOURCES = ("gateway", "engine", "adapters")
DATA = ("gateway/web/page", "adapters/builtin")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built in a copy of the sources, without an index of packages."""
    folder = tmp_path_factory.mktemp("sources")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    for name in SOURCES:
        shutil.copytree(
            ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "node_modules")
        )
    build = ["wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", "dist", "."]
    subprocess.run(
        [sys.executable, "-m", "pip", *build], cwd=folder, check=True, capture_output=True
    )
    (built,) = (folder / "dist").iterdir()
    return built


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with the wheel, and with the libraries of this one but
    not its sources."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    install = ["install", "--no-deps", "--no-compile", "--no-index", str(wheel)]
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(python), *install],
        check=True,
        capture_output=True,
    )
    (own,) = folder.glob("lib/python*/site-packages")
    libraries = {path for path in map(Path, sys.path) if path.name == "site-packages"}
    (own / "libraries.pth").write_text("".join(f"{path}\n" for path in sorted(libraries)))
    return python


def test_a_wheel_has_all_files_that_are_read_at_run_time(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    for folder in DATA:
        files = {path for path in (ROOT / folder).rglob("*") if path.is_file()}
        read = {
            path.relative_to(ROOT).as_posix() for path in files if "__pycache__" not in path.parts
        }
        assert read - names == set()
    assert set(manual.PAGES) <= names
    assert not any(name.startswith(("tests/", "examples/", "gateway/podway/")) for name in names)


def test_the_installed_server_completes_and_has_its_page(
    python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setattr(sys, "executable", str(python))
    where = [str(python), "-c", "import gateway, podway; print(gateway.__file__, podway.__file__)"]
    found = subprocess.run(where, capture_output=True, text=True, check=True).stdout.split()
    assert all(Path(path).is_relative_to(python.parents[1]) for path in found)
    with start_server(tmp_path, "--attention", "reference") as child:  # compiles no kernels
        url = read_url(child)
        body = json.dumps(
            {"model": "builtin", "prompt": "Hello", "max_tokens": 4, "ignore_eos": True}
        ).encode()
        request = urllib.request.Request(
            f"{url}/v1/completions", body, {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request) as response:
            assert json.load(response)["usage"]["completion_tokens"] == 4
        with urllib.request.urlopen(f"{url}/page/app.js") as response:
            assert response.status == 200
        child.send_signal(signal.SIGTERM)
        assert child.wait(60) == 0
