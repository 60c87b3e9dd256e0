"""Work in threads that ends early when its client has disconnected."""

import asyncio
from collections.abc import Callable
from contextvars import ContextVar
from threading import Event
from typing import TypeVar

T = TypeVar("T")
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


def check_cancelled() -> None:
    """Raise `WorkCancelled` in a thread whose `run_in_thread` was cancelled."""
    cancelled = _cancelled.get()
    if cancelled is not None and cancelled.is_set():
        raise WorkCancelled
