"""A server that the tests share, and the markers that divide the tests into tiers."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest
import torch
from hypothesis import settings

settings.register_profile("podway", deadline=None)  # no test asserts a time
settings.load_profile("podway")
if not torch.cuda.is_available():  # before any Triton kernel is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")
TESTS = Path(__file__).parent
TIERS = {  # path below tests/ -> its marker; `make test` runs what has none of them
    "survival": "process",
    "serving": "process",
    "examples": "examples",
    "clients": "clients",
    "page": "clients",
    "gateway/web/bodies/test_fuzz.py": "fuzz",
    "gateway/web/bodies/test_schemathesis.py": "fuzz",
}


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give each test the marker of its folder or file."""
    for item in items:
        for path, marker in TIERS.items():
            if item.path.is_relative_to(TESTS / path):
                item.add_marker(marker)


@pytest.fixture(scope="session")
def server_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`podway serve` in a process of its own; it must drain and exit with 0 in the end."""
    with start_server(tmp_path_factory.mktemp("server")) as child:
        yield read_url(child)
        child.send_signal(signal.SIGTERM)
        assert child.wait(60) == 0, "the server did not drain"


def start_server(directory: Path, *flags: str) -> "Server":
    """`python -m gateway serve` on a free port with nothing else set; stderr goes to a file."""
    return Server(directory, flags)


class Server(subprocess.Popen[str]):
    """The process; leaving the block kills what is left of it."""

    def __init__(self, directory: Path, flags: tuple[str, ...]) -> None:
        command = [sys.executable, "-m", "gateway", "serve", "--port", "0"]
        command += ["--cache-dir", str(directory / "cache"), *flags]
        environ = {key: value for key, value in os.environ.items() if "PODWAY_" not in key}
        environ["XDG_STATE_HOME"] = str(directory / "state")
        self.log = directory / "stderr.log"
        with self.log.open("w") as stderr:
            super().__init__(
                command,
                cwd=directory,
                env=environ,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )

    def __exit__(self, *args: object) -> None:
        self.kill()
        self.wait()
        assert self.stdout is not None
        self.stdout.close()


def read_url(server: Server) -> str:
    """The address in the banner's first line, waited for."""
    stdout: IO[str] | None = server.stdout
    assert stdout is not None
    line = stdout.readline()
    assert " at http" in line, f"no banner:\n{server.log.read_text()}"
    return line.rsplit(" at ", 1)[1].strip()
