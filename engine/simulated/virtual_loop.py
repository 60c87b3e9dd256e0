"""Virtual time: an asyncio event loop that jumps to the next timer when no callback is ready.

It has no sockets, no threads and no real clock: work for a thread is done at once. If no callback
is ready and no timer is set, the program would wait forever, so the loop raises `Deadlock`.
"""

import asyncio
import gc
from asyncio.base_events import BaseEventLoop
from collections import deque
from contextlib import contextmanager
from heapq import heappop
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator
    from contextvars import Context
    from typing import TypeVarTuple, Unpack

    Ts = TypeVarTuple("Ts")

T = TypeVar("T")


class Deadlock(RuntimeError):
    """All tasks wait and no timer is set."""


class VirtualLoop(BaseEventLoop):
    """An event loop whose `time()` starts at 0 and only moves to the time of the next timer.

    Each iteration of the standard loop polls the operating system for events. There are none
    here, so `_run_once` does without: a simulated hour is half a million iterations.
    """

    _ready: "deque[asyncio.Handle]"
    _scheduled: "list[asyncio.TimerHandle]"
    _stopping: bool

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0

    def time(self) -> float:
        return self._now

    def get_debug(self) -> bool:
        """False: the checks of asyncio's debug mode are about threads and real time."""
        return False

    def call_soon(
        self,
        callback: "Callable[[Unpack[Ts]], object]",
        *args: "Unpack[Ts]",
        context: "Context | None" = None,
    ) -> asyncio.Handle:
        """Run the callback in this iteration of the loop or the next one."""
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def _run_once(self) -> None:
        """Run the ready callbacks; if there are none, first advance to the next timer."""
        ready = self._ready
        if not ready and not self._stopping:
            self._jump()
        while ready and not self._stopping:
            handle = ready.popleft()
            if not handle.cancelled():
                handle._run()

    def _jump(self) -> None:
        """Advance the clock to the next timer; all timers with the same time become ready."""
        timers = self._scheduled
        while timers and timers[0].cancelled():
            heappop(timers)
        if not timers:
            raise Deadlock("no callback is ready and no timer is set")
        self._now = max(self._now, timers[0].when())
        while timers and timers[0].when() <= self._now:
            self._ready.append(heappop(timers))

    def run_in_executor(
        self, executor: object, func: "Callable[[Unpack[Ts]], T]", *args: "Unpack[Ts]"
    ) -> "asyncio.Future[T]":
        """Do the work at once: in virtual time a thread takes no time."""
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        return None

    def _process_events(self, events: list[object]) -> None:
        return None

    def _write_to_self(self) -> None:
        return None


def run_virtual(main: "Coroutine[object, object, T]") -> T:
    """Run a coroutine to its end in virtual time. Raises `Deadlock` if it would never end."""
    results: list[T] = []

    async def keep_result() -> None:
        results.append(await main)  # asyncio's runner formats the repr of what the task returns

    with _rare_collections(), asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(keep_result())
    return results[0]


@contextmanager
def _rare_collections() -> "Iterator[None]":
    """Few garbage collections, as in a server: requests are freed by reference counting, and
    collections took a tenth of a simulation's time."""
    before = gc.get_threshold()
    gc.set_threshold(50_000, 20, 10)
    try:
        yield
    finally:
        gc.set_threshold(*before)
