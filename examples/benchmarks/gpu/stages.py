"""Stages of the check: each has its own time limit, and a stage that fails does not end the
others."""

import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
OUTPUT_LINES = 25  # kept of the output of a failed stage
GRACE_SECONDS = 10.0
SHOW_SECONDS = 0.5
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "FLASHINFER_NO_DOWNLOAD": "1",
    "TRITON_DEFAULT_FP_FUSION": "1",  # as workers set it; Triton 3.9 warns without
}


@dataclass(frozen=True, slots=True)
class Stage:
    """`work(seconds)` returns figures or raises `StageFailed`; it gets at most `seconds`."""

    name: str
    seconds: float
    work: Callable[[float], dict[str, Any]]


@dataclass(slots=True)
class Outcome:
    """How a stage ended: "done", "failed" or "no time"."""

    name: str
    status: str = "no time"
    seconds: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)
    output: str = ""  # the last lines of a failed stage


class StageFailed(Exception):
    """A stage failed; the text goes to the page. It may still have the figures measured so far."""

    def __init__(self, output: str, figures: dict[str, Any] | None = None) -> None:
        super().__init__(output)
        self.figures = figures or {}


def run_all(
    stages: Sequence[Stage],
    seconds: float,
    report: Callable[[Sequence[Outcome]], None],
    finished: Mapping[str, Outcome],
) -> list[Outcome]:
    """Run each stage in turn while there is time; `report` gets all outcomes after each stage.

    Stages in `finished`, by name, are not run again.
    """
    until = time.monotonic() + seconds
    outcomes: list[Outcome] = []
    for stage in stages:
        outcomes.append(finished.get(stage.name) or run_one(stage, until - time.monotonic()))
        report(outcomes)
    return outcomes


def run_one(stage: Stage, left: float) -> Outcome:
    """Run a stage within `left` seconds; whatever it raises becomes its outcome."""
    outcome = Outcome(stage.name)
    if left <= 1.0:
        return outcome
    began = time.monotonic()
    try:
        outcome.figures = stage.work(min(left, stage.seconds))
        outcome.status = "done"
    except StageFailed as failure:
        outcome.status, outcome.output = "failed", str(failure)
        outcome.figures = failure.figures
    except Exception as error:  # a bug of the check itself: the other stages still run
        outcome.status, outcome.output = "failed", f"{type(error).__name__}: {error}"
    outcome.seconds = time.monotonic() - began
    return outcome


def command(words: Sequence[str], seconds: float, *, shows: bool = False) -> str:
    """Run a command and return its output; `shows` prints it while the command runs.

    Raises `StageFailed` if it fails or takes longer.
    """
    with tempfile.NamedTemporaryFile("w+") as output, started(words, output) as process:
        try:
            with showing(Path(output.name)) if shows else nullcontext():
                code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise StageFailed(f"still running after {seconds:.0f} s\n{tail(output)}") from None
        if code:
            raise StageFailed(f"exit code {code}\n{tail(output)}")
        output.seek(0)
        return output.read()


@contextmanager
def showing(path: Path) -> Iterator[None]:
    """Print what is written to a file, until the block ends."""
    is_over = threading.Event()

    def follow() -> None:
        with path.open() as file:
            while not is_over.wait(SHOW_SECONDS):
                print(file.read(), end="", flush=True)
            print(file.read(), end="", flush=True)

    follower = threading.Thread(target=follow, daemon=True)
    follower.start()
    try:
        yield
    finally:
        is_over.set()
        follower.join()


def python_path() -> str:
    """The checkout first, then the caller's own path."""
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))


@contextmanager
def started(words: Sequence[str], output: Any) -> Iterator[subprocess.Popen[str]]:
    """A command in its own process group, which is ended on leaving."""
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": python_path()}
    process = subprocess.Popen(
        list(words),
        cwd=ROOT,
        env=environment,
        stdout=output,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            if process.poll() is not None:
                break
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_SECONDS)


def tail(output: Any) -> str:
    """The last lines of a command's output file."""
    output.seek(0)
    return "\n".join(output.read().splitlines()[-OUTPUT_LINES:])
