"""Virtual time: an asyncio event loop that jumps to the next timer when nobody is ready.

No sockets, no threads, no clock. When nobody is ready and no timer is set, the program would
wait for ever: that is reported as `Deadlock`.
"""

import asyncio
from asyncio.base_events import BaseEventLoop
from collections import deque
from heapq import heappop
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Coroutine

T = TypeVar("T")


class Deadlock(RuntimeError):
    """Everybody waits, and no timer will wake anybody."""


class VirtualLoop(BaseEventLoop):
    """An event loop whose `time()` starts at 0 and moves only by jumping.

    A turn of the standard loop asks the operating system for news; here there is none to ask,
    so `_run_once` is the bare minimum: a simulated hour is half a million iterations.
    """

    _ready: "deque[asyncio.Handle]"
    _scheduled: "list[asyncio.TimerHandle]"
    _stopping: bool

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0

    def time(self) -> float:
        return self._now

    def _run_once(self) -> None:
        """Run what is ready; if that is nothing, what the next moment with a timer makes ready."""
        ready = self._ready
        if not ready and not self._stopping:
            self._jump()
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle.cancelled():
                handle._run()

    def _jump(self) -> None:
        """Move the clock to the next timer; all timers of that very moment are due."""
        timers = self._scheduled
        while timers and timers[0].cancelled():
            heappop(timers)
        if not timers:
            raise Deadlock("nobody is ready and no timer is set")
        self._now = max(self._now, timers[0].when())
        while timers and timers[0].when() <= self._now:
            self._ready.append(heappop(timers))

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        return None

    def _process_events(self, events: list[object]) -> None:
        return None

    def _write_to_self(self) -> None:
        return None


def run_virtual(main: "Coroutine[object, object, T]") -> T:
    """Run a coroutine to its end in virtual time. Raises `Deadlock` where it would hang."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
