"""A year of one server in virtual time: `python -m tests.fuzz.engine.year [DAYS [SEED]]`.

Load follows hours and days: busy working days, quiet nights and weekends, at noon more than the
server can serve. (The pattern is made up; its shape is that of published traces.) The clock leaps:
of each hour some seconds are played, with as many requests as the hour is busy. Workers die,
clients leave, and the policy is switched meanwhile. Every few days a deploy drains the server and
starts another one with other settings. Each step is checked as in the fuzzer, on the same device.
365 days take about ten minutes of one core.
"""

import asyncio
import sys
import time
from collections import Counter
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

from tests.fuzz.engine.answers import RowRates
from tests.fuzz.engine.case import Case
from tests.fuzz.engine.clients import Clients
from tests.fuzz.engine.drawing import ClientRates, Settings, draw
from tests.fuzz.engine.executor import StepRates

if TYPE_CHECKING:
    from engine.loop import Engine

HOUR = 3600.0
DEPLOY_HOURS = (24, 240)  # the shortest and the longest time between two deploys
# Requests of an hour's sample, by hour of the day; at weekends a third.
REQUESTS = (
    8,
    6,
    6,
    6,
    8,
    10,
    16,
    24,
    36,
    48,
    56,
    60,
    60,
    60,
    56,
    52,
    48,
    40,
    32,
    26,
    22,
    18,
    14,
    10,
)
WEEKEND = 3
BUSIEST = max(REQUESTS)
GAP = 0.06  # seconds between two arrivals in the busiest hour: more than the server can serve


class HourlyClients(Clients):
    """Send a sample of each hour's requests, then wait for the next hour."""

    def __init__(
        self, settings: Settings, random: Random, counts: "Counter[str]", hours: range
    ) -> None:
        super().__init__(settings, random, counts)
        self._hours = hours
        self.is_busy = asyncio.Event()

    async def run(self, engine: "Engine") -> None:
        """Send the requests of all hours; waits for the ends of each hour's."""
        loop = asyncio.get_running_loop()
        for hour in self._hours:
            starts_at = (hour - self._hours.start) * HOUR
            await asyncio.sleep(max(0.0, starts_at - loop.time()))
            self.is_busy.set()
            await self._hour(engine, requests_of(hour))
            self.is_busy.clear()
            self._counts["hours"] += 1

    async def _hour(self, engine: "Engine", count: int) -> None:
        async with asyncio.TaskGroup() as clients:
            for _ in range(count):
                clients.create_task(self._request(self.draw_spec(), engine))
                await asyncio.sleep(self._random.expovariate(count / BUSIEST / GAP))


class Deployment(Case):
    """The server between two deploys."""

    longest = None

    def __init__(self, seed: int, hours: range) -> None:
        self._hours = hours
        super().__init__(seed)

    def _draw_settings(self) -> Settings:
        return replace(
            draw(self.random),
            rows=RowRates(late=0.02, fault=0.0002),
            steps=StepRates(failed=0.0002, stalled=0.001),
            clients=ClientRates(cancel=0.1, kill=0.004, switch=0.003, gap=0.0),
            unread_rate=0.01,
        )

    def _make_clients(self) -> Clients:
        self._hourly = HourlyClients(self.settings, self.random, self.counts, self._hours)
        return self._hourly

    async def _until_faults(self) -> None:
        """While no request runs the clock leaps."""
        await self._hourly.is_busy.wait()


def requests_of(hour: int) -> int:
    """The requests of an hour of the year, which begins on a Monday."""
    day, of_day = divmod(hour, 24)
    return REQUESTS[of_day] // (WEEKEND if day % 7 >= 5 else 1)


def play(days: int, seed: int) -> "Counter[str]":
    """Play so many days; returns what happened. Raises as `Case.play` does."""
    random, counts, hour = Random(seed), Counter[str](), 0
    while hour < days * 24:
        hours = range(hour, min(days * 24, hour + random.randint(*DEPLOY_HOURS)))
        deployment = Deployment(random.getrandbits(32), hours)
        try:
            deployment.play()
        except Exception as error:
            error.add_note(f"in {hours} of the year: {deployment!r}")
            raise
        counts += deployment.counts
        counts["deploys"] += 1
        hour = hours.stop
    return counts


def main(days: int = 365, seed: int = 0) -> None:
    counts = play(days, seed)
    seen = ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
    sys.stdout.write(f"{days} days, {time.process_time():.0f} s of CPU: {seen}\n")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))
