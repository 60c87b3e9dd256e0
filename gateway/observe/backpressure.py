"""Backpressure: measures the event loop's load, and makes streams merge tokens when it is high.

Each token costs one write of its stream, and often a wakeup. If the loop is saturated, streams wait
`gap` seconds after each write, so that the next event carries several tokens. The gap grows while
the loop's thread is busy and shrinks otherwise. On an idle server every token is written at once.

The thread is busy if it runs for most of the time in which it does not wait for a core. Time in
which other processes have all cores says nothing about the loop's own work: it would delay tokens
whenever workers compute long steps on the same cores.

A probe wakes the loop, often on a core on which a worker computes, and costs a third of what a lone
token does. So a loop that is far from busy is probed a quarter as often.
"""

import asyncio
import time
from collections.abc import Callable
from typing import NamedTuple

from engine.ports import Clock
from gateway.observe.metrics import Histogram

PROBE_SECONDS = 0.05
# Probes that are one while there is no gap and the loop is not half as busy as CALM
REST_PROBES = 4
BUSY = 0.9  # fraction of that time above which the gap grows
CALM = 0.75  # fraction below which it shrinks
FIRST_GAP = 0.01
MAX_GAP = 0.25
_SCHEDSTAT = "/proc/thread-self/schedstat"  # Linux: nanoseconds running, and runnable


class ThreadTimes(NamedTuple):
    """Seconds in which a thread was running, and in which it waited for a core."""

    running: float
    queued: float

    def share_since(self, before: "ThreadTimes", seconds: float) -> float:
        """The fraction of the last `seconds`, without those for a core, in which it was running."""
        running = self.running - before.running
        return running / max(running, seconds - (self.queued - before.queued), 1e-9)


def thread_times() -> ThreadTimes:
    """The times of the calling thread; elsewhere than on Linux it seems never to be queued."""
    try:
        with open(_SCHEDSTAT, "rb", buffering=0) as file:
            running, queued, _ = file.read(80).split()
    except OSError:
        return ThreadTimes(time.thread_time(), 0.0)
    return ThreadTimes(int(running) * 1e-9, int(queued) * 1e-9)


class LoopWatch:
    """Probes the loop it runs on; observes in `lag` how late each probe was, in seconds, once for
    every `PROBE_SECONDS` that it stands for."""

    def __init__(
        self, clock: Clock, lag: Histogram, times: Callable[[], ThreadTimes] = thread_times
    ) -> None:
        self.gap = 0.0
        self.last_lag = 0.0  # seconds, of the latest probe
        self.is_busy = False  # in the latest period
        self._clock = clock
        self._lag = lag
        self._times = times

    async def run(self) -> None:
        """Probe until cancelled."""
        clock, before, woke_at = self._clock, self._times(), self._clock()
        num_probes = 1
        while True:
            await asyncio.sleep(num_probes * PROBE_SECONDS)
            now, times = clock(), self._times()
            self.last_lag = max(0.0, now - woke_at - num_probes * PROBE_SECONDS)
            self._lag.add(self.last_lag, num_probes)
            share = times.share_since(before, now - woke_at)
            self.update(share)
            num_probes = 1 if self.gap or share > CALM / 2 else REST_PROBES
            woke_at, before = now, times

    def update(self, share: float) -> None:
        """Set the gap after a period in which the loop was busy for this fraction of the time."""
        self.is_busy = share > BUSY
        if self.is_busy:
            self.gap = min(MAX_GAP, max(FIRST_GAP, self.gap * 1.5))
        elif share < CALM:
            self.gap = self.gap / 1.5 if self.gap > FIRST_GAP else 0.0
