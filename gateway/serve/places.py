"""The open connections of a server: how many there may be, and which one is closed for a new one.

A connection is *unused* until the head of its first request is complete, and *idle* between two
requests. If the server is full, a new connection takes the place of the oldest unused one, or else
of the one that has been idle for longest. If all serve requests, a few more places remain for
probes. A client network has a bound of its own, within which the same holds.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

PROBE_PLACES = 16
MIN_PER_NETWORK = 64


def _nothing() -> None:
    """A place that nothing has been told to close."""


@dataclass(slots=True, eq=False)
class Place:
    """What one connection takes of the server's bound. `close` ends the connection."""

    network: str
    is_for_probes: bool
    _all: "Places"
    close: Callable[[], object] = _nothing
    is_used: bool = False  # a request's head has been complete
    is_left: bool = False

    def begin(self) -> None:
        """The head of a request is complete."""
        self.is_used = True
        self._all.forget(self)

    def rest(self) -> None:
        """All its requests have their responses."""
        if not self.is_left:
            self._all.remember(self)

    def leave(self) -> None:
        """The connection is closed. Idempotent."""
        if not self.is_left:
            self.is_left = True
            self._all.remove(self)


@dataclass(slots=True, eq=False)
class _Network:
    """The connections of a client: their number, and those without a request in the order in which
    they are closed."""

    num_open: int = 0
    unused: dict[Place, None] = field(default_factory=dict)
    idle: dict[Place, None] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Places:
    """The connections of a server, by client network."""

    max_connections: int = 1 << 20
    max_per_network: int = 1 << 20
    on_empty: Callable[[], object] = _nothing
    _everything: _Network = field(default_factory=_Network)
    _networks: dict[str, _Network] = field(default_factory=dict)

    @property
    def num_open(self) -> int:
        return self._everything.num_open

    async def emptied(self) -> None:
        """Return when no connection is open."""
        is_empty = asyncio.Event()
        self.on_empty = is_empty.set
        if self.num_open:
            await is_empty.wait()

    def enter(self, network: str) -> Place | None:
        """A place for a new connection, for which another one may be closed. None if there is
        none."""
        own = self._networks.get(network)
        if own is not None and own.num_open >= self.max_per_network and not self._displace(own):
            return None
        is_full = self.num_open >= self.max_connections and not self._displace(self._everything)
        if is_full and self.num_open >= self.max_connections + PROBE_PLACES:
            return None
        place = Place(network, is_full, self)
        for each in (self._everything, self._networks.setdefault(network, _Network())):
            each.num_open += 1
            each.unused[place] = None
        return place

    def _displace(self, among: _Network) -> bool:
        """Close the oldest unused connection, or the one that has been idle for longest."""
        place = next(iter(among.unused), None) or next(iter(among.idle), None)
        if place is None:
            return False
        place.leave()
        place.close()
        return True

    def forget(self, place: Place) -> None:
        """Count a connection as neither unused nor idle."""
        for each in (self._everything, self._networks.get(place.network)):
            if each is not None:
                each.unused.pop(place, None)
                each.idle.pop(place, None)

    def remember(self, place: Place) -> None:
        """Count a connection as idle from now on."""
        if place.is_used:
            self.forget(place)
            for each in (self._everything, self._networks[place.network]):
                each.idle[place] = None

    def remove(self, place: Place) -> None:
        """Give a place back."""
        self.forget(place)
        own = self._networks[place.network]
        for each in (self._everything, own):
            each.num_open -= 1
        if not own.num_open:
            del self._networks[place.network]
        if not self.num_open:
            self.on_empty()
