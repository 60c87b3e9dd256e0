"""PagePool: the state of each page of one kind on the device. Integers only."""

from collections.abc import Sequence
from itertools import islice

from engine.iteration import Save
from engine.kv.lower_tiers import LowerTiers
from engine.kv.prefix import EvictionOrder, PrefixIndex, PrefixListener
from engine.kv.retention import RetainedNames
from engine.step import Page, PageKind


class PagePool:
    """Allocates pages, counts their holders and keeps published ones cached.

        free ──allocate──▶ held, private ──publish──▶ held, shared by requests with this prefix
          ▲                  │ drop                     │ drop by the last holder
          ├──────────────────┘                          ▼
          └───────── evict, least recently used ──── cached ──take───▶ held

    Cached pages are saved in the tiers below (`begin_save`), the least recently used first. Until
    the step that copies them returns they are being saved, and requests may share them.
    """

    def __init__(self, kind: PageKind, num_pages: int, lower: LowerTiers) -> None:
        self.kind = kind
        self.num_pages = num_pages
        self.lower = lower
        self.prefixes = PrefixIndex()
        self._free: list[int] = []
        self._holders: list[int] = []  # by page
        self.retained = RetainedNames(num_pages // 2)
        self.cached: EvictionOrder[int] = EvictionOrder()  # published, not held
        self._unsaved: dict[int, None] = {}  # cached and not in every tier; least recent first
        self._saving: set[int] = set()  # pages that a step in flight copies
        self._idle: dict[bytes, int] = {}  # what `num_idle` found since the last change
        self.reset()

    @property
    def num_available(self) -> int:
        """Pages that can be allocated: free pages, and cached pages, which would be evicted."""
        return len(self._free) + len(self.cached)

    @property
    def num_cached(self) -> int:
        """Pages that no request holds and whose content can be reused."""
        return len(self.cached)

    @property
    def num_saving(self) -> int:
        """Pages that no request holds and a step in flight copies to a tier below."""
        return sum(not self._holders[page] for page in self._saving)

    @property
    def num_to_be_saved(self) -> int:
        """Pages that a step in flight copies to a tier below."""
        return len(self._saving)

    def listen(self, listener: PrefixListener) -> None:
        """Report to `listener` which pages are cached, and which copies there are."""
        self.prefixes.listener = listener
        self.lower.listen(listener)

    def num_holders(self, page: int) -> int:
        """Tables that have this page."""
        return self._holders[page]

    def num_idle(self, names: Sequence[bytes]) -> int:
        """How many of the pages with these names are cached: sharing them reduces
        `num_available`. The last name stands for all of them."""
        if not names:
            return 0
        last = names[-1]
        if last not in self._idle:
            find = self.prefixes.find
            self._idle[last] = sum(find(name) in self.cached for name in names)
        return self._idle[last]

    def allocate(self, count: int) -> list[int]:
        """So many pages, each with one holder; at most `num_available`."""
        assert count <= self.num_available, "more pages than can be allocated"
        while len(self._free) < count:
            self._evict()
        taken = self._free[: -count - 1 : -1]
        del self._free[-count:]
        for page in taken:
            self._holders[page] = 1
        return taken

    def _evict(self) -> None:
        page = next(iter(self.cached))
        self.cached.remove(page)
        self._unsaved.pop(page, None)
        self._idle.clear()
        self.prefixes.evict(page)
        self._free.append(page)

    def take(self, name: bytes) -> int:
        """The published page with this name, with one more holder."""
        page = self.prefixes.page_of(name)
        self._idle.clear()
        self.cached.remove(page)
        self._unsaved.pop(page, None)
        self._holders[page] += 1
        return page

    def drop(self, page: int, *, is_stale: bool = False) -> None:
        """One holder less. A published page without holders is cached, as the most recently used
        one; if it is stale, as the one that is evicted first."""
        self._idle.clear()
        self._holders[page] -= 1
        if self._holders[page]:
            return
        if not self.prefixes.is_published(page):
            self._free.append(page)
        elif page not in self._saving:
            name = self.prefixes.name_of(page)
            if is_stale:
                self.cached.put_first(page)
            else:
                self.cached.add(page, is_retained=name in self.retained.names)
            if self.lower and self.lower.without(name):
                self._unsaved[page] = None

    def discard(self, page: int) -> None:
        """Free a cached page; one that a request holds or a step copies stays as it is."""
        if page in self.cached:
            self.cached.put_first(page)
            self._evict()

    def age(self, name: bytes) -> None:
        """Evict this page before the other cached ones, if it is cached."""
        page = self.prefixes.find(name)
        if page is not None and page in self.cached:
            self.cached.put_first(page)

    def postpone_save(self, page: int) -> None:
        """Do not save a cached page before `allow_save`, since it may soon be discarded."""
        self._unsaved.pop(page, None)

    def allow_save(self, page: int) -> None:
        """Save a page whose save was postponed, if it is still cached."""
        if page in self.cached and self.lower.without(self.prefixes.name_of(page)):
            self._unsaved[page] = None

    def begin_save(self, most: int) -> list[Save]:
        """Let the step being planned copy at most so many cached pages, the least recently used
        first."""
        saves: list[Save] = []
        for page in list(islice(self._unsaved, most)):
            del self._unsaved[page]
            name = self.prefixes.name_of(page)
            for tier, copies in self.lower.without(name):
                slot = copies.put(name)
                if slot is not None:
                    saves.append(Save(tier, Page(self.kind, page), slot, name))
        if saves:
            self._idle.clear()
        for save in saves:
            self.cached.remove(save.page.number)
            self._saving.add(save.page.number)
        return saves

    def finish_save(self, saves: Sequence[Save], *, is_complete: bool) -> None:
        """The step that made these copies has returned, or will not return."""
        for save in reversed(saves):  # the first was the least recently used
            self.lower[save.tier].finish_put(save.name, is_complete=is_complete)
            number = save.page.number
            if number in self._saving:
                self._saving.discard(number)
                if not self._holders[number]:
                    self.cached.sort(number, is_retained=save.name in self.retained.names)
        self._idle.clear()

    def reset(self) -> None:
        """The worker is lost: all pages are free, and no prefix is cached."""
        self._free = list(range(self.num_pages - 1, -1, -1))
        self._holders = [0] * self.num_pages
        self.prefixes.clear()
        self._idle.clear()
        self.cached.clear()
        self._unsaved.clear()
        self._saving.clear()

    def check(self, holders: list[int]) -> None:
        """Assert that every page is in exactly one state, given the holders found by page."""
        assert holders == self._holders, "holders drifted"
        idle = [page for page in range(self.num_pages) if not holders[page]]
        saving = [page for page in self._saving if not holders[page]]
        found = sorted([*self._free, *self.cached, *saving])
        assert found == idle, "a page is lost or owned twice"
        assert self._unsaved.keys() <= {*self.cached}, "unsaved, and not cached"
        self.prefixes.check()
        published = self.prefixes.pages
        assert {*self.cached} <= published, "cached without a hash"
        shared = {page for page in range(self.num_pages) if holders[page] > 1}
        assert shared <= published, "a private page is shared"
