"""One random case: the production replicas, engines and schedulers over workers that die.

A request ends with exactly its tokens, unless it is cancelled, its deadline passes, or all replicas
have died for good. In the end there is no request, no suspect and no KV in use at any replica.
"""

import asyncio
import random
from collections import Counter
from dataclasses import dataclass

from engine.control.admission import Admission
from engine.control.scheduler import IterationScheduler
from engine.control.settings import SchedulerSettings
from engine.cost.live import LiveCost
from engine.cost.model import CostModel
from engine.errors import (
    DeadlineExceeded,
    DeadlineUnmeetable,
    EngineError,
    InvalidRequest,
    Overloaded,
    Unavailable,
    WorkerLost,
)
from engine.kv.ledger import KVLedger
from engine.kv_shape import KVShape
from engine.loop import Engine
from engine.policy import POLICIES, build
from engine.replicas.replica import QueueDelay, Replica
from engine.replicas.replicas import Replicas
from engine.request import RequestSpec
from engine.simulated.virtual_loop import run_virtual
from engine.step import SamplingParams
from engine.stream import TokenStream
from tests.fuzz.groups.case import MortalExecutor, expected_tokens
from tests.fuzz.groups.case import Tally as ExecutorTally

GREEDY = SamplingParams(temperature=0.0)
END_SECONDS = 100_000.0
REST_SECONDS = 60.0  # for iterations in flight at the end
MAX_LEN = 200
REJECTIONS = Overloaded | Unavailable | DeadlineUnmeetable | InvalidRequest
MANY_CRASHES = 1000


@dataclass
class Tally:
    """What has happened."""

    complete: int = 0
    rejected: int = 0
    cancelled: int = 0
    expired: int = 0
    failed: int = 0
    deaths: int = 0
    moved: int = 0
    recomputed: int = 0  # at another replica, after they had started
    cached: int = 0

    @property
    def counts(self) -> Counter[str]:
        return Counter(vars(self))


class Case:
    """A random case; the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.tally = Tally()
        self._executors: list[MortalExecutor] = []
        self._executor_tallies: list[ExecutorTally] = []
        self._engines: list[Engine] = []

    def run(self) -> Tally:
        """Run the case. Raises `AssertionError` for anything that is wrong."""
        run_virtual(self._run())
        return self.tally

    async def _run(self) -> None:
        rng = self._random
        count = rng.randint(2, 5)
        num_mortal = rng.choice((0, 0, 0, 1, count - 1, count))  # die for good once they die
        self._all_may_fail = num_mortal == count
        self._policy = rng.choice(tuple(POLICIES))
        self._max_crashes = rng.choice((3, MANY_CRASHES))
        self._settings = SchedulerSettings(
            max_model_len=MAX_LEN,
            max_batch_size=rng.choice((1, 2, 4)),
            max_batch_tokens=rng.choice((4, 16, 64)),
            admission=rng.choice((Admission.GROW, Admission.RESERVE)),
            max_queue_requests=rng.choice((5, 1000)),
            max_crashes=self._max_crashes,
        )
        replicas = [self._replica(can_restart=n >= num_mortal) for n in range(count)]
        self._prompts = [tuple(rng.choices(range(9), k=60)) for _ in range(3)]
        clock = asyncio.get_running_loop().time
        self._replicas = Replicas(replicas, clock)
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(self._replicas.run())
            async with asyncio.timeout(END_SECONDS), asyncio.TaskGroup() as work:
                for _ in range(rng.randint(5, 40)):
                    work.create_task(self._request())
                for _ in range(rng.randint(0, 8)):
                    work.create_task(self._disturb())
            await asyncio.sleep(REST_SECONDS)
            self._check_end()
            await self._replicas.drain(1.0)
            running.cancel()

    def _replica(self, *, can_restart: bool) -> Replica:
        rng = self._random
        seconds = rng.uniform(0.01, 0.3)
        model = CostModel.linear(per_step=seconds, per_token=seconds / 10, per_slot=0.0)
        tally = ExecutorTally()
        executor = MortalExecutor(model, tally, lambda: can_restart)
        cost = LiveCost(model)
        delay = QueueDelay(cost, self._settings.max_batch_size)
        ledger = KVLedger(KVShape(60, 4))
        policy = build(self._policy, cost)
        scheduler = IterationScheduler(self._settings, ledger, policy, delay, cost)
        engine = Engine(scheduler, executor, asyncio.get_running_loop().time)
        self._executors.append(executor)
        self._executor_tallies.append(tally)
        self._engines.append(engine)
        return Replica(engine, delay)

    async def _request(self) -> None:
        """A request, some of which are cancelled at a random moment."""
        rng, tally = self._random, self.tally
        await asyncio.sleep(rng.uniform(0.0, rng.choice((1.0, 20.0))))
        spec = RequestSpec(
            rng.choice(self._prompts)[: rng.randint(1, 60)] + (9,) * rng.randint(1, 20),
            rng.randint(1, 60),
            GREEDY,
            tenant=rng.choice(("a", "b")),
            priority=rng.randint(0, 2),
            is_background=rng.random() < 0.1,
            deadline=rng.choice((None, None, None, 5.0, 60.0)),
        )
        seconds = rng.uniform(0.0, 10.0) if rng.random() < 0.2 else None
        try:
            async with asyncio.timeout(seconds):
                end = await self._end_of(spec)
        except TimeoutError:
            end = "cancelled"
        setattr(tally, end, getattr(tally, end) + 1)

    async def _end_of(self, spec: RequestSpec) -> str:
        """How a request ended that nobody cancelled."""
        is_accepted, error = False, None
        try:
            with self._replicas.stream(spec) as stream:
                is_accepted = True
                await self._read(stream)
        except EngineError as raised:
            error = raised
        if error is None:
            return "complete"
        if not is_accepted:
            assert isinstance(error, REJECTIONS), error
            return "rejected"
        if isinstance(error, DeadlineExceeded):
            return "expired"
        if isinstance(error, WorkerLost):
            assert self._max_crashes < MANY_CRASHES, error
        else:
            assert self._all_may_fail, error
        return "failed"

    async def _read(self, stream: TokenStream) -> None:
        first, request, spec = stream.owner, stream.request, stream.spec
        tokens: list[int] = []
        finish, was_started = None, False
        while finish is None:
            chunk = await stream.next()
            if stream.owner is first:
                was_started = True
            tokens += chunk.tokens
            finish = chunk.finish
        assert tokens == expected_tokens(request.request_id, spec), "tokens differ"
        self.tally.recomputed += stream.owner is not first and was_started
        self.tally.cached += request.num_cached

    async def _disturb(self) -> None:
        rng = self._random
        await asyncio.sleep(rng.uniform(0.0, 30.0))
        if rng.random() < 0.8:
            rng.choice(self._executors).kill()
            return
        name = rng.choice(tuple(POLICIES))
        for engine in self._engines:
            engine.switch(build(name, engine.scheduler.cost))

    def _check_end(self) -> None:
        self.tally.moved = self._replicas.moves.num_moved
        self.tally.deaths = sum(each.deaths for each in self._executor_tallies)
        for engine in self._engines:
            scheduler = engine.scheduler
            assert not scheduler.pool, scheduler
            scheduler.pool.check()
            scheduler.ledger.check()
            assert scheduler.ledger.num_held == 0, scheduler
            assert not list(scheduler.policy.order(0.0)), scheduler
            assert scheduler.lifecycle.least_crashes == self._max_crashes, "a suspect is left"


def play(seed: int, counts: "Counter[str]") -> None:
    """Play the case of a seed, and count what happened in it."""
    counts.update(Case(seed).run().counts)
