"""A step in flight on a worker, whose outcome is collected later."""

from typing import NamedTuple, Protocol

from engine.step import StepResult, StepTimes


class StepOutcome(NamedTuple):
    """The result of a step and its times."""

    result: StepResult
    times: StepTimes


class StepInFlight(Protocol):
    """Steps are collected in the order of their launch, each once."""

    @property
    def may_wait(self) -> bool:
        """Whether `collect` may have to wait, so that the next step should be launched first."""

    def collect(self) -> StepOutcome:
        """Wait for the outcome; may be called in another thread than the one that launches.

        Any error but `WorkerLost` fails this step only; after `WorkerLost` no step can run.
        """
