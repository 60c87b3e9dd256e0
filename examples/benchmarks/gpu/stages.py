"""One stage of the check: a command with a time of its own, whose end never ends the others."""

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
SAID_LINES = 25  # kept of what a failed stage said
GRACE_SECONDS = 10.0
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "FLASHINFER_NO_DOWNLOAD": "1"}


@dataclass(frozen=True, slots=True)
class Stage:
    """Work that raises `StageFailed`, or returns its figures; `seconds` are the most it gets."""

    name: str
    seconds: float
    work: Callable[[float], dict[str, Any]]  # given the seconds that it has


@dataclass(slots=True)
class Outcome:
    """How a stage ended: "done", "failed" or "no time"."""

    name: str
    status: str = "no time"
    seconds: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)
    said: str = ""  # where it failed


class StageFailed(Exception):
    """A stage came to no good end; the text is for the page. It may have figures all the same."""

    def __init__(self, said: str, figures: dict[str, Any] | None = None) -> None:
        super().__init__(said)
        self.figures = figures or {}


def run_all(
    stages: Sequence[Stage], seconds: float, tell: Callable[[Outcome], None]
) -> list[Outcome]:
    """Each stage in turn while there is time; `tell` hears of each as it ends."""
    until = time.monotonic() + seconds
    outcomes = []
    for stage in stages:
        outcome = Outcome(stage.name)
        began = time.monotonic()
        if (left := until - began) > 1.0:
            run_one(stage, min(left, stage.seconds), outcome)
        outcome.seconds = time.monotonic() - began
        tell(outcome)
        outcomes.append(outcome)
    return outcomes


def run_one(stage: Stage, seconds: float, outcome: Outcome) -> None:
    """Fill in how the stage ended; it is the doorway for whatever it raises."""
    try:
        outcome.figures = stage.work(seconds)
        outcome.status = "done"
    except StageFailed as failure:
        outcome.status, outcome.said = "failed", str(failure)
        outcome.figures = failure.figures
    except Exception as error:  # of the check itself: the other stages still run
        outcome.status, outcome.said = "failed", f"{type(error).__name__}: {error}"


def command(words: Sequence[str], seconds: float) -> str:
    """What a command printed. Raises `StageFailed` where it fails or takes longer."""
    with tempfile.TemporaryFile("w+") as output, started(words, output) as process:
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise StageFailed(f"no end after {seconds:.0f} s\n{tail(output)}") from None
        if code:
            raise StageFailed(f"exit code {code}\n{tail(output)}")
        output.seek(0)
        return output.read()


@contextmanager
def started(words: Sequence[str], output: Any) -> Iterator[subprocess.Popen[str]]:
    """A command in a process group of its own, of which nothing is left afterwards."""
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)}
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
    """The last lines of a file that was written by a command."""
    output.seek(0)
    return "\n".join(output.read().splitlines()[-SAID_LINES:])
