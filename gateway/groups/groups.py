"""Groups: the models of a server, by their names, and the engines of those that are loaded."""

import asyncio
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from engine.errors import Unavailable
from gateway.errors import ModelNotFound
from gateway.groups.changes import Changes
from gateway.groups.group import Group
from gateway.groups.loads import SHUTS_DOWN, Loads
from gateway.groups.running import Running
from gateway.groups.terms import ServerTerms

if TYPE_CHECKING:
    from gateway.groups.group import Serving
    from gateway.observe.readings import Readings


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
    def loaded(self) -> "list[Serving]":
        """The models that are loaded."""
        return [serving for group in self if (serving := group.loaded) is not None]

    def readings(self) -> "dict[str, Readings]":
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
            return Unavailable(SHUTS_DOWN)
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
