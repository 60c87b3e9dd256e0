"""All workers of a model in this process, a thread each, with a real data plane between them."""

import asyncio
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from engine.errors import Unavailable
from engine.step import Step, StepResult
from engine.worker.process.worker import Worker
from engine.worker_settings import Placement, WorkerReport
from tests.engine.worker.process.driving import settings_for
from tests.worker_settings import changed

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
        return answers[0] if answers else results[-self.num_ranks]

    def logits(self, step: Step) -> Tensor | None:
        found = self.on_all(lambda worker: worker.logits(step))
        answers = [logits for logits in found if logits is not None]
        assert len(answers) == 1, "logits come from one worker"
        return answers[0]


class FleetExecutor:
    """A `StepExecutor` over a fleet: every worker runs its steps in a thread of its own, so that
    as many steps are under way as there are stages."""

    def __init__(self, workers: Fleet, lookahead: int) -> None:
        self.is_alive = True
        self.depth = len(workers.workers) // workers.num_ranks + lookahead
        self._workers = workers.workers
        self._threads = [ThreadPoolExecutor(1) for _ in self._workers]
        self._drawer = len(self._workers) - workers.num_ranks

    def watch(self, on_lost: Callable[[], object]) -> None:
        """These workers are not lost."""

    def submit(self, step: Step) -> "asyncio.Future[StepResult]":
        for worker in self._workers:
            worker.learn(step)
        runs = [
            threads.submit(worker.run, step)
            for worker, threads in zip(self._workers, self._threads, strict=True)
        ]
        return asyncio.wrap_future(runs[self._drawer])

    async def restart(self) -> None:
        raise Unavailable("a fleet is not started again")

    def close(self) -> None:
        for threads in self._threads:
            threads.shutdown()


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
    attention: str = "cpu",
    kv_slots: int = 512,
    **changes: object,
) -> Iterator[Fleet]:
    """Workers on a small cache; they meet on a port of this machine."""
    with socket.socket() as listener, ThreadPoolExecutor(stages * ranks) as threads:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        rendezvous = f"127.0.0.1:{listener.getsockname()[1]}"

        def load(placement: Placement) -> Worker:
            settings = settings_for(model, attention, kv_slots=kv_slots)
            settings = changed(settings, placement=placement, **changes)
            return Worker.load(settings, lambda what, done, total: None)

        places = placements(stages, ranks, rendezvous, listener.fileno())
        yield Fleet(list(threads.map(load, places)), threads, ranks)
