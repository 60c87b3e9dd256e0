"""Pages: all pages of one kind, on the device and in the tiers below it.

A *page* is what a name stands for and a tier keeps: a block of KV, or a snapshot of recurrent
states. Each kind has memory of its own in each tier, and its pages are numbered there.

    device   `PagePool`    pages of requests; published ones stay cached until they are evicted
    host     `HostTier`    copies of the pages of swapped requests, and of cached pages
    disk     `LowerTier`   copies of cached pages, which outlive the worker
    store    `LowerTier`   copies of cached pages, which other servers read and write too
"""

from array import array
from collections import deque
from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import islice

from engine.kv.lower_tiers import LowerTier, LowerTiers
from engine.kv.page_pool import PagePool
from engine.kv.prefix import NAMES_PER_PLAN
from engine.kv_shape import KVShape
from engine.step import PageKind, RequestId

MAX_ASKED = 256  # fixed: a limit of memory; requests whose pages are not retained yet


class HostTier:
    """Allocates host pages for copies; a copy belongs to one request and is never shared.

        free ─begin_write─▶ moving ─finish_write─▶ held ─begin_read─▶ moving ─finish_read─▶ free

    A page is free, held (part of a complete copy), cached (a copy of a page of the prefix
    cache, which makes room for swapped requests), or moving: a step in flight writes or reads it.
    Pages that are being read belong to the step that reads them, not to the request: the request
    may end before the step returns, and the pages are free when the step has returned.
    """

    def __init__(self, num_pages: int) -> None:
        assert num_pages >= 0, "the number of host pages is not negative"
        self.num_pages = num_pages
        self._free: list[int] = []
        self._copies: dict[RequestId, array[int]] = {}
        self._written: set[RequestId] = set()  # owners of copies that are not complete yet
        self._read: set[int] = set()
        self._free.extend(range(num_pages - 1, -1, -1))
        self.cached = LowerTier(self._free)

    def __repr__(self) -> str:
        return (
            f"HostTier(free={self.num_free}, held={self.num_held}, cached={len(self.cached)}, "
            f"moving={self.num_moving}, all={self.num_pages})"
        )

    @property
    def num_free(self) -> int:
        """Pages that can be allocated: free blocks, and cached ones, which would be replaced."""
        return len(self._free) + self.cached.num_replaceable

    @property
    def num_held(self) -> int:
        """Pages of complete copies of requests."""
        return self.num_pages - len(self._free) - len(self.cached) - self.num_moving

    @property
    def num_moving(self) -> int:
        """Pages that a step in flight writes or reads."""
        swapped = sum(len(self._copies[owner]) for owner in self._written)
        return len(self._read) + swapped + self.cached.num_written

    def begin_write(self, request_id: RequestId, num_pages: int) -> "array[int] | None":
        """Allocate the pages of a request's copy, in the order of its tables; None, and no
        change, if too few are free. A step in flight writes them until `finish_write`."""
        assert request_id not in self._copies, "a request has at most one copy"
        if not self.cached.make_room(num_pages):
            return None
        split = len(self._free) - num_pages
        copy = self._copies[request_id] = array("i", self._free[split:])
        del self._free[split:]
        self._written.add(request_id)
        return copy

    def finish_write(self, request_id: RequestId) -> None:
        """The step that wrote the copy has returned: the copy is complete."""
        self._written.remove(request_id)

    def begin_read(self, request_id: RequestId, num_skipped: int) -> "array[int]":
        """A step reads the copy except for its first `num_skipped` pages. The request no longer
        has a copy: the skipped pages are free now, the others after `finish_read`."""
        assert request_id not in self._written, "only a complete copy is read"
        copy = self._copies.pop(request_id)
        self._free.extend(copy[:num_skipped])
        self._read.update(copy[num_skipped:])
        return copy[num_skipped:]

    def finish_read(self, pages: Iterable[int]) -> None:
        """The step that read these pages has returned: they are free."""
        for page in pages:
            self._read.remove(page)
            self._free.append(page)

    def release(self, request_id: RequestId) -> None:
        """Free the request's copy, if it has one. No step in flight may be writing it."""
        self._free.extend(self._copies.pop(request_id, ()))
        self._written.discard(request_id)

    def reset(self) -> None:
        """The worker is lost, and its host memory with it: all pages are free."""
        self._free[:] = range(self.num_pages - 1, -1, -1)
        self.cached.clear()
        self._copies.clear()
        self._written.clear()
        self._read.clear()

    def num_leaked(self, live: Container[RequestId]) -> int:
        """Pages of copies whose request is not live; anything but 0 is a leak."""
        return sum(len(copy) for owner, copy in self._copies.items() if owner not in live)

    def check(self) -> None:
        """Assert that every page is in exactly one state."""
        copied = [page for copy in self._copies.values() for page in copy]
        everywhere = sorted([*self._free, *copied, *self._read, *self.cached.slots()])
        assert everywhere == list(range(self.num_pages)), f"lost or owned twice: {self!r}"
        assert self._written <= self._copies.keys(), "a copy is written that no request has"
        total = len(self._free) + self.num_held + len(self.cached) + self.num_moving
        assert total == self.num_pages, f"the counts are not all: {self!r}"


class Pages:
    """The tiers of one kind of page, of which a model may have none."""

    def __init__(self, kind: PageKind, shape: KVShape) -> None:
        self.kind = kind
        num_pages = shape.num_blocks
        num_host, num_disk = shape.num_host_blocks, shape.num_disk_blocks
        if kind is PageKind.SNAPSHOT:
            num_pages = shape.num_states
            num_host, num_disk = shape.num_host_states, shape.num_disk_states
        self.host = HostTier(num_host)
        self.disk = LowerTier.of_size(num_disk)
        store = LowerTier.of_size(shape.num_store_names if num_pages else 0)
        cached = self.host.cached if shape.saves_on_host else None
        self.lower = LowerTiers.of(cached, self.disk, store)
        self.pool = PagePool(kind, num_pages, self.lower)
        self.index = self.pool.prefixes  # the prefixes on the device
        self._asked: deque[tuple[Iterator[bytes], float, str]] = deque()
        for copies in self.lower.values():
            copies.retained = self.pool.retained

    def __contains__(self, name: object) -> bool:
        """Whether any tier has this page."""
        return name in self.index or any(name in copies for copies in self.lower.values())

    @property
    def version(self) -> int:
        """Changes whenever the published pages and their copies change."""
        return self.index.version + self.lower.version

    def retain(self, names: Sequence[bytes], until: float, tenant: str) -> None:
        """Evict these pages after all others until a time, in every tier, from one of the next
        calls of `sort_retained` on. Without effect if too many requests have asked for it."""
        if len(self._asked) < MAX_ASKED:
            self._asked.append((iter(names), until, tenant))

    def sort_retained(self, now: float) -> None:
        """Retain pages, and end the retention of those whose time is over: some of both."""
        retained = self.pool.retained
        for name in islice(retained.expire(now), NAMES_PER_PLAN):
            self._sort(name)
        left = NAMES_PER_PLAN
        while self._asked and left:
            names, until, tenant = self._asked[0]
            some = list(islice(names, left))
            left -= len(some)
            for name in some:
                for changed in (name, retained.retain(name, until, tenant)):
                    if changed is not None:
                        self._sort(changed)
            if left:
                self._asked.popleft()

    def _sort(self, name: bytes) -> None:
        """A page and its copies are retained from now on, or no longer."""
        is_retained = name in self.pool.retained.names
        page = self.index.find(name)
        if page is not None and page in self.pool.cached:
            self.pool.cached.sort(page, is_retained=is_retained)
        for copies in self.lower.values():
            if name in copies.order:
                copies.order.sort(name, is_retained=is_retained)

    def reset(self) -> None:
        """The worker is lost, and all pages of the device and the host with it."""
        self.host.reset()
        self.lower.abandon()
        self.pool.reset()

    def check(self, holders: list[int]) -> None:
        """Assert that each page is in exactly one state in each tier, given its holders."""
        self.pool.check(holders)
        self.host.check()
        self.disk.check()
