"""Virtual time: an asyncio event loop that jumps to the next timer when nobody is ready.

No sockets, no threads, no clock. When nobody is ready and no timer is set, the program would
wait for ever: that is reported as `Deadlock`.
"""

import asyncio
from asyncio.base_events import BaseEventLoop
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Coroutine

T = TypeVar("T")


class Deadlock(RuntimeError):
    """Everybody waits, and no timer will wake anybody."""


class _Jump:
    """Stands where the I/O selector stands: waiting is moving the clock."""

    def __init__(self) -> None:
        self.now = 0.0

    def select(self, timeout: float | None) -> list[object]:
        if timeout is None:
            raise Deadlock("nobody is ready and no timer is set")
        self.now += max(0.0, timeout)
        return []

    def close(self) -> None:
        return None


class VirtualLoop(BaseEventLoop):
    """An event loop whose `time()` starts at 0 and moves only by jumping."""

    def __init__(self) -> None:
        super().__init__()
        self._selector = _Jump()
        self._clock_resolution = 1e-9

    def time(self) -> float:
        return self._selector.now

    def _process_events(self, events: list[object]) -> None:
        return None

    def _write_to_self(self) -> None:
        return None


def run_virtual(main: "Coroutine[object, object, T]") -> T:
    """Run a coroutine to its end in virtual time. Raises `Deadlock` where it would hang."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
