"""Leases: the requests of a model, which keep it loaded."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from engine.ports import Clock

T = TypeVar("T")


class Lease:
    """A request's claim on a model; while it is active, the model is loaded."""

    def __init__(self) -> None:
        self.is_active = False


class Leases:
    """The leases of one model. `used_at` is when a request of the model last began or ended."""

    def __init__(self, clock: Clock) -> None:
        self.used_at = clock()
        self.on_free: Callable[[], object] = _ignore  # called when no lease is active any more
        self._clock = clock
        self._is_open = False
        self._num_active = 0
        self._pending: set[Lease] = set()
        self._is_free = asyncio.Event()
        self._is_free.set()

    def __len__(self) -> int:
        return self._num_active

    def are_awaited(self) -> bool:
        """Whether a request waits until the model is loaded."""
        return bool(self._pending)

    @contextmanager
    def claim(self) -> Iterator[Lease]:
        """A lease until the block ends, active from the moment at which the model is loaded."""
        lease = Lease()
        if self._is_open:
            self._activate(lease)
        else:
            self._pending.add(lease)
        try:
            yield lease
        finally:
            self._pending.discard(lease)
            if lease.is_active:
                self._end(lease)

    async def holding(self, work: Callable[[], Awaitable[T]]) -> T:
        """The result of work that a request with an active lease has begun, and that may outlive
        it. The model stays loaded until then."""
        lease = Lease()
        self._activate(lease)
        try:
            return await work()
        finally:
            self._end(lease)

    def open(self) -> None:
        """The model is loaded. Requests that wait for it have it from this moment on, so that it is
        not unloaded before they begin."""
        self._is_open = True
        for lease in self._pending:
            self._activate(lease)
        self._pending.clear()

    def shut(self) -> None:
        """New requests wait until the model is loaded again."""
        self._is_open = False

    async def wait_until_free(self) -> None:
        """Return when no lease is active."""
        while self._num_active:
            await self._is_free.wait()

    def _activate(self, lease: Lease) -> None:
        lease.is_active = True
        self._num_active += 1
        self._is_free.clear()
        self.used_at = self._clock()

    def _end(self, lease: Lease) -> None:
        lease.is_active = False
        self._num_active -= 1
        self.used_at = self._clock()
        if not self._num_active:
            self._is_free.set()
            self.on_free()


def _ignore() -> None:
    """Nothing waits for the model to be free."""
