"""What steps cost on this machine: read from the user's cache, or measured and put there.

A file belongs to one model, machine and way of computing; its name is a digest of those facts
and the facts stand in it. What is corrupt or somebody else's is ignored with one warning line.
"""

import hashlib
import json
import logging
import os
import platform
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from platformdirs import user_cache_path

from engine.control.scheduler import UNMEASURED
from engine.cost.model import CostModel
from engine.cost.profiler import ProbeLimits, measure
from engine.errors import EngineError

if TYPE_CHECKING:
    from engine.ports import StepExecutor
    from engine.step import WorkerReport

logger = logging.getLogger(__name__)

MEASURING_SECONDS = 2.0  # at most, and two steps at least
_NAME_DIGITS = 24


@dataclass(frozen=True, slots=True)
class Calibration:
    """A cost model, where it is kept (None: nowhere), and where it came from, for a person."""

    model: CostModel
    file: "CostFile | None"
    origin: str

    def __str__(self) -> str:
        alone, prompt = self.model.compute(1, 0), self.model.compute(256, 0)
        return f"{alone * 1e3:.3g} ms a step, 256 tokens {prompt * 1e3:.3g} ms; {self.origin}"


@dataclass(frozen=True, slots=True)
class CostFile:
    """A saved cost model and the facts that it holds for."""

    path: Path
    facts: Mapping[str, object]

    @classmethod
    def of(cls, facts: Mapping[str, object], directory: Path | None = None) -> "CostFile":
        """The file for these facts, in the user's cache or in `directory`."""
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
        folder = directory or user_cache_path("podway", appauthor=False)
        return cls(folder / "costs" / f"{digest[:_NAME_DIGITS]}.json", facts)

    def load(self) -> CostModel | None:
        """What was saved; None, and a warning if there is a file, where that is nothing."""
        try:
            saved = json.loads(self.path.read_bytes())
            if not isinstance(saved, dict) or saved.get("facts") != self.facts:
                raise ValueError("it is not about this model on this machine")
            return CostModel.parse(saved["cost"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            logger.warning("ignoring the cost model in %s: %s", self.path, error)
            return None

    def save(self, model: CostModel) -> None:
        """Write it whole or not at all; a failure is one warning line."""
        text = json.dumps({"facts": self.facts, "cost": asdict(model)}, indent=1)
        temporary: str | None = None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=self.path.parent, suffix=".new")
            with os.fdopen(handle, "w") as file:
                file.write(text)
            os.replace(temporary, self.path)
        except OSError as error:
            logger.warning("cannot save the cost model in %s: %s", self.path, error)
            if temporary is not None:
                with suppress(OSError):
                    os.unlink(temporary)


def facts_about(
    directory: Path, report: "WorkerReport", stages: int, ranks: int
) -> dict[str, object]:
    """What a step's seconds depend on. A checkpoint is known by its config and the sizes of its
    weights, so that nothing large is read."""
    config = directory / "config.json"
    files = [directory] if directory.is_file() else directory.glob("*.safetensors")
    weights = sorted((path.name, path.stat().st_size) for path in files)
    return {
        "podway": version("podway"),
        "model": str(directory.resolve()),
        "config": hashlib.sha256(config.read_bytes()).hexdigest() if config.is_file() else "",
        "weights": [list(pair) for pair in weights],
        "processor": _processor(),
        "cores": os.cpu_count(),
        "device": report.device,
        "dtype": report.dtype,
        "format": report.weights,
        "weight_format": report.weights,
        "kv_dtype": report.kv_dtype,
        "attention": report.attention,
        "threads": report.threads,
        "block_size": report.block_size,
        "stages": stages,
        "ranks": ranks,
    }


def _processor() -> str:
    """The CPU's own name, as far as the system says it."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


async def calibrate(
    how: str, file: CostFile, executor: "StepExecutor", bounds: ProbeLimits
) -> Calibration:
    """`how` is "auto" (saved, else measured), "measure" (anew) or "none" (learn on the way)."""
    if how == "none":
        return Calibration(UNMEASURED, None, "assumed")
    if how == "auto" and (known := file.load()) is not None:
        return Calibration(known, file, f"from {file.path}")
    started = time.perf_counter()
    try:
        model = await measure(executor, bounds, time.perf_counter, MEASURING_SECONDS)
    except (EngineError, ValueError) as error:
        logger.warning("steps could not be measured: %s", error)
        return Calibration(UNMEASURED, file, "assumed, because it could not be measured")
    file.save(model)
    took = time.perf_counter() - started
    return Calibration(model, file, f"measured in {took:.1f} s")
