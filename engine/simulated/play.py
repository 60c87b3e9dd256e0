"""Play a trace through a real `Engine` in virtual time, and say how every request fared."""

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.loop import Engine
from engine.request import Ask, FinishReason
from engine.simulated.loop import run_virtual
from engine.step import Sampling

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.ports import StepExecutor
    from engine.scheduler import IterationScheduler
    from engine.simulated.trace import Arrival

GREEDY = Sampling(temperature=0.0)


@dataclass(frozen=True, slots=True)
class Fared:
    """A finished request: seconds from arrival to its first and last token, and its size."""

    arrival: "Arrival"
    ttft: float
    jct: float
    num_preemptions: int

    @property
    def normalized_latency(self) -> float:
        """Orca's metric: seconds per output token, end to end."""
        return self.jct / self.arrival.output_len


def play(
    scheduler: "IterationScheduler", executor: "StepExecutor", arrivals: "Sequence[Arrival]"
) -> "list[Fared]":
    """Every arrival to its last token, in order of arrival. Same inputs, same answer."""
    return run_virtual(_play(scheduler, executor, arrivals))


async def _play(
    scheduler: "IterationScheduler", executor: "StepExecutor", arrivals: "Sequence[Arrival]"
) -> "list[Fared]":
    engine = Engine(scheduler, executor, asyncio.get_running_loop().time)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(engine.run())
        async with asyncio.TaskGroup() as clients:
            tasks = [clients.create_task(_client(engine, arrival)) for arrival in arrivals]
        running.cancel()
    return [task.result() for task in tasks]


async def _client(engine: Engine, arrival: "Arrival") -> Fared:
    await asyncio.sleep(arrival.at - asyncio.get_running_loop().time())
    prompt = (1,) * arrival.prompt_len
    with engine.stream(Ask(prompt, arrival.output_len, GREEDY)) as stream:
        finish: FinishReason | None = None
        while finish is None:
            finish = (await stream.next()).finish
        request = stream.request
    assert request.first_token_at is not None, "a finished request has a first token"
    assert request.last_token_at is not None, "and a last one"
    return Fared(
        arrival=arrival,
        ttft=request.first_token_at - request.arrived_at,
        jct=request.last_token_at - request.arrived_at,
        num_preemptions=request.num_preemptions,
    )
