"""One case: an engine and its clients, played to the end in virtual time, checked at each step."""

import asyncio
import hashlib
import logging
from collections import Counter
from random import Random
from typing import TYPE_CHECKING

from engine.control.scheduler import IterationScheduler
from engine.cost.live import LiveCost
from engine.cost.model import CostModel
from engine.errors import InvalidRequest
from engine.iteration import Observer
from engine.loop import Engine
from engine.policy.table import build
from engine.simulated.virtual_loop import run_virtual
from tests.fuzz.engine.clients import LORAS, Clients
from tests.fuzz.engine.device import Device
from tests.fuzz.engine.drawing import Settings, draw, draw_policy
from tests.fuzz.engine.executor import FuzzedExecutor
from tests.fuzz.engine.language import Text
from tests.fuzz.engine.memory import Memory
from tests.fuzz.engine.reading import Reader
from tests.fuzz.engine.step_checks import check_step
from tests.fuzz.engine.wrong import Wrong
from tests.scheduling import check_preemption

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from engine.media import EncoderReport, ImagePixels
    from engine.policy.base import Policy
    from engine.request import Request
    from engine.step import BlockMove, RequestId, Step

COST = CostModel(((0, 0.01), (64, 0.05), (512, 0.4)), 1e-6, 1e-7, 1e-4)
LONGEST = 4000.0  # virtual seconds until every request has ended
IDLE_SECONDS = 600.0  # more than any stall of a step in flight


class _Watch(Observer):
    """Counts events, and knows the text of every request."""

    def __init__(self, num_groups: int, counts: "Counter[str]") -> None:
        self._num_groups = num_groups
        self._counts = counts
        self.texts: dict[RequestId, Text] = {}
        self.requests: dict[RequestId, Request] = {}
        self.ends: Counter[RequestId] = Counter()
        self.freed_after = 0  # the most iterations from a cancellation to free KV
        self.scheduler: IterationScheduler  # from the start of the case on

    def arrived(self, request: "Request", now: float) -> None:
        self.texts[request.request_id] = Text(request.spec, self._num_groups)
        self.requests[request.request_id] = request

    def preempted(self, request: "Request", now: float) -> None:
        self._counts["preempted"] += 1
        check_preemption(self.scheduler, request)

    def swapped(self, request: "Request", move: "BlockMove", now: float) -> None:
        self._counts[f"swapped {move.direction}{' awaited' if move.is_awaited else ''}"] += 1

    def ended(self, request: "Request", now: float) -> None:
        self.ends[request.request_id] += 1

    def freed(self, request: "Request", iterations: int) -> None:
        self.freed_after = max(self.freed_after, iterations)


class _Store:
    """The names that a shared store has; other servers drop some of them."""

    def __init__(self, memory: Memory, random: Random) -> None:
        self._memory = memory
        self.random = random

    async def find(self, names: "Sequence[bytes]") -> "Container[bytes]":
        await asyncio.sleep(self.random.choice([0.0, 0.01, 0.2]))
        store = self._memory.store
        if store and self.random.random() < 0.1:
            del store[self.random.choice(list(store))]
        return {name for name in names if name in store}


class Case:
    """The case of a seed. `steps` is a digest of every step and every client's result."""

    longest: float | None = LONGEST

    def __init__(self, seed: int, *, records: bool = False) -> None:
        self._records = records
        self.random = random = Random(seed)
        self.settings = settings = self._draw_settings()
        self.counts: Counter[str] = Counter()
        self._steps = hashlib.sha256()
        cost = LiveCost(COST)
        self._cost = cost
        self._watch = _Watch(len(settings.windows), self.counts)
        self.scheduler = IterationScheduler(
            settings.scheduler,
            settings.ledger(),
            self._draw_policy(),
            self._watch,
            cost,
            settings.drafter(cost),
            self._draw_encoder(),
        )
        self._watch.scheduler = self.scheduler
        self._memory = Memory(settings.block_size, settings.unread_rate, random, self.counts)
        reader = Reader(self._memory, settings.windows, self.counts)
        device = self._make_device(reader)
        self._executor = FuzzedExecutor(
            device, COST, settings.num_stages, settings.steps, random, self.counts
        )
        self._executor.check = self._check
        self._executor.check_lost = self._check_lost
        self._clients = self._make_clients()

    def __repr__(self) -> str:
        return f"{self.settings}\n{self.scheduler!r}"

    def _draw_settings(self) -> Settings:
        return draw(self.random)

    def _draw_encoder(self) -> "EncoderReport | None":
        """The model's image encoder."""
        return None

    def _make_device(self, reader: Reader) -> Device:
        rates = self.settings.rows
        return Device(reader, self._watch.texts, rates, self.random, self.counts)

    async def _put_pixels(self, piece: "ImagePixels") -> None:
        """A piece of an image reaches the worker."""
        raise Wrong("pixels for a model without an encoder")

    def _make_clients(self) -> Clients:
        return Clients(self.settings, self.random, self.counts)

    def _draw_policy(self) -> "Policy":
        name, policy = draw_policy(self.random, self.settings.scheduler.max_batch_size)
        return build(name, self._cost, policy, serves=False)

    def play(self) -> str:
        """Play the case; returns a digest of its steps and results. Raises `Wrong`, an
        `AssertionError` of the engine, or `Deadlock`."""
        logger = logging.getLogger("engine.loop")  # its errors are drawn
        level = logger.level
        logger.setLevel(logging.CRITICAL)
        try:
            run_virtual(self._play())
        finally:
            logger.setLevel(level)
        self._steps.update(repr(sorted(self._clients.results.items())).encode())
        return self._steps.hexdigest()

    async def _play(self) -> None:
        settings, loop = self.settings, asyncio.get_running_loop()
        engine = Engine(
            self.scheduler,
            self._executor,
            loop.time,
            lookahead=settings.lookahead,
            depth=settings.num_stages + settings.lookahead,
            lookup=_Store(self._memory, self.random) if settings.tiers.store else None,
            send_pixels=self._put_pixels,
        )
        running = loop.create_task(engine.run())
        faults = loop.create_task(self._make_faults(engine))
        clients = loop.create_task(self._clients.run(engine))
        try:
            done, _ = await asyncio.wait(
                [running, faults, clients],
                timeout=self.longest,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if not done:
                raise Wrong(f"a request never ends: {engine!r}")
            for task in done:
                task.result()
            faults.cancel()
            await self._idle(engine)
            if running.done():
                running.result()
            self._check_end(loop.time())
        finally:
            for task in (running, faults, clients):
                task.cancel()

    async def _make_faults(self, engine: Engine) -> None:
        """Kill workers and switch policies, and call what is rarely called."""
        random, rates = self.random, self.settings.clients
        while True:
            await self._until_faults()
            await asyncio.sleep(random.choice([0.05, 0.3, 1.0]))
            if random.random() < rates.kill:
                self._executor.kill()
            if random.random() < rates.switch:
                self.counts["switched"] += 1
                engine.switch(self._draw_policy())
            if random.random() < 0.1 * rates.cancel:
                self.counts["cancelled by label"] += engine.cancel(random.choice("ab"), None)
            if self.settings.has_loras and random.random() < 0.1 * rates.cancel:
                engine.fail_lora(random.choice(LORAS).lora_id, InvalidRequest("drawn"))

    async def _until_faults(self) -> None:
        """Faults may be made at any time."""

    async def _idle(self, engine: Engine) -> None:
        """Wait until the engine, which has no requests, has saved what it keeps."""
        if self.random.random() < 0.5:
            await engine.drain(IDLE_SECONDS)
        await asyncio.sleep(IDLE_SECONDS)

    def _check(self, step: "Step", in_flight: "list[Step]") -> None:
        """Check a plan and the books, before the step is submitted."""
        if self._records:
            self._steps.update(repr(step).encode())
        check_step(step, in_flight, self.settings.scheduler, self.settings.block_size)
        scheduler = self.scheduler
        scheduler.ledger.check()
        scheduler.pool.check()
        live = {request.request_id for request in scheduler.pool}
        if scheduler.ledger.num_leaked(live):
            raise Wrong(f"blocks are lost: {scheduler!r}")
        ordered = list(scheduler.policy.order(asyncio.get_running_loop().time()))
        if len(ordered) != len(live) or {request.request_id for request in ordered} != live:
            raise Wrong(f"the policy orders {len(ordered)} of {len(live)} requests")

        entries = [entry for each in (step, *in_flight) for entry in each.entries]
        suspects = {e.request_id for e in entries if self._watch.requests[e.request_id].num_crashes}
        if len(suspects) > 1:
            raise Wrong(f"requests {suspects}, of which one may kill workers, are in flight")

    def _check_lost(self) -> None:
        """A worker died: no KV is left on it."""
        ledger = self.scheduler.ledger
        if ledger.num_held or ledger.num_moving or ledger.blocks.host.num_held:
            raise Wrong(f"KV of a dead worker is kept: {ledger!r}")

    def _check_end(self, now: float) -> None:
        """Every request has ended once, and nothing is kept for any."""
        scheduler, ledger = self.scheduler, self.scheduler.ledger
        for request in self._watch.requests.values():
            num_ends = self._watch.ends[request.request_id]
            if not request.state.is_terminal or num_ends != 1:
                raise Wrong(f"request {request.request_id} ended {num_ends} times")
        if self._watch.freed_after > self._executor.depth + self.settings.lookahead:
            raise Wrong(f"KV was freed {self._watch.freed_after} iterations after a cancellation")
        ledger.check()
        scheduler.pool.check()
        if len(scheduler.pool) or ledger.num_held or ledger.num_moving or ledger.num_leaked(()):
            raise Wrong(f"something is held after the end: {scheduler!r}")
        if ledger.blocks.host.num_held or ledger.states.num_leaked(()):
            raise Wrong(f"the host holds something after the end: {scheduler!r}")
        if list(scheduler.policy.order(now)):
            raise Wrong("the policy keeps requests after the end")


def play(seed: int, counts: "Counter[str]") -> None:
    """Play the case of a seed, and count what happened in it."""
    case = Case(seed)
    case.play()
    counts.update(case.counts)
