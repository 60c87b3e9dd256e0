"""An engine in virtual time beside a client; its executor fails or dies where a test says so."""

import asyncio
from collections.abc import Awaitable, Callable

from engine.control.scheduler import IterationScheduler
from engine.control.settings import SchedulerSettings
from engine.cost.model import CostModel
from engine.errors import EngineError, StepFailed, Unavailable, WorkerLost
from engine.kv.ledger import KVLedger
from engine.kv_shape import KVShape
from engine.loop import Engine
from engine.policy.fcfs import FirstComeFirstServed
from engine.simulated.executor import SimulatedExecutor
from engine.simulated.virtual_loop import run_virtual
from engine.step import SamplingParams, Step, StepResult
from engine.stream import TokenStream

GREEDY = SamplingParams(temperature=0.0)
ONE_SECOND = CostModel.linear(per_step=1.0, per_token=0.0, per_slot=0.0)


class Mortal(SimulatedExecutor):
    """Fails or dies at the steps that a test names."""

    def __init__(self, fails: tuple[int, ...] = (), dies: tuple[int, ...] = ()) -> None:
        super().__init__(ONE_SECOND)
        self.fails, self.dies = fails, dies
        self.restarts_left = 9
        self.is_dead = False
        self.on_lost: Callable[[], object] = lambda: None

    @property
    def is_alive(self) -> bool:
        return not self.is_dead

    def watch(self, on_lost: Callable[[], object]) -> None:
        self.on_lost = on_lost

    def die(self) -> None:
        """Die while nothing is in flight."""
        self.is_dead = True
        self.on_lost()

    def submit(self, step: Step) -> "asyncio.Future[StepResult]":
        error: EngineError
        if step.step_id in self.fails:
            error = StepFailed("the step failed")
        elif step.step_id in self.dies:
            error = WorkerLost("the worker died")
        else:
            return super().submit(step)
        future: asyncio.Future[StepResult] = asyncio.get_running_loop().create_future()
        future.set_exception(error)
        return future

    async def restart(self) -> None:
        if not self.restarts_left:
            raise Unavailable("restarted too often")
        self.restarts_left -= 1
        await asyncio.sleep(10)
        self.is_dead = False


def serve(
    client: Callable[[Engine], Awaitable[None]],
    executor: SimulatedExecutor | None = None,
    num_blocks: int = 100,
) -> Engine:
    """Run the client beside the engine; afterwards no request holds a block."""

    async def main() -> Engine:
        clock = asyncio.get_running_loop().time
        settings = SchedulerSettings(max_model_len=500, max_batch_size=4, max_batch_tokens=8)
        scheduler = IterationScheduler(
            settings, KVLedger(KVShape(num_blocks, 1)), FirstComeFirstServed()
        )
        engine = Engine(scheduler, executor or SimulatedExecutor(ONE_SECOND), clock)
        async with asyncio.TaskGroup() as group:
            running = group.create_task(engine.run())
            await client(engine)
            await asyncio.sleep(2)
            running.cancel()
        assert not scheduler.pool
        assert scheduler.ledger.num_held == 0
        scheduler.ledger.check()
        return engine

    return run_virtual(main())


async def read(stream: TokenStream) -> list[int]:
    tokens: list[int] = []
    while True:
        chunk = await stream.next()
        tokens += chunk.tokens
        if chunk.finish is not None:
            return tokens


def now() -> float:
    return asyncio.get_running_loop().time()
