"""PrefixIndex: which page of the device has which content, and which hashes were evicted lately.

A waiting request remembers how many of its leading pages are published. Publishing only makes
that number larger, which a look at the next hash finds. Evictions make it smaller, so they are
kept in a log: a request reads the evictions since it last looked, not its whole chain of hashes.
"""

from collections import OrderedDict
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from engine.request import Request
    from engine.step import Tier

# fixed: a limit of memory, of a log; a request that missed some looks up all its hashes again
MAX_EVICTIONS = 4096


Key = TypeVar("Key", int, bytes)


class PrefixListener(Protocol):
    """Called synchronously when the set of cached prefixes changes. Must not wait or raise."""

    def stored(self, request: "Request", places: "Sequence[int]", group: int) -> None:
        """These pages of the request, by their place in it, can be reused from now on in a layer
        group. Snapshots of recurrent layers are reported as the group behind the last one."""
        ...

    def removed(self, block_hash: bytes) -> None:
        """The page with this name in its group (`name_in_group`) cannot be reused any more."""
        ...

    def cleared(self) -> None:
        """No page of the device or of the host tier can be reused any more."""
        ...

    def copied(self, tier: "Tier", block_hash: bytes, is_saved: bool) -> None:
        """A tier below the device has a copy of the page from now on, or no longer."""
        ...


class _Published(NamedTuple):
    name: bytes
    depth: int | None  # number of pages before it in its chain; None if it is in no chain


class PrefixIndex:
    """Maps hashes to published pages and back."""

    def __init__(self) -> None:
        self._pages: dict[bytes, int] = {}
        self._published: dict[int, _Published] = {}
        self._evictions: list[_Published] = []
        self._num_dropped = 0  # evictions before those in the log
        self.version = 0  # changes whenever the published pages change
        self.listener: PrefixListener | None = None

    def __contains__(self, name: object) -> bool:
        return name in self._pages

    @property
    def pages(self) -> "set[int]":
        """All published pages."""
        return set(self._published)

    @property
    def num_evictions(self) -> int:
        """Evictions so far; for `num_matched`."""
        return self._num_dropped + len(self._evictions)

    def is_published(self, page: int) -> bool:
        return page in self._published

    def name_of(self, page: int) -> bytes:
        """The hash under which a page is published."""
        return self._published[page].name

    def page_of(self, name: bytes) -> int:
        """The page that is published under this hash."""
        return self._pages[name]

    def find(self, name: bytes) -> int | None:
        """The page that is published under this hash; None if there is none."""
        return self._pages.get(name)

    def publish(self, page: int, name: bytes, depth: int | None) -> None:
        """Publish a page under a hash that is not published, the `depth`th of its chain. Pages
        in no chain are not logged when they are evicted."""
        self.version += 1
        self._pages[name] = page
        self._published[page] = _Published(name, depth)

    def evict(self, page: int) -> None:
        """The content of a published page is overwritten from now on."""
        self.version += 1
        evicted = self._published.pop(page)
        del self._pages[evicted.name]
        if self.listener is not None:
            self.listener.removed(evicted.name)
        if evicted.depth is None:
            return
        self._evictions.append(evicted)
        if len(self._evictions) > 2 * MAX_EVICTIONS:
            del self._evictions[:MAX_EVICTIONS]
            self._num_dropped += MAX_EVICTIONS

    def clear(self) -> None:
        """The content of all pages is lost."""
        self.version += 1
        self._pages.clear()
        self._published.clear()
        self._num_dropped += len(self._evictions) + 1
        self._evictions.clear()
        if self.listener is not None:
            self.listener.cleared()

    def num_matched(self, hashes: "Sequence[bytes]", num_matched: int, seen: int) -> int:
        """How many of the first `num_matched` hashes, all published when there had been `seen`
        evictions, are published without a gap now."""
        if seen < self._num_dropped:
            num_matched, seen = self._first_gap(hashes, num_matched), self.num_evictions
        for name, depth in self._evictions[seen - self._num_dropped :]:
            assert depth is not None, "only pages of chains are logged"
            is_own = depth < num_matched and hashes[depth] == name
            if is_own and name not in self._pages:
                num_matched = depth
        return num_matched

    def _first_gap(self, hashes: "Sequence[bytes]", num_matched: int) -> int:
        for depth in range(num_matched):
            if hashes[depth] not in self._pages:
                return depth
        return num_matched

    def check(self) -> None:
        """Assert that both directions agree."""
        backwards = {item.name: page for page, item in self._published.items()}
        assert backwards == self._pages, "hashes drifted"


class EvictionOrder(Generic[Key]):
    """Keys in the order in which they are evicted: the least recently used first, retained ones
    behind the others."""

    def __init__(self) -> None:
        self._others: OrderedDict[Key, None] = OrderedDict()
        self._retained: OrderedDict[Key, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._others) + len(self._retained)

    def __contains__(self, key: object) -> bool:
        return key in self._others or key in self._retained

    def __iter__(self) -> "Iterator[Key]":
        yield from self._others
        yield from self._retained

    def add(self, key: Key, *, is_retained: bool) -> None:
        """A key that is not there, as the most recently used one."""
        (self._retained if is_retained else self._others)[key] = None

    def remove(self, key: Key) -> bool:
        """Returns whether the key was there."""
        there = key in self
        self._others.pop(key, None)
        self._retained.pop(key, None)
        return there

    def sort(self, key: Key, *, is_retained: bool) -> None:
        """A key, whether it is there or not, as one that is retained from now on, or as the first
        one of the others."""
        if is_retained:
            self.remove(key)
            self.add(key, is_retained=True)
        else:
            self.put_first(key)

    def put_first(self, key: Key) -> None:
        """Evict a key before all others, whether it is there or not."""
        self.remove(key)
        self._others[key] = None
        self._others.move_to_end(key, last=False)

    def clear(self) -> None:
        self._others.clear()
        self._retained.clear()
