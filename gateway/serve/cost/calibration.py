"""Calibration: the cost model of iterations on this machine, saved or measured at the start.

A cost file belongs to one model, machine and configuration (`gateway.serve.saved`).
"""

import logging
import os
import platform
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from engine.cost.live import LiveCost
from engine.cost.model import UNMEASURED, CostModel
from engine.cost.profiler import ProbeLimits, measure
from engine.errors import EngineError
from gateway.serve.cost.trial_run import refined
from gateway.serve.saved import SavedFile, model_facts
from gateway.version import podway_version

if TYPE_CHECKING:
    from engine.ports import Clock, StepExecutor
    from engine.worker_settings import WorkerReport

logger = logging.getLogger(__name__)

PROFILE_SECONDS = 2.0  # maximum, but at least two steps are measured
TRIAL_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Calibration:
    """A cost model, the file it is saved in (None: not saved), and its origin in words."""

    model: CostModel
    file: SavedFile | None
    origin: str

    def update(self, cost: LiveCost) -> None:
        """Remove the file of a calibration that the iterations of a server refuted: the next start
        measures again. All else that it learned holds for the load of that day."""
        if self.file is not None and cost.is_refuted:
            with suppress(OSError):  # as a file that cannot be saved stops no server
                self.file.path.unlink(missing_ok=True)

    def __str__(self) -> str:
        alone, prompt = self.model.compute(1, 0), self.model.compute(256, 0)
        return (
            f"{alone * 1e3:.3g} ms per decode step, {prompt * 1e3:.3g} ms for 256 tokens; "
            f"{self.origin}"
        )


def cost_file(facts: Mapping[str, object], directory: Path | None = None) -> SavedFile:
    """The file of the cost model for these facts, in the user's cache or in `directory`."""
    return SavedFile.of(facts, "cost", directory)


def cost_facts(
    directory: Path, report: "WorkerReport", stages: int, ranks: int
) -> dict[str, object]:
    """Everything that the duration of a step depends on."""
    return model_facts(directory) | {
        "podway": podway_version(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "device": report.device,
        "dtype": report.dtype,
        "weight_format": report.weights,
        "kv_dtype": report.kv_dtype,
        "attention": report.attention,
        "threads": report.threads,
        "task": "generate" if report.pooling is None else report.pooling.task,
        "block_size": report.block_size,
        "stages": stages,
        "ranks": ranks,
        "graphs": list(report.graphs),
    }


def processor() -> str:
    """The CPU's model name, if the system knows it."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


async def calibrate(
    source: str, file: SavedFile, executor: "StepExecutor", bounds: ProbeLimits
) -> Calibration:
    """The cost model from `source`: "auto" (saved, else measured), "measure" (always measured) or
    "none" (a default that is fitted while serving)."""
    default = replace(UNMEASURED, graphs=bounds.graphs)
    if source == "none":
        return Calibration(default, None, "a default, fitted while serving")
    if source == "auto" and (known := file.load(CostModel.parse)) is not None:
        return Calibration(known, file, f"from {file.path}")
    started = time.perf_counter()
    try:
        model, is_stable = await measured(executor, bounds, time.perf_counter)
    except (EngineError, ValueError) as error:
        logger.warning("cannot measure the cost of iterations: %s", error)
        return Calibration(default, file, "a default, because measuring failed")
    took = time.perf_counter() - started
    if not is_stable:
        busy = "beside other work on this machine, so the next start measures again"
        return Calibration(model, file, f"measured in {took:.1f} s {busy}")
    file.save(asdict(model))
    return Calibration(model, file, f"measured in {took:.1f} s")


class Measured(NamedTuple):
    """A cost model, and whether single steps took the same time again and again."""

    model: CostModel
    is_stable: bool


async def measured(executor: "StepExecutor", bounds: ProbeLimits, clock: "Clock") -> Measured:
    """The cost model of single steps and of a trial run through scheduler and event loop; of single
    steps alone if a request of the trial run fails. Raises the error of a failed single step, and
    ValueError if the fit is not determined."""
    profile = await measure(executor, bounds, clock, PROFILE_SECONDS)
    try:
        model = await refined(executor, bounds, profile, clock, TRIAL_SECONDS)
    except EngineError as error:
        logger.warning("a request of the trial run failed; single steps are used: %s", error)
        model = profile.model
    return Measured(model, profile.is_stable)
