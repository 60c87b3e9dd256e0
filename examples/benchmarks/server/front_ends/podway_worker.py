"""`podway serve` with a worker that computes nothing.

python -m examples.benchmarks.server.front_ends.podway_worker CHECKPOINT --port 8210
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from engine.step import Step, StepResult
from engine.worker.device import Device
from engine.worker.launched import StepOutcome
from engine.worker.process.worker import Worker
from engine.worker_settings import WorkerSettings
from examples.benchmarks.server.front_ends.pace import Pace
from gateway.serve import start


@dataclass(frozen=True, slots=True)
class Done:
    """A step that ended while it was launched."""

    outcome: StepOutcome
    may_wait: bool = False

    def collect(self) -> StepOutcome:
        return self.outcome


class PacedWorker(Worker):
    """Loads the model, then gives every request the same token."""

    pace: Pace | None = None  # after the warm-up steps

    @classmethod
    def load(
        cls,
        settings: WorkerSettings,
        progress: Callable[[str, int, int], None],
        device: Device | None = None,
    ) -> Self:
        worker = super().load(settings, progress, device)
        assert isinstance(worker, cls)
        worker.pace = Pace()
        return worker

    def launch(self, step: Step) -> Done:
        pace = self.pace or Pace()
        pace.wait()
        tokens = (pace.token,) * sum(entry.sample is not None for entry in step.entries)
        return Done(StepOutcome(StepResult(step.step_id, tokens, pace.period), self.times))


if __name__ == "__main__":
    start.WORKER = "examples.benchmarks.server.front_ends.podway_worker:PacedWorker"
    sys.exit(start.main(sys.argv[1:]))
