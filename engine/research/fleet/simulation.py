"""Simulates a fleet: a coordinator routes requests, and shards advance the replicas in parallel.

Time passes in epochs. At the beginning of an epoch the router has the load reports that the
replicas published at the end of the last one, and routes all requests of the epoch by them, as real
routers do with loads that are up to one publishing interval old. So within an epoch no replica
depends on another, and shards need to meet once per epoch only. Nothing depends on the number of
processes: two runs, on any numbers of processes, are equal bit for bit.

Outages: machines that die, and an upgrade that rolls through them, while a fleet serves.

The requests of a dead machine begin again on other replicas with the tokens that they have, as
those of a server's dead replica do. An upgrade takes some machines at a time: they get no new
requests, finish those they have, and load. Machines come back with empty caches.
"""

import gc
import multiprocessing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import inf
from multiprocessing.connection import Connection
from types import TracebackType
from typing import NamedTuple, Self

from engine.cost.model import CostModel
from engine.errors import InvalidRequest
from engine.research.fleet.figures import FleetFigures, FleetMoment, summarise_fleet
from engine.research.fleet.router import FORECASTING, ROUTERS, Loads, block_size_of
from engine.research.fleet.shard import Begun, LoadReport, Routed, Shard, ShardResult
from engine.research.leaping.run import may_leap
from engine.simulated.run import Setup, prepared
from engine.simulated.trace import SHARED_BLOCK, Arrival


class OutagePlan(NamedTuple):
    """Machines of `size` replicas each. `deaths`: times, and the machines that die then. From
    `upgrade_at` on all machines are upgraded, `at_once` at the same time. Times in seconds."""

    size: int
    deaths: Mapping[float, int]
    upgrade_at: float = inf
    at_once: int = 1
    load_seconds: float = 60.0


class Outages:
    """The machines of a fleet under a plan."""

    def __init__(self, plan: OutagePlan, loads: Loads) -> None:
        count = len(loads.live) // plan.size
        self.num_moved = 0  # requests that began again
        self.upgraded_at = inf  # when the last machine took requests again
        self._plan = plan
        self._loads = loads
        self._deaths = sorted(plan.deaths.items(), reverse=True)
        self._old = list(reversed(range(count)))  # machines that are not upgraded
        self._upgrading: set[int] = set()
        self._loading: dict[int, float] = {}  # until when
        self._serving = set(range(count))

    def update(self, now: float) -> list[int]:
        """Choose the replicas that take requests from `now` on. Returns those that have ended; the
        requests of dead ones are to be routed again."""
        before = set(self._serving)
        for machine in [each for each, until in self._loading.items() if until <= now]:
            del self._loading[machine]
            self._serving.add(machine)
            if machine in self._upgrading:
                self._upgrading.remove(machine)
                if not self._upgrading and not self._old:
                    self.upgraded_at = now
        ended = [each for each in self._upgrading if self._is_drained(each)]
        while self._deaths and self._deaths[-1][0] <= now:
            ended.append(self._deaths.pop()[1])
        for machine in ended:
            self._serving.discard(machine)
            self._loading[machine] = now + self._plan.load_seconds
        if now >= self._plan.upgrade_at:
            while self._old and len(self._upgrading) < self._plan.at_once:
                machine = self._old.pop()
                self._upgrading.add(machine)
                self._serving.discard(machine)
        assert self._serving, "the plan leaves machines in service"
        if self._serving != before:
            self._loads.activate(n for each in self._serving for n in self._replicas(each))
        return [number for machine in ended for number in self._lost(machine)]

    def _is_drained(self, machine: int) -> bool:
        replicas = self._replicas(machine)
        return machine not in self._loading and not self._loads.live[replicas].any()

    def _replicas(self, machine: int) -> Sequence[int]:
        return range(machine * self._plan.size, (machine + 1) * self._plan.size)

    def _lost(self, machine: int) -> Sequence[int]:
        """The machine's replicas, whose reports are void."""
        replicas = self._replicas(machine)
        for number in replicas:
            self._loads.report(LoadReport(number, 0, 0, 0, 0, 0.0))
        return replicas


GC_THRESHOLDS = 100_000, 50, 50  # for each process; a tenth of their time was garbage collection
NUM_MOMENTS = 500  # samples of the fleet over time


@dataclass(frozen=True, slots=True)
class FleetSetup:
    """Replicas with equal setups behind a router. `epoch`: seconds between two load reports.
    `seed`: of routers that choose at random. `costs`: the cost models of the replicas, in turn; the
    setup's if there are none."""

    setup: Setup
    replicas: int
    router: str = "round-robin"
    epoch: float = 0.1
    processes: int = 1
    seed: int = 0
    costs: tuple[CostModel, ...] = ()
    outages: OutagePlan | None = None

    def __post_init__(self) -> None:
        if self.router not in ROUTERS:
            known = ", ".join(ROUTERS)
            raise InvalidRequest(f"router must be one of {known}, not {self.router!r}", "router")
        if self.replicas < 1:
            raise InvalidRequest(f"replicas must be at least 1, not {self.replicas}", "replicas")

    @property
    def label(self) -> str:
        return f"{self.router} × {self.setup.label}"


class _InProcesses:
    """A copy of a new shard in each of several processes; replica n is in copy n % `count`."""

    def __init__(self, shard: Shard, count: int) -> None:
        context = multiprocessing.get_context("fork")  # the shards share the arrivals
        self._pipes: list[Connection] = []
        self._processes = []
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, shard), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for pipe in self._pipes:
            pipe.close()  # this ends the process
        for process in self._processes:
            process.join()

    def advance(self, until: float, routed: Sequence[Routed]) -> list[LoadReport]:
        count = len(self._pipes)
        parts: list[list[tuple[object, ...]]] = [[] for _ in range(count)]
        for each in routed:
            parts[each.replica % count].append(tuple(each))
        for pipe, part in zip(self._pipes, parts, strict=True):
            pipe.send((until, part))
        return [LoadReport(*row) for pipe in self._pipes for row in pipe.recv()]

    def end(self, replicas: Sequence[int], now: float) -> list[Begun]:
        for pipe in self._pipes:
            pipe.send((replicas, now))  # a shard has some of them
        return [each for pipe in self._pipes for each in pipe.recv()]

    def results(self) -> list[ShardResult]:
        for pipe in self._pipes:
            pipe.send(None)
        return [each for pipe in self._pipes for each in pipe.recv()]


def _serve(pipe: Connection, shard: Shard) -> None:
    """Advance this process's copy of a shard as the coordinator requests, until it closes the
    pipe."""
    gc.freeze()  # the arrivals, which the processes share, are never garbage
    gc.set_threshold(*GC_THRESHOLDS)
    try:
        while (request := pipe.recv()) is not None:
            if isinstance(request[0], float):
                pipe.send([tuple(report) for report in shard.advance(*request)])
            else:
                pipe.send(shard.end(*request))
        pipe.send(shard.results())
    except EOFError:
        return


class FleetRun(NamedTuple):
    """What happened in a run: the results of each shard, samples of the fleet over time,
    replica-seconds, and the outages."""

    results: list[ShardResult]
    moments: list[FleetMoment]
    seconds: float
    outages: Outages | None


def simulate_fleet(fleet: FleetSetup, arrivals: Sequence[Arrival]) -> FleetFigures:
    """The figures of `run_fleet`."""
    return figures_of(fleet, arrivals, run_fleet(fleet, arrivals))


def figures_of(fleet: FleetSetup, arrivals: Sequence[Arrival], run: FleetRun) -> FleetFigures:
    """The figures of a run of these arrivals."""
    return summarise_fleet(
        fleet.label, arrivals, run.results, run.moments, run.seconds, fleet.setup.slo
    )


def run_fleet(fleet: FleetSetup, arrivals: Sequence[Arrival]) -> FleetRun:
    """Run the arrivals, which are sorted by time, until every request has ended.

    Raises `InvalidRequest` for a setup or a load that only a single replica can run.
    """
    arrivals = prepared(fleet.setup, arrivals)
    if not may_leap(fleet.setup, arrivals):
        raise InvalidRequest(
            "A fleet is simulated with one stage, without lookahead, KV windows and recurrent "
            "states, and with requests that have no deadline, grammar, ITL goal or background "
            "priority and that no client ends."
        )
    costs = fleet.costs or (fleet.setup.cost,)
    setups = [replace(fleet.setup, cost=cost) for cost in costs]
    shard = Shard(setups, arrivals, forecasts=fleet.router in FORECASTING)
    with ExitStack() as stack:
        shards: Shard | _InProcesses = shard
        if fleet.processes > 1:
            shards = stack.enter_context(_InProcesses(shard, fleet.processes))
        coordinator = _Coordinator(fleet, arrivals, shards)
        coordinator.run()
        coordinated = coordinator.moments, coordinator.seconds, coordinator.outages
        return FleetRun(shards.results(), *coordinated)


class _Coordinator:
    """Routes the requests of each epoch, and passes on the reports."""

    def __init__(
        self, fleet: FleetSetup, arrivals: Sequence[Arrival], shards: Shard | _InProcesses
    ) -> None:
        self._fleet = fleet
        self._arrivals = arrivals
        self._shards = shards
        self._loads = Loads(fleet.replicas, fleet.seed)
        size = block_size_of(arrivals[0]) if arrivals else SHARED_BLOCK
        cache_blocks = max(1, fleet.setup.num_slots // size)
        self._router = ROUTERS[fleet.router](self._loads, fleet.setup.cost, cache_blocks)
        self._loads.activate(range(fleet.replicas))
        plan = fleet.outages
        self.outages = None if plan is None else Outages(plan, self._loads)
        self.moments: list[FleetMoment] = []
        self.seconds = 0.0

    def run(self) -> None:
        """Route all arrivals, then let every replica finish."""
        span = self._arrivals[-1].at if self._arrivals else 0.0
        sample_at = 0.0
        for until, routed in self._epochs():
            for report in self._shards.advance(until, routed):
                self._loads.report(report)
            if until >= sample_at:
                sample_at += span / NUM_MOMENTS
                self._sample(until)
        self._shards.advance(inf, [])

    def _epochs(self) -> Iterator[tuple[float, list[Routed]]]:
        """The end of each epoch and its requests; each is routed when the last one has ended."""
        arrivals, epoch, at = self._arrivals, self._fleet.epoch, 0
        number = 0
        while at < len(arrivals):
            until = (number + 1) * epoch
            routed = self._moved(number * epoch)
            while at < len(arrivals) and arrivals[at].at < until:
                routed.append(Routed(at, self._router.route(arrivals[at])))
                at += 1
            self.seconds += epoch * self._fleet.replicas
            yield until, routed
            number += 1

    def _moved(self, now: float) -> list[Routed]:
        """The requests of replicas that have died, which go on elsewhere."""
        if self.outages is None or not (ended := self.outages.update(now)):
            return []
        begun = sorted(self._shards.end(ended, now))
        self.outages.num_moved += len(begun)
        route, arrivals = self._router.route, self._arrivals
        return [
            Routed(each.number, route(each.rest(arrivals[each.number], now)), each, now)
            for each in begun
        ]

    def _sample(self, now: float) -> None:
        loads = self._loads
        self.moments.append(
            FleetMoment(
                now,
                len(loads.active),
                int(loads.live.sum()),
                int(loads.waiting_tokens.sum()),
                int(loads.live.max()),
            )
        )
