"""One random case: the production groups, replicas and schedulers over workers that die.

Checked all the time: the bytes in memory are within the bound, a model is closed only when none of
its requests runs, and iterations of two models never overlap, while those of one model's replicas
do. A request ends with exactly its
tokens, or with an error. In the end there is no lease, no request and no KV in use.
"""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

from engine.control.scheduler import IterationScheduler
from engine.control.settings import SchedulerSettings
from engine.cost.live import LiveCost
from engine.cost.model import CostModel
from engine.errors import EngineError, StartupError, Unavailable, WorkerLost
from engine.kv.ledger import KVLedger
from engine.kv_shape import KVShape
from engine.loop import Engine
from engine.policy import build
from engine.replicas.replica import QueueDelay, Replica
from engine.replicas.replicas import Replicas, ServingEngine
from engine.request import RequestSpec
from engine.simulated.executor import SimulatedExecutor, synthetic_token
from engine.simulated.virtual_loop import run_virtual
from engine.step import RequestId, SamplingParams, Step, StepEntry, StepResult
from engine.turns import Turn, Turns
from gateway.groups.group import Deployment, Group, OpenServing, ServedModel, Serving, Status
from gateway.groups.groups import Groups
from gateway.groups.terms import ServerTerms, Terms
from gateway.loras import LoraRegistry
from gateway.observe.metrics import LoraUsage
from tests.gateway.lora_loader import ScriptedLoader

GREEDY = SamplingParams(temperature=0.0)
END_SECONDS = 10_000.0
REST_SECONDS = 60.0  # for iterations in flight, loads and unloads at the end


@dataclass
class Tally:
    """What has happened."""

    complete: int = 0
    failed: int = 0
    cancelled: int = 0
    deaths: int = 0
    loads: int = 0
    moved: int = 0  # requests, from a replica of a model to another one
    busy: "dict[MortalExecutor, float]" = field(default_factory=dict)  # the ends of iterations
    running: Counter[str] = field(default_factory=Counter)  # open requests by model
    schedulers: list[IterationScheduler] = field(default_factory=list)

    @property
    def counts(self) -> Counter[str]:
        """How many requests had which end, and how many deaths, loads and moves there were."""
        names = ("complete", "failed", "cancelled", "deaths", "loads", "moved")
        return Counter({name: getattr(self, name) for name in names})


class MortalExecutor(SimulatedExecutor):
    """Its worker can be killed; it is restarted in a second, or not at all. Those of one `model`
    compute at the same time."""

    def __init__(
        self, cost: CostModel, tally: Tally, can_restart: Callable[[], bool], model: str = ""
    ) -> None:
        super().__init__(cost)
        self.model = model
        self._tally = tally
        self._can_restart = can_restart
        self._is_alive = True
        self._on_lost: Callable[[], object] = lambda: None
        self._futures: list[asyncio.Future[StepResult]] = []

    @property
    def is_alive(self) -> bool:
        return self._is_alive

    def watch(self, on_lost: Callable[[], object]) -> None:
        self._on_lost = on_lost

    def submit(self, step: Step) -> "asyncio.Future[StepResult]":
        loop = asyncio.get_running_loop()
        for other, until in self._tally.busy.items():
            may_overlap = other.model == self.model and other is not self
            assert may_overlap or loop.time() >= until - 1e-9, "iterations of two models overlap"
        result, at = self.run(step, loop.time())
        self._tally.busy[self] = at
        future: asyncio.Future[StepResult] = loop.create_future()
        self._futures.append(future)
        loop.call_at(at, self._resolve, future, result)
        return future

    def _resolve(self, future: "asyncio.Future[StepResult]", result: StepResult) -> None:
        if not future.done():
            self._futures.remove(future)
            future.set_result(result)

    def kill(self) -> None:
        if self._is_alive:
            self._is_alive = False
            self._tally.deaths += 1
            self._tally.busy.pop(self, None)
            for future in self._futures:
                future.set_exception(WorkerLost("killed"))
            self._futures.clear()
            self._on_lost()

    async def restart(self) -> None:
        await asyncio.sleep(1.0)
        if not self._can_restart():
            raise Unavailable("it dies again and again")
        self._is_alive = True


class Case:
    """A random case; the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.tally = Tally()
        self._executors: dict[str, list[MortalExecutor]] = {}

    def run(self) -> Tally:
        """Run the case. Raises `AssertionError` for anything that is wrong."""
        run_virtual(self._run())
        return self.tally

    async def _run(self) -> None:
        rng, clock = self._random, asyncio.get_running_loop().time
        self._turns = Turns(clock)
        sizes = [rng.randint(1, 3) for _ in range(rng.randint(2, 4))]
        self._memory = max(sizes) + rng.randint(0, 2)
        groups = [
            Group(self._deployment(f"m{i}", size), self._opener(f"m{i}", size), clock, 1.0)
            for i, size in enumerate(sizes)
        ]
        terms = ServerTerms(memory=self._memory, max_load_wait=rng.choice((5.0, 60.0, 1e6)))
        self._groups = Groups(groups, terms)
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(self._groups.run())
            async with asyncio.timeout(END_SECONDS), asyncio.TaskGroup() as work:
                for _ in range(rng.randint(5, 25)):
                    work.create_task(self._request())
                for _ in range(rng.randint(0, 6)):
                    work.create_task(self._disturb())
            await asyncio.sleep(REST_SECONDS)
            self._check_end()
            running.cancel()
        await self._groups.close()
        assert not any(group.is_used or group.loaded for group in self._groups)

    def _deployment(self, name: str, size: int) -> Deployment:
        rng = self._random
        terms = Terms(
            idle_unload=rng.choice((None, None, 3.0)),
            share=rng.choice((0.5, 1.0, 4.0)),
            priority=rng.randint(0, 2),
        )
        return Deployment(name, terms=terms, num_bytes=size)

    def _opener(self, name: str, size: int) -> OpenServing:
        rng = self._random
        share, count = rng.choice((0.5, 1.0, 4.0)), rng.choice((1, 1, 2, 3))
        fails, dies_for_good = rng.random() < 0.1, rng.random() < 0.1

        @asynccontextmanager
        async def open_serving() -> AsyncIterator[Serving]:
            await asyncio.sleep(rng.uniform(0.0, 4.0))
            if fails and rng.random() < 0.5:
                raise StartupError("as scripted")
            turn = self._turns.join(share)
            self._executors[name] = []
            replicas = [
                self._replica(name, turn if count == 1 else turn.part(), not dies_for_good)
                for _ in range(count)
            ]
            engine: ServingEngine = replicas[0].engine
            if count > 1:
                engine = Replicas(replicas, asyncio.get_running_loop().time)
            self.tally.loads += 1
            nothing = cast("Any", None)
            model = ServedModel(name, 0, "", nothing, nothing, None)
            assert self._groups.loads.num_bytes <= self._memory, "more than the memory's bound"
            loras = LoraRegistry(ScriptedLoader(), LoraUsage(), (name,), engine.fail_lora)
            yield Serving(engine, model, nothing, nothing, loras, num_bytes=size)
            assert not self.tally.running[name], "a model with a running request was closed"
            self.tally.moved += engine.moves.num_moved if isinstance(engine, Replicas) else 0

        return open_serving

    def _replica(self, name: str, turn: Turn, can_restart: bool) -> Replica:
        cost = CostModel.linear(
            per_step=self._random.uniform(0.01, 0.3), per_token=0.0, per_slot=0.0
        )
        executor = MortalExecutor(cost, self.tally, lambda: can_restart, name)
        settings = SchedulerSettings(max_model_len=200, max_batch_size=4)
        live = LiveCost(cost)
        delay = QueueDelay(live, settings.max_batch_size)
        ledger = KVLedger(KVShape(40, 4))
        scheduler = IterationScheduler(settings, ledger, build("fcfs", cost), delay, live)
        self._executors[name].append(executor)
        self.tally.schedulers.append(scheduler)
        clock = asyncio.get_running_loop().time
        return Replica(Engine(scheduler, executor, clock, turn=turn), delay)

    async def _request(self) -> None:
        """A request of a random model, some of which are cancelled at a random moment."""
        rng, tally = self._random, self.tally
        group = rng.choice(list(self._groups))
        await asyncio.sleep(rng.uniform(0.0, 20.0))
        spec = RequestSpec((1,) * rng.randint(1, 20), rng.randint(1, 60), GREEDY)
        seconds = rng.uniform(0.0, 10.0) if rng.random() < 0.3 else None
        try:
            async with asyncio.timeout(seconds):
                with group.leases.claim() as lease:
                    await self._groups.loads.ensure(group, lease)
                    tokens = await self._generate(group, spec)
        except TimeoutError:
            tally.cancelled += 1
        except EngineError:
            tally.failed += 1
        else:
            assert len(tokens) == spec.max_tokens
            tally.complete += 1

    async def _generate(self, group: Group, spec: RequestSpec) -> list[int]:
        tokens: list[int] = []
        with group.serving.engine.stream(spec) as stream:
            self.tally.running[group.name] += 1
            try:
                finish = None
                while finish is None:
                    chunk = await stream.next()
                    tokens += chunk.tokens
                    finish = chunk.finish
            finally:
                self.tally.running[group.name] -= 1
            assert tokens == expected_tokens(stream.request.request_id, spec), "tokens differ"
        return tokens

    async def _disturb(self) -> None:
        rng = self._random
        await asyncio.sleep(rng.uniform(0.0, 30.0))
        group = rng.choice(list(self._groups))
        action = rng.randrange(3)
        if action == 0:
            if executors := self._executors.get(group.name):
                rng.choice(executors).kill()
        elif action == 1:
            self._groups.begin_unload(group)
        else:
            self._groups.loads.begin(group)

    def _check_end(self) -> None:
        for group in self._groups:
            assert not group.is_used, group
            assert group.status in (Status.LOADED, Status.UNLOADED, Status.FAILED), group
        for scheduler in self.tally.schedulers:
            assert not scheduler.pool, scheduler
            assert scheduler.ledger.num_held == 0, scheduler


def expected_tokens(request_id: RequestId, spec: RequestSpec) -> list[int]:
    """The tokens of a request that nothing disturbs."""
    first = len(spec.prompt)
    return [
        synthetic_token(StepEntry(request_id, first + index, (), b"", None))
        for index in range(spec.max_tokens)
    ]


def play(seed: int, counts: "Counter[str]") -> None:
    """Play the case of a seed, and count what happened in it."""
    counts.update(Case(seed).run().counts)
