"""Running: the engines of all loaded groups, in one task group, and the timers of idle ones."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gateway.groups.group import Group

Work = Coroutine[Any, Any, None]


class Running:
    """Runs the engine of each loaded group while the server runs."""

    def __init__(self, on_failed: "Callable[[Group, str], object]") -> None:
        """`on_failed` is called with the reason why the workers of a group cannot be restarted."""
        self._on_failed = on_failed
        self._tasks: asyncio.TaskGroup | None = None
        self._engines: dict[Group, asyncio.Task[None]] = {}
        self._timers: dict[Group, asyncio.TimerHandle] = {}

    async def run(self, groups: "Iterable[Group]") -> None:
        """Run the engines of the groups, and of those that are started later, until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                for group in groups:
                    if group.accepts:
                        self.start(group)
                await asyncio.Event().wait()
        finally:
            self._tasks = None

    def spawn(self, work: Work) -> None:
        """Run something else beside the engines, if the server runs."""
        if self._tasks is None:
            work.close()
        else:
            self._tasks.create_task(work)

    def start(self, group: "Group") -> None:
        """Run the engine of a group that is loaded, once the server runs."""
        if self._tasks is not None and group not in self._engines:
            self._engines[group] = self._tasks.create_task(self._serve(group))
            group.leases.on_free()

    def stop(self, group: "Group") -> None:
        """End the engine of a group whose requests have ended."""
        if (engine := self._engines.pop(group, None)) is not None:
            engine.cancel()

    async def _serve(self, group: "Group") -> None:
        """Run an engine until it is cancelled, or has failed for good."""
        engine = group.serving.engine
        running = asyncio.create_task(engine.run())
        failing = asyncio.create_task(engine.failed.wait())
        try:
            await asyncio.wait((running, failing), return_when=asyncio.FIRST_COMPLETED)
            if not running.done() and engine.failure is not None:
                self._on_failed(group, engine.failure)
            await running
        finally:
            for task in (running, failing):
                task.cancel()
            await asyncio.wait((running, failing))

    def call_when_idle(
        self, group: "Group", seconds: float, call: "Callable[[Group], object]"
    ) -> None:
        """Call when no request has used a loaded group for so long, instead of an earlier such
        call."""
        if (timer := self._timers.pop(group, None)) is not None:
            timer.cancel()
        if group.accepts:
            loop = asyncio.get_running_loop()
            again = (group, seconds, call)
            self._timers[group] = loop.call_later(seconds, self._rested, *again)

    def _rested(self, group: "Group", seconds: float, call: "Callable[[Group], object]") -> None:
        if group.is_used:
            self.call_when_idle(group, seconds, call)
        elif group.accepts:
            call(group)

    def cancel_timers(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
