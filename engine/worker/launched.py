"""A step that a worker has launched, from which somebody collects what came of it."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from engine.step import StepResult, StepTimes


class Collected(NamedTuple):
    """What came of a step, and when."""

    result: StepResult
    times: StepTimes


class Launched(Protocol):
    """Steps are collected in the order in which they were launched, each once."""

    @property
    def is_late(self) -> bool:
        """Whether collecting may have to wait, so that the next step is better launched before."""
        ...

    def collect(self) -> Collected:
        """Wait for it; another thread than the one that launches may call this.

        What it raises is the failure of this step, but `WorkerLost`: then there is no next one.
        """
        ...


@dataclass(frozen=True, slots=True)
class Done:
    """A step that was computed when it was launched."""

    collected: Collected

    @property
    def is_late(self) -> bool:
        return False

    def collect(self) -> Collected:
        return self.collected
