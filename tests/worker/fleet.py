"""All workers of a model in this process, a thread each, with a real data plane between them."""

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from engine.step import Placement, Step, StepResult, WorkerReport
from engine.worker.worker import Worker
from tests.worker.driving import settings_for

T = TypeVar("T")


@dataclass(frozen=True)
class Fleet:
    """Runs each step on all workers at once; looks like one worker to a `Driver`."""

    workers: list[Worker]
    threads: ThreadPoolExecutor
    num_ranks: int

    @property
    def report(self) -> WorkerReport:
        return self.workers[-1].report

    def on_all(self, do: Callable[[Worker], T]) -> list[T]:
        return list(self.threads.map(do, self.workers))

    def run(self, step: Step) -> StepResult:
        results = self.on_all(lambda worker: worker.run(step))
        answers = [result for result in results if result.tokens]
        assert len(answers) <= 1, "tokens come from one worker"
        return answers[0] if answers else results[-1]

    def logits(self, step: Step) -> Tensor | None:
        found = self.on_all(lambda worker: worker.logits(step))
        answers = [logits for logits in found if logits is not None]
        assert len(answers) == 1, "logits come from one worker"
        return answers[0]


def placements(stages: int, ranks: int, rendezvous: str, listener: int) -> list[Placement]:
    return [
        Placement(stage, stages, rank, ranks, rendezvous, listener if stage == rank == 0 else None)
        for stage in range(stages)
        for rank in range(ranks)
    ]


@contextmanager
def fleet(
    model: Path,
    stages: int,
    ranks: int,
    *,
    attention: str = "reference",
    kv_slots: int = 512,
    lookahead: int = 0,
) -> Iterator[Fleet]:
    """Workers on a small cache; they meet on a port of this machine."""
    with socket.socket() as listener, ThreadPoolExecutor(stages * ranks) as threads:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        rendezvous = f"127.0.0.1:{listener.getsockname()[1]}"

        def load(placement: Placement) -> Worker:
            settings = settings_for(model, attention, kv_slots=kv_slots)
            settings = replace(settings, placement=placement, lookahead=lookahead)
            return Worker.load(settings, lambda what, done, total: None)

        places = placements(stages, ranks, rendezvous, listener.fileno())
        yield Fleet(list(threads.map(load, places)), threads, ranks)
