"""Work in threads that ends early when its client has disconnected, and is metered.

A request body longer than `MAX_BYTES_ON_LOOP` is decoded and checked in a thread: the arrays in it
may have so many items that this would hold the event loop for more than 5 ms. The loop waits for
the interpreter's lock meanwhile, so this time is charged as that on the loop is, and each client
has one thread at a time: a client that sends many long bodies leaves the other threads to others.
"""

import asyncio
import threading
import time
from collections.abc import Callable
from contextvars import ContextVar, copy_context
from functools import partial
from threading import Event
from typing import Protocol, TypeVar

from engine.errors import EngineError
from engine.ports import Clock

T = TypeVar("T")
MAX_BYTES_ON_LOOP = 8 << 10  # at the densest, such a body takes 3 ms
_cancelled: ContextVar[Event | None] = ContextVar("cancelled", default=None)
_thread = threading.local()  # `exempt`: seconds of its work that are not charged


class WorkCancelled(Exception):
    """The task that awaited this work was cancelled, so no task reads its result."""


class ThreadMeter(Protocol):
    """Meters the work that one request does in threads, and in many pieces on the loop."""

    @property
    def cpu_clock(self) -> Clock:
        """The CPU time of the calling thread."""

    async def begin(self, *, is_new: bool) -> None:
        """Wait for the client's turn, and first for its debt if the request `is_new`."""

    def end(self, seconds: float, *, in_one_piece: bool) -> None:
        """The work has taken so long, perhaps in one piece, and the turn has ended."""

    async def pause(self) -> None:
        """Let others run between two pieces, and wait until the client's debt is repaid."""


class _Unmetered:
    """Requests that came through no intake, such as the lines of a batch, are not metered."""

    cpu_clock = staticmethod(time.thread_time)

    async def begin(self, *, is_new: bool) -> None:
        pass

    def end(self, seconds: float, *, in_one_piece: bool) -> None:
        pass

    async def pause(self) -> None:
        await asyncio.sleep(0)


_UNMETERED = _Unmetered()
thread_meter: ContextVar[ThreadMeter] = ContextVar("thread_meter", default=_UNMETERED)


async def run_in_thread(work: Callable[[], T], *, is_new: bool = False) -> T:
    """The result of `work`, which runs in a thread of the loop's default executor.

    A request that `is_new` decodes its body, and holds the interpreter's lock meanwhile.
    If this task is cancelled, the work ends with the next `check_cancelled` that it calls.
    """
    meter, cancelled, seconds = thread_meter.get(), Event(), list[float]()
    await meter.begin(is_new=is_new)
    token = _cancelled.set(cancelled)  # the thread runs in a copy of this context
    run = partial(copy_context().run, _timed, work, meter.cpu_clock, seconds)
    _cancelled.reset(token)
    running = asyncio.get_running_loop().run_in_executor(None, run)
    running.add_done_callback(partial(_ended, meter, seconds, is_new))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        cancelled.set()
        raise


async def read_body_with(read: Callable[[], T], body: bytes) -> T:
    """The result of `read`, which decodes `body`, in a thread if it is long."""
    is_long = len(body) > MAX_BYTES_ON_LOOP
    return await run_in_thread(read, is_new=True) if is_long else read()


async def in_thread_if(is_long: bool, work: Callable[[], T]) -> T:
    return await run_in_thread(work) if is_long else work()


def _timed(work: Callable[[], T], clock: Clock, seconds: list[float]) -> T:
    check_cancelled()
    began, _thread.exempt = clock(), 0.0
    try:
        return work()
    except (EngineError, WorkCancelled) as error:
        # Its frames hold what was decoded, which would be freed on the loop.
        error.__cause__ = error.__context__ = None
        raise error.with_traceback(None) from None
    finally:
        seconds.append(clock() - began - _thread.exempt)


def _ended(
    meter: ThreadMeter, seconds: list[float], is_new: bool, running: asyncio.Future[T]
) -> None:
    meter.end(sum(seconds), in_one_piece=is_new)
    if not running.cancelled():
        running.exception()  # no task may wait for it any more


def exempt(seconds: float) -> None:
    """So much of this thread's work is not charged: the interpreter's lock was free meanwhile."""
    _thread.exempt = getattr(_thread, "exempt", 0.0) + seconds


def check_cancelled() -> None:
    """Raise `WorkCancelled` in a thread whose `run_in_thread` was cancelled."""
    cancelled = _cancelled.get()
    if cancelled is not None and cancelled.is_set():
        raise WorkCancelled
