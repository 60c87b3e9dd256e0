"""Groups: the models of a server, by their names, and the engines of those that are loaded."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from engine.errors import ShuttingDown, Unavailable
from gateway.errors import ModelNotFound
from gateway.groups.group import Group, Serving, Status
from gateway.groups.loads import Loads
from gateway.groups.terms import ServerTerms
from gateway.observe.readings import Readings

Work = Coroutine[Any, Any, None]


class Change(NamedTuple):
    """A model has had this status since now."""

    name: str
    status: Status


class Changes:
    """Sends each change of a status to all watchers; None when the server shuts down, or
    another one has taken over."""

    def __init__(self) -> None:
        self.is_ended = False
        self._watchers: set[asyncio.Queue[Change | None]] = set()

    @contextmanager
    def watch(self) -> Iterator[asyncio.Queue[Change | None]]:
        """The changes from now on, until the block ends."""
        changes: asyncio.Queue[Change | None] = asyncio.Queue()
        self._watchers.add(changes)
        try:
            yield changes
        finally:
            self._watchers.discard(changes)

    def changed(self, group: Group) -> None:
        """Tell the watchers the status of a group."""
        for changes in self._watchers:
            changes.put_nowait(Change(group.name, group.status))

    def end(self) -> None:
        """Tell the watchers that there is nothing more to watch here."""
        self.is_ended = True
        for changes in self._watchers:
            changes.put_nowait(None)


class Running:
    """Runs the engine of each loaded group while the server runs, and the timers of idle ones."""

    def __init__(self, on_failed: Callable[[Group, str], object]) -> None:
        """`on_failed` is called with the reason why the workers of a group cannot be restarted."""
        self._on_failed = on_failed
        self._tasks: asyncio.TaskGroup | None = None
        self._engines: dict[Group, asyncio.Task[None]] = {}
        self._timers: dict[Group, asyncio.TimerHandle] = {}

    async def run(self, groups: Iterable[Group]) -> None:
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

    def start(self, group: Group) -> None:
        """Run the engine of a group that is loaded, once the server runs."""
        if self._tasks is not None and group not in self._engines:
            self._engines[group] = self._tasks.create_task(self._serve(group))
            group.leases.on_free()

    def stop(self, group: Group) -> None:
        """End the engine of a group whose requests have ended."""
        if (engine := self._engines.pop(group, None)) is not None:
            engine.cancel()

    async def _serve(self, group: Group) -> None:
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

    def call_when_idle(self, group: Group, seconds: float, call: Callable[[Group], object]) -> None:
        """Call when no request has used a loaded group for so long, instead of an earlier such
        call."""
        if (timer := self._timers.pop(group, None)) is not None:
            timer.cancel()
        if group.accepts:
            loop = asyncio.get_running_loop()
            again = (group, seconds, call)
            self._timers[group] = loop.call_later(seconds, self._rested, *again)

    def _rested(self, group: Group, seconds: float, call: Callable[[Group], object]) -> None:
        if group.is_used:
            self.call_when_idle(group, seconds, call)
        elif group.accepts:
            call(group)

    def cancel_timers(self) -> None:
        for timer in self._timers.values():
            timer.cancel()


class Groups:
    """All models of a server; the first is the default."""

    def __init__(self, groups: Sequence[Group], terms: ServerTerms | None = None) -> None:
        self._groups = tuple(groups)
        self.changes = Changes()
        self._running = running = Running(self._fail)
        self.loads = Loads(self._groups, terms or ServerTerms(), running.start, running.stop)
        self._failure: str | None = None
        self.failed = asyncio.Event()  # set once no model can be served any more
        for group in self._groups:
            group.on_change = self.changes.changed
            seconds = group.terms.idle_unload
            if seconds is not None and not group.terms.pinned:
                rest = partial(running.call_when_idle, group, seconds, self.begin_unload)
                group.leases.on_free = rest

    def __iter__(self) -> Iterator[Group]:
        return iter(self._groups)

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def default(self) -> Group:
        """The model of requests that name none."""
        return self._groups[0]

    @property
    def are_fixed(self) -> bool:
        """Whether there is one model, which is never unloaded."""
        return len(self._groups) == 1 and self.default.terms.idle_unload is None

    @property
    def names(self) -> tuple[str, ...]:
        """All names that requests may use."""
        return tuple(name for group in self for name in group.names)

    def find(self, name: str | None) -> Group:
        """The group of a model or of a LoRA adapter; None: the default. Raises `ModelNotFound`."""
        if name is None:
            return self.default
        for group in self:
            if name in group.names:
                return group
        raise ModelNotFound(name, self.names)

    # The loaded models together

    @property
    def loaded(self) -> list[Serving]:
        """The models that are loaded."""
        return [serving for group in self if (serving := group.loaded) is not None]

    def readings(self) -> dict[str, Readings]:
        """What is read of each loaded model, by its name."""
        return {group.name: group.serving.readings for group in self if group.loaded is not None}

    @property
    def is_generating(self) -> bool:
        """Whether a request of any model has begun to be computed and has not ended."""
        return any(serving.engine.is_generating for serving in self.loaded)

    @property
    def is_draining(self) -> bool:
        """Whether live requests are finished and no new ones are accepted."""
        return self.loads.is_ended

    def rejection(self) -> Unavailable | None:
        """The error with which every new request is rejected now; None if some are accepted."""
        if self.is_draining:
            return ShuttingDown()
        if len(self) == 1 and (only := self.default.loaded) is not None:
            return only.engine.rejection()
        return None

    @property
    def failure(self) -> str | None:
        """Why no model can be served any more, from when `rejection` says so."""
        if len(self) == 1 and (only := self.default.loaded) is not None:
            return only.engine.failure
        return self._failure

    @property
    def is_ready(self) -> bool:
        """Whether a new request would be served: the iterations of loaded models return."""
        return self.rejection() is None and all(each.engine.is_ready for each in self.loaded)

    def cancel(self, label: str, tenant: str | None) -> int:
        """End the live requests with this label and tenant (`Engine.cancel`); their number."""
        return sum(serving.engine.cancel(label, tenant) for serving in self.loaded)

    # Running

    async def run(self) -> None:
        """Run the engines of all loaded groups until cancelled."""
        await self._running.run(self)

    def _fail(self, group: Group, failure: str) -> None:
        """The workers of a group cannot be restarted. The only model's failure is the server's."""
        if len(self) == 1:
            self._failure = failure
            self.failed.set()
        else:
            self._running.spawn(self.loads.give_up(group, failure))

    def begin_unload(self, group: Group) -> None:
        """Unload a group when its live requests have ended."""
        if not self.is_draining:
            self._running.spawn(self.loads.unload(group))

    # The end

    async def drain(self, seconds: float) -> None:
        """Reject new requests, wait at most so long for the live ones, and end the rest."""
        await self.loads.end()
        self.changes.end()
        await asyncio.gather(*(serving.engine.drain(seconds) for serving in self.loaded))

    async def close(self) -> None:
        """End what is loading, and all workers."""
        await self.loads.end()
        self._running.cancel_timers()
        await asyncio.gather(*(group.close() for group in self))
