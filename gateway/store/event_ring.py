"""Rings: the numbered events of streams that clients may read again.

The rings of an API key are bounded in bytes,
and so are all rings together; beyond that the oldest events are evicted, those of streams that have
ended first.
"""

import asyncio
from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from gateway.errors import EventsEvicted

OVERHEAD_BYTES = 4096  # a stream, besides its events
NUMBER_BYTES = 8  # an event, besides its text
PIECE_BYTES = 64 << 10  # read at once
SLAB = 16  # the part of a ring that is evicted at once, so that not every event evicts another


class EventRing:
    """The newest events of one stream. Offsets count the bytes of all events since the first."""

    def __init__(self, rings: "EventRings", tenant: str) -> None:
        self.tenant = tenant
        self.is_complete = False
        self._rings = rings
        self._data = bytearray()
        self._base = 0  # offset of the first byte held
        self._starts = array("Q")  # offsets of the events held
        self._oldest = 0  # number of the oldest event held
        self._waiting: list[asyncio.Future[None]] = []

    @property
    def num_bytes(self) -> int:
        """Bytes that count against the limits."""
        return len(self._data) + NUMBER_BYTES * len(self._starts) + OVERHEAD_BYTES

    @property
    def oldest(self) -> int:
        """Number of the oldest event held."""
        return self._oldest

    @property
    def num_events(self) -> int:
        """All events so far, which is the next one's number."""
        return self._oldest + len(self._starts)

    @property
    def end(self) -> int:
        """Offset after the last byte."""
        return self._base + len(self._data)

    @property
    def is_evicted(self) -> bool:
        """Whether the stream has ended, and nothing of it is held any more."""
        return self.is_complete and not self._data

    def append(self, event: bytes) -> None:
        """Add an event."""
        before = self.num_bytes
        self._starts.append(self.end)
        self._data += event
        self._grown(before)

    def append_comment(self, comment: bytes) -> None:
        """Add a comment, which has no number."""
        before = self.num_bytes
        self._data += comment
        self._grown(before)

    def complete(self) -> None:
        """No further event comes."""
        if not self.is_complete:
            self.is_complete = True
            self._rings.ended(self)
            self._wake()

    def evict(self, num_bytes: int) -> None:
        """Remove the oldest events, at least so many bytes of them if there are as many."""
        before = self.num_bytes
        index = bisect_left(self._starts, self._base + num_bytes)
        base = self._starts[index] if index < len(self._starts) else self.end
        del self._data[: base - self._base], self._starts[:index]
        self._base = base
        self._oldest += index
        self._rings.changed(self, self.num_bytes - before)

    def whole(self) -> bytes | None:
        """All bytes since the first event; None if some were evicted."""
        return None if self._base else bytes(self._data)

    def read(self, offset: int) -> bytes:
        """The next bytes from an offset on. Raises `EventsEvicted`."""
        self._check(offset)
        at = offset - self._base
        return bytes(self._data[at : at + PIECE_BYTES])

    async def offset_after(self, number: int) -> int:
        """The offset of what comes after event `number`, once that event is there or the stream
        has ended. Raises `EventsEvicted`."""
        while number >= self.num_events and not self.is_complete:
            await self._change()
        index = number + 1 - self._oldest
        if index < 0 or (number < 0 and self._base):
            raise EventsEvicted(self._oldest, self._base)
        if number < 0:
            return 0
        return self._starts[index] if index < len(self._starts) else self.end

    async def wait(self, offset: int) -> bool:
        """Wait for bytes from this offset on; False if the stream has ended without."""
        while self.end <= offset and not self.is_complete:
            await self._change()
        return self.end > offset

    def _check(self, offset: int) -> None:
        if offset < self._base:
            raise EventsEvicted(self._oldest, self._base)

    def _grown(self, before: int) -> None:
        self._rings.changed(self, self.num_bytes - before)
        self._rings.make_room(self)
        self._wake()

    async def _change(self) -> None:
        changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(changed)
        await changed

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():  # its reader has not left
                future.set_result(None)


@dataclass(frozen=True, slots=True)
class RingLimits:
    """Bytes of the rings of one API key, and of all rings; and the seconds for which the events of
    a stream that has ended are held."""

    key_bytes: int = 64 << 20
    total_bytes: int = 256 << 20
    seconds: float = 600.0


class _Account:
    """The rings of one API key."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.running: set[EventRing] = set()
        self.ended: OrderedDict[EventRing, None] = OrderedDict()  # the first to end first

    def victim(self) -> EventRing | None:
        """The ring whose events are evicted next: of the stream that ended first, else the largest
        of those that run."""
        if self.ended:
            return next(iter(self.ended))
        return max(self.running, key=lambda ring: ring.num_bytes, default=None)


class EventRings:
    """All rings, within the limits."""

    def __init__(
        self, limits: RingLimits, on_evicted: Callable[[EventRing], None] | None = None
    ) -> None:
        """`on_evicted` is called with a ring whose stream has ended and of which nothing is left;
        it closes the ring."""
        self.limits = limits
        self._on_evicted = on_evicted or self.close
        self._accounts: dict[str, _Account] = {}
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of all rings."""
        return self._num_bytes

    def open(self, tenant: str) -> EventRing:
        """The ring of a new stream."""
        ring = EventRing(self, tenant)
        self._accounts.setdefault(tenant, _Account()).running.add(ring)
        self.changed(ring, ring.num_bytes)
        self.make_room(ring)
        return ring

    def close(self, ring: EventRing) -> None:
        """Forget a ring."""
        account = self._accounts.get(ring.tenant)
        if account is None or not (ring in account.running or ring in account.ended):
            return
        self.changed(ring, -ring.num_bytes)
        account.running.discard(ring)
        account.ended.pop(ring, None)
        if not account.running and not account.ended:
            del self._accounts[ring.tenant]

    def ended(self, ring: EventRing) -> None:
        """The ring's stream has ended."""
        account = self._accounts.get(ring.tenant)
        if account is not None and ring in account.running:
            account.running.remove(ring)
            account.ended[ring] = None
            if ring.is_evicted:
                self._on_evicted(ring)

    def changed(self, ring: EventRing, num_bytes: int) -> None:
        """A ring has grown by so many bytes; a ring that was closed counts no more."""
        account = self._accounts.get(ring.tenant)
        if account is not None and (ring in account.running or ring in account.ended):
            account.num_bytes += num_bytes
            self._num_bytes += num_bytes

    def make_room(self, ring: EventRing) -> None:
        """Evict events until the limits hold, first those of the ring's own key."""
        limits = self.limits
        while (account := self._accounts.get(ring.tenant)) is not None:
            excess = account.num_bytes - limits.key_bytes
            if excess <= 0 or not self._evict(account, excess):
                break
        while (excess := self._num_bytes - limits.total_bytes) > 0:
            accounts = sorted(self._accounts.values(), key=lambda each: -each.num_bytes)
            if not any(self._evict(account, excess) for account in accounts):
                break

    def _evict(self, account: _Account, num_bytes: int) -> bool:
        """Evict events of one ring of an account; False if it has none."""
        victim = account.victim()
        if victim is None or (victim.num_bytes <= OVERHEAD_BYTES and not victim.is_complete):
            return False
        victim.evict(max(num_bytes, victim.num_bytes // SLAB))
        if victim.is_evicted:
            self._on_evicted(victim)
        return True
