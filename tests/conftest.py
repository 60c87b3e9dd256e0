"""A server that the tests share, and the markers that divide the tests into tiers."""

import gc
import os
import re
import signal
import subprocess
import sys
from collections.abc import Generator, Iterator
from functools import cache
from pathlib import Path
from typing import IO

import pytest
from hypothesis import settings

from tests.cpu_report import CpuReport

# Threads of torch that wait for each other spin: with two on two busy cores, attention over some
# hundred tokens took five times the CPU seconds. OpenMP reads this once, before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# No process compiles what another has compiled: rewriting the assertions of all tests took each of
# pytest's a third of its start, and the tests start hundreds.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

from engine.files import source_digest

sys.dont_write_bytecode = False
settings.register_profile("podway", deadline=None)  # no test asserts a time
settings.load_profile("podway")
TESTS = Path(__file__).parent
TIERS = {  # path below tests/ -> its marker; `--tiers none`, as in `make test`, leaves them out
    "survival": "process",
    "serving": "process",
    "examples": "examples",
    "clients": "clients",
    "page": "clients",
    "gateway/web/bodies/test_fuzz.py": "fuzz",
    "gateway/web/bodies/test_schemathesis.py": "fuzz",
}
MARKED = re.compile(rf"mark\.({'|'.join({*TIERS.values()})})\b")
MAX_SECONDS = 900.0  # of a test, and of its fixtures; what then catches the failure
AGAIN_SECONDS = 5.0  # is interrupted again
TIERS_RUN = ("none", "only", "all")  # the values of `--tiers`


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of the whole suite."""
    parser.addoption("--cpu-report", metavar="FILE", help="write the CPU seconds of each test")
    parser.addoption(
        "--tiers",
        choices=TIERS_RUN,
        default="all",
        help="import and run the tests without a marker of a tier, only those with one, or all",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Measure CPU seconds if they are asked for."""
    path = config.getoption("--cpu-report")
    if path is not None:
        config.pluginmanager.register(CpuReport(config, Path(path)))


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Collect tests without collecting garbage, and leave out of later collections what was
    imported: walking it took half a second each time. The process that only starts others does not
    import torch, which takes three seconds."""
    if not session.config.pluginmanager.hasplugin("dsession"):
        import torch

        if not torch.cuda.is_available():  # before any Triton kernel is imported
            os.environ.setdefault("TRITON_INTERPRET", "1")
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `--tiers`, do not even import the test files of which no test is run."""
    return is_left_out(collection_path, config.getoption("--tiers")) or None


def is_left_out(path: Path, tiers: str) -> bool:
    """Whether `--tiers` leaves out a file, or a folder with its conftest; helpers it never does."""
    if path.is_dir():
        return tiers == "none" and tier_of(path) is not None
    if tiers == "all" or not path.name.startswith("test_"):
        return False
    if tier_of(path) is None and MARKED.search(path.read_text()):
        return False  # single tests of it are in a tier
    return (tier_of(path) is None) == (tiers == "only")


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give each test the marker of its folder or file, and leave out what `--tiers` does."""
    for item in items:
        marker = tier_of(item.path)
        if marker is not None:
            item.add_marker(marker)
    tiers = config.getoption("--tiers")
    if tiers != "all":
        kept = [item for item in items if is_in_tier(item) == (tiers == "only")]
        config.hook.pytest_deselected(items=[*{*items} - {*kept}])
        items[:] = kept


@pytest.hookimpl(wrapper=True)
def fail_if_it_hangs() -> Generator[None, object, object]:
    """Interrupt a test, or its fixtures, that waits for what does not come."""

    def fail(number: int, frame: object) -> None:
        pytest.fail(f"it has run for more than {MAX_SECONDS:g} seconds")

    before = signal.signal(signal.SIGALRM, fail)
    signal.setitimer(signal.ITIMER_REAL, MAX_SECONDS, AGAIN_SECONDS)
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


pytest_runtest_setup = pytest_runtest_call = pytest_runtest_teardown = fail_if_it_hangs


def is_in_tier(item: pytest.Item) -> bool:
    """Whether a test has a marker of a tier, of its folder or of its own."""
    return any(mark.name in TIERS.values() for mark in item.iter_markers())


@cache
def tier_of(path: Path) -> str | None:
    """The marker of the tests in a file."""
    markers = (marker for tier, marker in TIERS.items() if path.is_relative_to(TESTS / tier))
    return next(markers, None)


@pytest.fixture(scope="session", autouse=True)
def _quick_loads() -> Iterator[None]:
    """Reading the mappings of a process with so many libraries took half of the load of a worker,
    reading the sources for their digest a tenth: it is done once. Workers in processes of their
    own do both, and so do `test_mappings.py` and `test_packed_cache.py`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.worker.weights.source.Weights.drop_pages", lambda _: None)
        for module in ("cpu.linears.packed_store", "weights.checkpoint"):
            patch.setattr(f"engine.worker.{module}.source_digest", cache(source_digest))
        yield


@pytest.fixture(scope="session")
def server_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`podway serve` in a process of its own; it must drain and exit with 0 in the end."""
    with start_server(tmp_path_factory.mktemp("server"), "--cost-model", "auto") as child:
        yield read_url(child)
        child.send_signal(signal.SIGTERM)
        assert child.wait(60) == 0, "the server did not drain"


def start_server(directory: Path, *flags: str) -> "Server":
    """`python -m gateway serve` on a free port; stderr goes to a file. Unless a flag says so,
    no cost is measured, which takes half of a start."""
    return Server(directory, flags)


class Server(subprocess.Popen[str]):
    """The process; leaving the block kills what is left of it."""

    def __init__(self, directory: Path, flags: tuple[str, ...]) -> None:
        command = [sys.executable, "-m", "gateway", "serve", "--port", "0"]
        cache = directory.parent / "cache"  # that of all tests: costs are measured once
        command += ["--cache-dir", str(cache), *flags]
        environ = {key: value for key, value in os.environ.items() if "PODWAY_" not in key}
        environ |= {"XDG_STATE_HOME": str(directory / "state"), "PODWAY_COST_MODEL": "none"}
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
