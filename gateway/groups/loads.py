"""Loads: models are loaded and unloaded within one bound on their memory.

A request for a model that is not loaded waits for it, unless that would take too long. One model is
loaded at a time, in the order of the requests. What has to go for it is first drained: no request
that is computed is ever cut for a load. Requests for a model that drains wait for its next load.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from math import inf

from engine.errors import EngineError, ShuttingDown, StartupError, Unavailable
from gateway.groups.group import Group, Status
from gateway.groups.leases import Lease
from gateway.groups.terms import ServerTerms

logger = logging.getLogger(__name__)

GIB = 1 << 30


class Loads:
    """Loads and unloads groups, one at a time."""

    def __init__(
        self,
        groups: Sequence[Group],
        terms: ServerTerms,
        on_loaded: Callable[[Group], object],
        on_unload: Callable[[Group], object],
    ) -> None:
        """`terms.memory` bounds the bytes of all loaded models; 0: nothing does. `on_loaded` and
        `on_unload` start and stop what runs while a group is loaded."""
        self.is_ended = False
        self._groups = groups
        self._memory = terms.memory or inf
        self._max_wait = terms.max_load_wait
        self._on_loaded = on_loaded
        self._on_unload = on_unload
        self._turn = asyncio.Lock()  # held while a load or unload is made
        self._queue: list[Group] = []  # groups that are being loaded, or will be
        self._tasks: dict[Group, asyncio.Task[None]] = {}

    @property
    def num_bytes(self) -> int:
        """The bytes of all models in memory."""
        return sum(group.num_bytes for group in self._groups if group.is_in_memory)

    async def ensure(self, group: Group, lease: Lease) -> None:
        """Return when the lease is active. Raises `Unavailable` if the model cannot be loaded, if
        that would take too long, or if the server shuts down."""
        while not lease.is_active:
            if self.is_ended:
                raise ShuttingDown
            group.check_retry()
            if not group.terms.autoload and group not in self._queue:
                raise Unavailable(
                    f"The model {group.name!r} is not loaded; POST /models/load loads it."
                )
            task, forecast = self.begin(group), self.forecast(group)
            if forecast > self._max_wait:
                raise Unavailable(f"The model {group.name!r} is being loaded.", forecast)
            await asyncio.wait((task,))

    def begin(self, group: Group) -> asyncio.Task[None]:
        """The task that loads the group; a failure is noted in the group."""
        if group not in self._tasks:
            self._queue.append(group)
            self._tasks[group] = asyncio.create_task(self._load(group), name=f"load {group.name}")
        return self._tasks[group]

    def forecast(self, group: Group) -> float:
        """Expected seconds until a group in the queue is loaded: the loads before it and its own,
        and the most that the requests of a model take that has to be unloaded first."""
        seconds = 0.0
        for each in self._queue[: self._queue.index(group) + 1]:
            seconds += each.load_seconds
            if each.status is Status.LOADING:
                seconds -= min(each.load_seconds, each.since)
        draining = [each.seconds_left for each in self._groups if each.status is Status.UNLOADING]
        if draining:
            return seconds + max(draining)
        victim = self._victim(group) if self._missing(group) > 0 else None
        return seconds + (0.0 if victim is None else victim.seconds_left)

    async def load(self, group: Group) -> None:
        """Load a group. Raises `StartupError`."""
        async with self._turn:
            if not group.accepts:
                await self._open(group)

    async def _load(self, group: Group) -> None:
        try:
            await self.load(group)
        except EngineError as error:
            logger.error("model=%s cannot be loaded: %s", group.name, error)
            group.fail(str(error))
        finally:
            self._queue.remove(group)
            del self._tasks[group]

    async def _open(self, group: Group) -> None:
        await self._make_room(group)
        await group.open()
        try:
            await self._make_room(group)  # its bytes are known now
        except StartupError:
            await group.close()
            raise
        group.change(Status.LOADED)
        args = (group.name, group.num_bytes, group.load_seconds)
        logger.info("model=%s loaded bytes=%d seconds=%.1f", *args)
        self._on_loaded(group)

    async def _make_room(self, group: Group) -> None:
        """Unload the least recently used groups until this one fits. Raises `StartupError` if it
        does not fit beside those that may not be unloaded."""
        while (missing := self._missing(group)) > 0:
            victim = self._victim(group)
            if victim is None:
                raise StartupError(
                    f"the model {group.name!r} needs {_text(group.num_bytes)} of the "
                    f"{_text(self._memory)} of --memory: {_text(missing)} are missing"
                )
            await self._unload(victim)

    def has_room(self, group: Group) -> bool:
        """Whether the group fits beside those in memory."""
        return self._missing(group) <= 0

    def _missing(self, group: Group) -> float:
        own = 0 if group.is_in_memory else group.num_bytes
        return self.num_bytes + own - self._memory

    def _victim(self, group: Group) -> Group | None:
        """The group that is unloaded to make room for another one; None if there is none."""
        groups = [g for g in self._groups if g.accepts and not g.terms.pinned and g is not group]
        return min(
            groups, key=lambda g: (g.terms.priority, g.is_used, g.leases.used_at), default=None
        )

    async def unload(self, group: Group) -> None:
        """Unload a group when its live requests have ended. No-op if it is not loaded."""
        async with self._turn:
            if group.accepts:
                await self._unload(group)

    async def give_up(self, group: Group, failure: str) -> None:
        """Close a group whose engine has failed for good; the other models are served."""
        async with self._turn:
            if group.accepts and group.serving.engine.failure == failure:
                await self._unload(group)
                group.fail(failure)

    async def _unload(self, group: Group) -> None:
        logger.info("model=%s drains", group.name)
        await group.drain()
        self._on_unload(group)
        await group.close()
        logger.info("model=%s unloaded", group.name)

    async def end(self) -> None:
        """Load no more models; those that wait for one get an error."""
        self.is_ended = True
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _text(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.2f} GiB"
