"""SharedWork: the work behind a response, which a retry of its request can take over.

Attempts at a request (`gateway.access.retries`) hold it, one after the other. It is abandoned in
the moment in which the last one leaves, unless it is kept.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class SharedWork(Generic[T]):
    """A task that ends when no one holds it. `abandon` frees what the work holds, at once."""

    def __init__(
        self,
        work: Callable[[], Coroutine[Any, Any, T]],
        abandon: Callable[[], None],
        *,
        is_kept: bool = False,
    ) -> None:
        self.is_kept = is_kept
        self.task = asyncio.create_task(work())
        self.task.add_done_callback(self._ended)
        self._abandon: Callable[[], None] | None = abandon
        self._num_holders = 0

    def hold(self) -> None:
        self._num_holders += 1

    def release(self) -> None:
        self._num_holders -= 1
        if not self._num_holders and not self.is_kept:
            self.end()

    def end(self) -> None:
        """End the work now, whoever waits for it."""
        if self._abandon is not None:
            self._abandon()
            self.task.cancel()

    async def result(self) -> T:
        """Its result, or its error; a waiting connection that is cancelled does not end it."""
        return await asyncio.shield(self.task)

    def _ended(self, task: asyncio.Task[T]) -> None:
        self._abandon = None  # it refers to all of the work
        if not task.cancelled():
            task.exception()  # it may be that no one waits for it
