"""Workers without a model: they echo, or act as a step's first token or the model's name says."""

import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path
from typing import Protocol, Self

from engine.errors import KernelFaulted, StartupError, WorkerLost
from engine.lora import LoraReport, LoraSpec
from engine.step import Step, StepResult, StepTimes
from engine.worker.launched import StepInFlight, StepOutcome
from engine.worker_settings import WorkerReport, WorkerSettings
from tests.worker_settings import worker_report

GARBAGE = b"Traceback (most recent call last):"

REPORT = worker_report(architecture="Echo", num_parameters=0, attention="none")


class Command(IntEnum):
    """First tokens of a step which make a worker fail in some way."""

    RAISE = 900
    LOSE = 901
    DIE = 902
    HANG = 903
    UNSENDABLE = 905
    ENVIRONMENT = 907
    LORAS = 909


@dataclass(frozen=True)
class CompletedStep:
    """A step that was computed while it was launched."""

    collected: StepOutcome
    may_wait: bool = False

    def collect(self) -> StepOutcome:
        return self.collected


class RunsSteps(Protocol):
    """A worker with a `run` method."""

    times: StepTimes

    def run(self, step: Step) -> StepResult: ...


class UnconnectedWorker:
    """The methods for other workers of the model, for a worker which has none."""

    times = StepTimes(None, 0.0, 0.0)

    loras: tuple[int, ...] = ()  # ids of the loaded adapters
    stage = 0

    def load_lora(self, spec: LoraSpec) -> LoraReport:
        """The digest is the path; a path with "bad" has an error, "raise" raises, and "first fails"
        has an error in the first stage."""
        if spec.path == "first fails" and self.stage == 0:
            return LoraReport(spec.lora_id, error="the first stage fails")
        if spec.path == "raise":
            raise ValueError("no\nadapter")
        if spec.path == "hang":
            signal.pause()
        if "bad" in spec.path or (spec.path == "gone later" and spec.digest):
            return LoraReport(spec.lora_id, error=f"{spec.path} cannot be loaded")
        self.loras = (*self.loras, spec.lora_id)
        return LoraReport(spec.lora_id, digest=spec.path, num_bytes=5)

    def unload_lora(self, lora_id: int) -> None:
        self.loras = tuple(each for each in self.loras if each != lora_id)

    def check(self) -> None:
        """No weights to compare."""

    def warm_up(self) -> None:
        """No memory to touch."""

    def learn(self, step: Step) -> None:
        """Nothing to prepare."""

    def launch(self: RunsSteps, step: Step) -> StepInFlight:
        return CompletedStep(StepOutcome(self.run(step), self.times))

    def abandon(self, step: Step, line: str) -> None:
        """No other worker waits for this step."""


def try_kernels(*, may_note: bool) -> None:
    """Two kernels fault; a start leaves out those that earlier starts have noted."""
    notes = Path(os.environ["NOTES"])
    for kernel in ("first", "second"):
        if not (notes / kernel).exists():
            if may_note:
                (notes / kernel).touch()
            raise KernelFaulted(f"the kernel {kernel!r} made the GPU fault")


class EchoWorker(UnconnectedWorker):
    """Samples the last token of each entry plus one."""

    def __init__(self, report: WorkerReport, fails: bool = False) -> None:
        self.report = report
        self._fails = fails  # in every step

    @classmethod
    def load(cls, settings: WorkerSettings, progress: Callable[[str, int, int], None]) -> Self:
        progress("weights", 0, 2)
        match settings.model:
            case "fail":
                raise StartupError("layers:\n  no such thing")
            case "faults" | "faults for ever":
                try_kernels(may_note=settings.model == "faults")
            case "raise":
                raise ValueError("two\nlines")
            case "exit":
                os._exit(3)
            case "hang":
                signal.pause()
            case "send garbage":
                send_garbage()
            case "one fails" | "one exits":
                fail_together(settings.placement.index == 2, may_exit=settings.model == "one exits")
            case "shrink" if settings.kv.kv_slots:  # set by a restart only
                return cls(replace(REPORT, num_blocks=REPORT.num_blocks - 1))
            case "fails later" if settings.kv.kv_slots:
                return cls(REPORT, fails=True)
        progress("weights", 2, 2)
        made = cls(REPORT)
        made.stage = settings.placement.stage
        made.report = replace(REPORT, loras=tuple(map(made.load_lora, settings.loras)))
        return made

    def run(self, step: Step) -> StepResult:
        tokens = [entry.tokens[-1] + 1 for entry in step.entries if entry.sample is not None]
        match Command.LOSE if self._fails else step.entries[0].tokens[0]:
            case Command.RAISE:
                raise ValueError("a step\nthat raises")
            case Command.LOSE:
                raise WorkerLost("the device is unusable")
            case Command.DIE:
                os.kill(os.getpid(), signal.SIGKILL)
            case Command.HANG:
                signal.pause()
            case Command.LORAS:
                tokens = [sum(10**lora_id for lora_id in self.loras)]
            case Command.UNSENDABLE:
                tokens = [2**64]
            case Command.ENVIRONMENT:
                tokens = [int(os.environ["ANSWER"])]
        return StepResult(step.step_id, tuple(tokens), seconds=0.0)


def fail_together(is_the_one: bool, *, may_exit: bool) -> None:
    """Fail as the one of several workers that cannot load, or as another that lost it."""
    if not may_exit:
        if is_the_one:
            raise StartupError("no such thing")
        signal.pause()
    with open(os.environ["FIFO"], "w" if is_the_one else "r") as fifo:
        if is_the_one:
            os._exit(3)
        fifo.read()
        raise StartupError("cannot meet the other workers")


def send_garbage() -> None:
    """Write invalid data to the parent's socket, and hang."""
    os.write(int(sys.argv[sys.argv.index("--socket") + 1]), GARBAGE)
    signal.pause()
