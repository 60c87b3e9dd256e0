"""LoopWatch: how late the event loop is, and how much streams should merge when it is busy.

A token costs its stream one wake and one write. When the loop has no time left, streams wait
`gap` seconds after each write, so that the next one carries several tokens; the gap grows while
the loop's thread is busy and shrinks when it is not. An idle server writes every token at once.
"""

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.ports import Clock
    from gateway.observe.metrics import Counts

PROBE_SECONDS = 0.05
BUSY = 0.9  # share of the time: above it the gap grows,
CALM = 0.75  # and below it the gap shrinks
FIRST_GAP = 0.01
MAX_GAP = 0.25
_SCHEDSTAT = Path("/proc/thread-self/schedstat")  # Linux: nanoseconds on a core, and queued for one


def thread_seconds() -> float:
    """Seconds that this thread has run or has waited for a core; a loop asleep gathers none."""
    try:
        running, queued, _ = _SCHEDSTAT.read_bytes().split()
    except OSError:
        return time.thread_time()
    return (int(running) + int(queued)) * 1e-9


class LoopWatch:
    """Probes the loop it runs on. `lag` gets how late each probe was, in seconds."""

    def __init__(
        self, clock: "Clock", lag: "Counts", spent: "Callable[[], float]" = thread_seconds
    ) -> None:
        self.gap = 0.0
        self._clock = clock
        self._lag = lag
        self._spent = spent

    async def run(self) -> None:
        """Probe until cancelled."""
        clock, spent_before, woke_at = self._clock, self._spent(), self._clock()
        while True:
            await asyncio.sleep(PROBE_SECONDS)
            now, spent = clock(), self._spent()
            self._lag.add(max(0.0, now - woke_at - PROBE_SECONDS))
            self.judge((spent - spent_before) / (now - woke_at))
            woke_at, spent_before = now, spent

    def judge(self, share: float) -> None:
        """Set the gap after a period in which the loop was busy for this share of the time."""
        if share > BUSY:
            self.gap = min(MAX_GAP, max(FIRST_GAP, self.gap * 1.5))
        elif share < CALM:
            self.gap = self.gap / 1.5 if self.gap > FIRST_GAP else 0.0
