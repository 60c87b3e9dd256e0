"""Work in threads that ends early when its client has disconnected.

A request body longer than `MAX_BYTES_ON_LOOP` is decoded and checked in a thread: the arrays in it
may have so many items that this would hold the event loop for more than 5 ms.
"""

import asyncio
import time
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from threading import Event
from typing import TYPE_CHECKING, TypeVar

from engine.errors import EngineError

if TYPE_CHECKING:
    from gateway.access.callers import Caller

T = TypeVar("T")
MAX_BYTES_ON_LOOP = 8 << 10  # at the densest, such a body takes 3 ms
_cancelled: ContextVar[Event | None] = ContextVar("cancelled", default=None)


class WorkCancelled(Exception):
    """The task that awaited this work was cancelled, so no task reads its result."""


async def run_in_thread(work: Callable[[], T]) -> T:
    """The result of `work`, which runs in a thread of the loop's default executor.

    If this task is cancelled, the work ends with the next `check_cancelled` that it calls.
    """
    cancelled = Event()
    token = _cancelled.set(cancelled)  # the thread runs in a copy of this context
    try:
        return await asyncio.to_thread(work)
    except asyncio.CancelledError:
        cancelled.set()
        raise
    finally:
        _cancelled.reset(token)


async def read_body_with(read: Callable[[], T], body: bytes, caller: "Caller") -> T:
    """The result of `read`, which decodes `body`. If it runs in a thread, the intake is charged
    for the time, because the loop waits for the interpreter's lock meanwhile."""
    return await in_thread_if(len(body) > MAX_BYTES_ON_LOOP, read, caller)


async def in_thread_if(is_long: bool, read: Callable[[], T], caller: "Caller") -> T:
    """The result of `read`, as `read_body_with` gets it, in a thread only if `is_long`."""
    if not is_long:
        return read()
    seconds: list[float] = []
    try:
        return await run_in_thread(partial(_timed, read, seconds))
    finally:
        caller.charge(sum(seconds))


def _timed(read: Callable[[], T], seconds: list[float]) -> T:
    began = time.thread_time()
    try:
        return read()
    except EngineError as error:
        # Its frames hold what was decoded, which would be freed on the loop.
        error.__cause__ = error.__context__ = None
        raise error.with_traceback(None) from None
    finally:
        seconds.append(time.thread_time() - began)


def check_cancelled() -> None:
    """Raise `WorkCancelled` in a thread whose `run_in_thread` was cancelled."""
    cancelled = _cancelled.get()
    if cancelled is not None and cancelled.is_set():
        raise WorkCancelled
