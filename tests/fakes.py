"""Fakes that a test controls step by step. They pass the contract suites of their ports."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from engine.errors import StepFailed, Unavailable, WorkerLost
from engine.step import RequestId, SampleSpec, SamplingParams, Step, StepEntry, StepId, StepResult


class _InFlight(NamedTuple):
    step: Step
    answer: asyncio.Future[StepResult]


class ScriptedExecutor:
    """A `StepExecutor` that computes nothing: the test resolves each future, oldest first.

    `submitted` has every step ever submitted, resolved or not.
    """

    def __init__(self, depth: int = 1, max_restarts: int = 3) -> None:
        self.submitted: list[Step] = []
        self.num_restarts = 0
        self._num_crashes = 0  # in a row without a result
        self._depth = depth
        self._max_restarts = max_restarts
        self._in_flight: deque[_InFlight] = deque()
        self._lost: str | None = None
        self._on_lost: Callable[[], object] = lambda: None
        self._news = asyncio.Event()

    @property
    def depth(self) -> int:
        return self._depth

    @property
    def is_alive(self) -> bool:
        return self._lost is None

    def watch(self, on_lost: Callable[[], object]) -> None:
        self._on_lost = on_lost

    @property
    def in_flight(self) -> list[Step]:
        """Steps without a result, oldest first."""
        return [step for step, _ in self._in_flight]

    def submit(self, step: Step) -> asyncio.Future[StepResult]:
        assert len(self._in_flight) < self._depth, "more steps in flight than depth"
        answer: asyncio.Future[StepResult] = asyncio.get_running_loop().create_future()
        self.submitted.append(step)
        if self._lost is not None:
            answer.set_exception(WorkerLost(self._lost))
            return answer
        self._in_flight.append(_InFlight(step, answer))
        self._news.set()
        return answer

    async def restart(self) -> None:
        if self._num_crashes > self._max_restarts:
            raise Unavailable(f"the worker was restarted {self._max_restarts} times")
        self.num_restarts += 1
        self.lose("the worker is being restarted")
        self._lost = None

    async def next_step(self) -> Step:
        """The oldest step in flight, waited for if there is none."""
        while not self._in_flight:
            self._news.clear()
            await self._news.wait()
        return self._in_flight[0].step

    def answer(self, tokens: Sequence[int] | None = None, seconds: float = 0.01) -> Step:
        """Resolve the oldest step; without `tokens` each entry samples token 1."""
        step, answer = self._in_flight.popleft()
        self._num_crashes = 0
        if tokens is None:
            tokens = [1] * sum(entry.sample is not None for entry in step.entries)
        if not answer.done():
            answer.set_result(StepResult(step.step_id, tuple(tokens), seconds))
        return step

    def fail(self, line: str = "as scripted") -> Step:
        """Fail the oldest step; the worker continues."""
        step, answer = self._in_flight.popleft()
        if not answer.done():
            answer.set_exception(StepFailed(line))
        return step

    def lose(self, reason: str = "as scripted") -> None:
        """Lose the worker: every step in flight fails, and all to come until `restart`."""
        self._lost = reason
        self._num_crashes += bool(self._in_flight)
        while self._in_flight:
            answer = self._in_flight.popleft().answer
            if not answer.done():
                answer.set_exception(WorkerLost(reason))
        self._on_lost()


def a_step(step_id: int, *tokens: int) -> Step:
    """A step of one decode per token, each sampled greedily."""
    sample = SampleSpec(SamplingParams(temperature=0.0))
    return Step(
        StepId(step_id),
        tuple(
            StepEntry(RequestId(index), start=3, tokens=(token,), blocks=bytes(4), sample=sample)
            for index, token in enumerate(tokens)
        ),
    )
