"""HeldStreams: the streams that clients can read again, by API key and name.

A stream's name is the id of its response, or the `x-conversation-id` of its request; a new request
with the same conversation id ends the stream before.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Protocol

from engine.errors import Unavailable
from gateway.errors import StreamNotFound
from gateway.store.event_ring import EventRing, EventRings, RingLimits


class HeldStream(Protocol):
    """A stream as the table sees it. It is in a set: two are equal only if they are the same."""

    @property
    def ring(self) -> EventRing: ...

    @property
    def is_kept(self) -> bool:
        """Whether it goes on while no client listens."""

    @property
    def rejection(self) -> Exception | None:
        """Why it failed before its first event."""

    def cancel(self) -> None:
        """End it now."""

    async def forget(self) -> None:
        """Wait for its end, and let nothing of it be stored."""

    async def finished(self) -> None:
        """Wait for its end."""

    async def stop(self) -> None:
        """End it at the end of the server; the next server may go on with it."""


class HeldStreams:
    """All of them. Those that ended longer than `RingLimits.seconds` ago are forgotten, and so are
    those that ended and whose events were all evicted."""

    def __init__(self, limits: RingLimits, clock: Callable[[], float]) -> None:
        self.rings = EventRings(limits, self._forget)
        self._clock = clock
        self._by_key: dict[str, dict[str, HeldStream]] = {}  # by API key and name
        self._names: dict[EventRing, tuple[str, ...]] = {}
        self._expected: dict[tuple[str, str], float] = {}  # by API key and name: seconds
        self._running: set[HeldStream] = set()
        self._forgetting: set[asyncio.Task[None]] = set()
        # The ends of retention of rings that have ended
        self._until: OrderedDict[EventRing, float] = OrderedDict()

    def expect(self, tenant: str, names: Iterable[str], seconds: float | None) -> None:
        """A stream with these names will be added in about so many seconds; None: it will not."""
        for name in names:
            self._expected.pop((tenant, name), None)
            if seconds is not None:
                self._expected[tenant, name] = seconds

    def open(self, tenant: str, names: Iterable[str]) -> EventRing:
        """The ring of a new stream. It ends the streams that had its names before."""
        self._forget_old()
        for name in names:
            self._replace(tenant, name)
        return self.rings.open(tenant)

    def add(self, stream: HeldStream, names: Iterable[str]) -> None:
        """Let a stream be found by its names."""
        ring = stream.ring
        self._running.add(stream)
        self._names[ring] = tuple(names)
        if self._names[ring]:
            own = self._by_key.setdefault(ring.tenant, {})
            own.update(dict.fromkeys(self._names[ring], stream))

    def ended(self, stream: HeldStream) -> None:
        """A stream has ended. One that failed before its first event is forgotten at once."""
        self._running.discard(stream)
        if stream.is_kept and stream.rejection is None and stream.ring in self._names:
            self._until[stream.ring] = self._clock() + self.rings.limits.seconds
        else:
            self._forget(stream.ring)

    def find(self, tenant: str, name: str) -> HeldStream:
        """Raises `StreamNotFound` for a name that this key has not given, or that is forgotten, and
        `Unavailable` for one that is expected."""
        stream = self.named(tenant).get(name)
        if stream is None and (seconds := self._expected.get((tenant, name))) is not None:
            raise Unavailable("The stream goes on when its model is loaded.", seconds)
        if stream is None:
            raise StreamNotFound(name)
        return stream

    def named(self, tenant: str) -> dict[str, HeldStream]:
        """The streams of a key by name, the newest last."""
        self._forget_old()
        return self._by_key.get(tenant, {})

    def delete(self, tenant: str, name: str) -> None:
        """End a stream, if it runs, and forget it. Raises `StreamNotFound`."""
        self.find(tenant, name)
        self._replace(tenant, name)

    def forgetting(self, work: Coroutine[Any, Any, None]) -> None:
        """Let work go on that forgets a stream, which `close` waits for."""
        task = asyncio.create_task(work)
        self._forgetting.add(task)
        task.add_done_callback(self._forgetting.discard)

    async def finished(self) -> None:
        """Wait until no stream runs."""
        while self._running:
            await asyncio.gather(*(stream.finished() for stream in self._running))
            await asyncio.sleep(0)  # their callbacks note the end

    async def close(self) -> None:
        """End all streams, at the end of the server."""
        for stream in list(self._running):
            await stream.stop()
        if self._forgetting:
            await asyncio.wait(self._forgetting)

    def _replace(self, tenant: str, name: str) -> None:
        stream = self._by_key.get(tenant, {}).get(name)
        if stream is not None:
            stream.cancel()
            self._forget(stream.ring)
            self.forgetting(stream.forget())

    def _forget_old(self) -> None:
        while self._until and (first := next(iter(self._until.items())))[1] <= self._clock():
            self._forget(first[0])

    def _forget(self, ring: EventRing) -> None:
        self._until.pop(ring, None)
        names, own = self._names.pop(ring, ()), self._by_key.get(ring.tenant, {})
        for name in names:
            del own[name]
        if names and not own:
            del self._by_key[ring.tenant]
        self.rings.close(ring)
