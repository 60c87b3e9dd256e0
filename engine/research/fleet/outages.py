"""Outages: machines that die, and an upgrade that rolls through them, while a fleet serves.

The requests of a dead machine begin again on other replicas with the tokens that they have, as
those of a server's dead replica do. An upgrade takes some machines at a time: they get no new
requests, finish those they have, and load. Machines come back with empty caches.
"""

from collections.abc import Mapping, Sequence
from math import inf
from typing import NamedTuple

from engine.research.fleet.router import Loads
from engine.research.fleet.shard import LoadReport


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
