"""Several scripted models behind the real app, in virtual time.

A model takes `load_seconds` to load; an iteration takes `tests.gateway.rig.STEP` seconds, and its
texts are "Hello!" for every request.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Concatenate

from engine.control.scheduler import IterationScheduler
from engine.errors import StartupError
from engine.simulated.virtual_loop import run_virtual
from gateway.batch.runner import BatchRunner
from gateway.generation.restored_streams import restore_streams
from gateway.groups.group import Deployment, Group, OpenServing, Serving
from gateway.groups.groups import Groups
from gateway.groups.terms import ServerTerms, Terms
from gateway.observe.exposition import Exposition
from gateway.observe.metrics import Metrics
from gateway.observe.readings import ServerReadings
from gateway.service import Service
from gateway.web.app import build_app
from gateway.web.table import ROUTES
from tests.gateway.rig import STEP, Setting, build_rig
from tests.gateway.scenes import P, plays
from tests.wire.asgi import Client


@dataclass(frozen=True, slots=True)
class Model:
    """A model of a scene. Its first `num_failures` loads fail."""

    name: str
    terms: Terms = field(default_factory=Terms)
    num_bytes: int = 1
    load_seconds: float = 2.0
    num_failures: int = 0
    setting: Setting = field(default_factory=lambda: Setting(texts=("Hello!",) * 500))


@dataclass(frozen=True, slots=True)
class Fleet:
    """What a scene uses. `loads` has the names of models in the order of their loads, and
    `schedulers` all schedulers that there were."""

    client: Client
    service: Service
    groups: Groups
    loads: list[str]
    schedulers: list[IterationScheduler]

    def group(self, name: str) -> Group:
        return self.groups.find(name)


Scene = Callable[[Fleet], Awaitable[None]]


def play(
    scene: Scene, *models: Model, terms: ServerTerms | None = None, store: Path | None = None
) -> Fleet:
    """Run a scene to its end. Afterwards no request lives, no lease is held and no slot. Streams
    that a former server left in the `store` are restored beside the scene."""

    async def main() -> Fleet:
        fleet, runner = _build(models, terms or ServerTerms(), store)
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(fleet.groups.run())
            batching = tasks.create_task(runner.run())
            restore_more = await restore_streams(fleet.service, ROUTES.planners)
            assert not fleet.loads  # streams of models that are not loaded wait
            restoring = tasks.create_task(restore_more())
            await scene(fleet)
            await restoring
            await fleet.service.store.held.close()
            batching.cancel()
            await asyncio.sleep(2 * STEP)
            assert not any(group.is_used for group in fleet.groups), list(fleet.groups)
            running.cancel()
        await fleet.groups.close()
        fleet.service.store.close()
        for scheduler in fleet.schedulers:
            assert not scheduler.pool, scheduler
            assert scheduler.ledger.num_held == 0, scheduler
        return fleet

    return run_virtual(main())


def played(
    *models: Model, terms: ServerTerms | None = None
) -> Callable[[Callable[Concatenate[Fleet, P], Awaitable[None]]], Callable[P, None]]:
    """Make a coroutine function, whose first parameter is a fleet, a test that `play`s it."""
    return plays(lambda scene: play(scene, *models, terms=terms))


def play_until_killed(
    scene: Scene, *models: Model, terms: ServerTerms | None = None, store: Path
) -> None:
    """Run a scene, and end as a server that is killed: nothing is drained or closed."""

    async def main() -> None:
        fleet, _ = _build(models, terms or ServerTerms(), store)
        running = asyncio.create_task(fleet.groups.run())
        await scene(fleet)
        fleet.service.store.close()
        running.cancel()

    run_virtual(main())


def _build(
    models: tuple[Model, ...], terms: ServerTerms, store: Path | None = None
) -> tuple[Fleet, BatchRunner]:
    clock = asyncio.get_running_loop().time
    loads: list[str] = []
    schedulers: list[IterationScheduler] = []
    groups = Groups(
        [
            Group(
                Deployment(each.name, terms=each.terms, num_bytes=each.num_bytes),
                _opener(each, loads, schedulers),
                clock,
                each.load_seconds,
            )
            for each in models
        ],
        terms,
    )
    shared = build_rig(Setting(store=store)).service
    server_readings = ServerReadings(Metrics(), shared.store.database, shared.request_log)
    exposition = Exposition(server_readings, groups.readings, clock, has_several=True)
    service = replace(shared, groups=groups, group=groups.default, exposition=exposition)
    runner = BatchRunner(service, ROUTES.batch_endpoints, 4)
    return Fleet(Client(build_app(service)), service, groups, loads, schedulers), runner


def _opener(model: Model, loads: list[str], schedulers: list[IterationScheduler]) -> OpenServing:
    num_failures = model.num_failures

    @asynccontextmanager
    async def open_serving() -> AsyncIterator[Serving]:
        nonlocal num_failures
        await asyncio.sleep(model.load_seconds)
        if num_failures:
            num_failures -= 1
            raise StartupError("the disk is on fire")
        serving = build_rig(model.setting).service.group.serving
        loads.append(model.name)
        schedulers.append(serving.engine.scheduler)
        served = replace(serving.model, name=model.name)
        yield replace(serving, model=served, num_bytes=model.num_bytes)

    return open_serving
