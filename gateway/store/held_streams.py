"""HeldStreams: the streams that clients can read again, by API key and name.

A stream's name is the id of its response, or the `x-conversation-id` of its request; a new request
with the same conversation id ends the stream before.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

from gateway.errors import StreamNotFound
from gateway.store.event_ring import EventRing, EventRings, RingLimits


class HeldStream(Protocol):
    """A stream as the table sees it. It is in a set: two are equal only if they are the same."""

    @property
    def ring(self) -> EventRing: ...

    @property
    def is_kept(self) -> bool:
        """Whether it goes on while no client listens."""
        ...

    @property
    def rejection(self) -> Exception | None:
        """Why it failed before its first event."""
        ...

    def cancel(self) -> None:
        """End it now."""
        ...

    async def forget(self) -> None:
        """Wait for its end, and let nothing of it be stored."""
        ...

    async def stop(self) -> None:
        """End it at the end of the server; the next server may go on with it."""
        ...


class StreamName(NamedTuple):
    """Where a stream is found: the name of an API key, and the stream's own."""

    tenant: str
    name: str


class HeldStreams:
    """All of them. Those that ended longer than `RingLimits.seconds` ago are forgotten."""

    def __init__(self, limits: RingLimits, clock: Callable[[], float]) -> None:
        self.rings = EventRings(limits)
        self._clock = clock
        self._by_name: dict[StreamName, HeldStream] = {}
        self._running: set[HeldStream] = set()
        self._forgetting: set[asyncio.Task[None]] = set()
        self._ended: deque[tuple[float, HeldStream]] = deque()  # when they are forgotten

    def open(self, tenant: str, names: Iterable[str]) -> EventRing:
        """The ring of a new stream. It ends the streams that had its names before."""
        self._forget_old()
        for name in names:
            self._replace(StreamName(tenant, name))
        return self.rings.open(tenant)

    def add(self, stream: HeldStream, names: Iterable[str]) -> None:
        """Let a stream be found by its names."""
        self._running.add(stream)
        self._by_name |= {StreamName(stream.ring.tenant, name): stream for name in names}

    def ended(self, stream: HeldStream) -> None:
        """A stream has ended. One that failed before its first event is forgotten at once."""
        self._running.discard(stream)
        if stream.is_kept and stream.rejection is None:
            self._ended.append((self._clock() + self.rings.limits.seconds, stream))
        else:
            self._forget(stream)

    def find(self, tenant: str, name: str) -> HeldStream:
        """Raises `StreamNotFound` for a name that this key has not given, or that is forgotten."""
        self._forget_old()
        stream = self._by_name.get(StreamName(tenant, name))
        if stream is None or stream.ring.is_evicted:
            raise StreamNotFound(name)
        return stream

    def named(self, tenant: str) -> dict[str, HeldStream]:
        """The streams of a key."""
        self._forget_old()
        return {
            name: stream
            for (owner, name), stream in self._by_name.items()
            if owner == tenant and not stream.ring.is_evicted
        }

    def delete(self, tenant: str, name: str) -> None:
        """End a stream, if it runs, and forget it. Raises `StreamNotFound`."""
        self.find(tenant, name)
        self._replace(StreamName(tenant, name))

    async def close(self) -> None:
        """End all streams, at the end of the server."""
        for stream in list(self._running):
            await stream.stop()
        if self._forgetting:
            await asyncio.wait(self._forgetting)

    def _replace(self, place: StreamName) -> None:
        stream = self._by_name.pop(place, None)
        if stream is not None:
            stream.cancel()
            self.rings.close(stream.ring)
            task = asyncio.create_task(stream.forget())
            self._forgetting.add(task)
            task.add_done_callback(self._forgetting.discard)

    def _forget_old(self) -> None:
        while self._ended and self._ended[0][0] <= self._clock():
            _, stream = self._ended.popleft()
            self._forget(stream)

    def _forget(self, stream: HeldStream) -> None:
        self.rings.close(stream.ring)
        for place in [place for place, each in self._by_name.items() if each is stream]:
            del self._by_name[place]
