"""Pages: all pages of one kind, on the device and in the tiers below it.

A *page* is what a name stands for and a tier keeps: a block of KV, or a snapshot of recurrent
states. Each kind has memory of its own in each tier, and its pages are numbered there.

    device   `PagePool`    pages of requests; published ones stay cached until they are evicted
    host     `HostTier`    copies of the pages of swapped requests, and of cached pages
    disk     `LowerTier`   copies of cached pages, which outlive the worker
    store    `LowerTier`   copies of cached pages, which other servers read and write too
"""

from collections import deque
from itertools import islice
from typing import TYPE_CHECKING

from engine.kv.host_tier import HostTier
from engine.kv.lower_tiers import LowerTier, LowerTiers
from engine.kv.page_pool import PagePool
from engine.kv.prefix import NAMES_PER_PLAN
from engine.step import PageKind

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from engine.kv_shape import KVShape

MAX_ASKED = 256  # fixed: a limit of memory; requests whose pages are not retained yet


class Pages:
    """The tiers of one kind of page, of which a model may have none."""

    def __init__(self, kind: PageKind, shape: "KVShape") -> None:
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

    def retain(self, names: "Sequence[bytes]", until: float, tenant: str) -> None:
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
