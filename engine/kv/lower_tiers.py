"""LowerTier: which pages of one kind a tier below the device has, by name. Integers only.
`LowerTiers` are all of these tiers, the fastest first.

A tier finds a page by its name, puts a new one into a slot, takes one for a step that reads it, and
drops it when that step has returned.

A copy is made while its page is still cached on the device, by a move beside an iteration, so
that evicting the page later costs nothing. Requests find copies as they find cached pages.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice

from engine.kv.prefix import EvictionOrder, PrefixListener
from engine.kv.retention import RetainedNames
from engine.step import HASH_BYTES, Tier


class LowerTier:
    """Allocates slots of a tier for copies; the least recently used copy makes room.

        free ──put──▶ being written ──finish_put──▶ saved ──take──▶ being read
          ▲                                          │  ▲             │ drop
          └──────── replaced, least recently used ───┘  └─────────────┘

    `free` are the tier's free slots; another owner of the tier may share this list.
    """

    @classmethod
    def of_size(cls, num_slots: int) -> "LowerTier":
        """A tier of so many free slots, which no other owner shares."""
        return cls(list(range(num_slots - 1, -1, -1)))

    def __init__(self, free: list[int]) -> None:
        self._free = free
        self.num_slots = len(free)  # at first, where another owner shares the list
        self._saved: dict[bytes, int] = {}
        # The order in which saved pages are evicted
        self.order: EvictionOrder[bytes] = EvictionOrder()
        self.retained = RetainedNames(0)
        self._written: dict[bytes, int] = {}
        self._pins: dict[bytes, int] = {}  # loads in flight
        self._unreadable: set[bytes] = set()  # not to be found; dropped when all loads returned
        self.num_drops = 0
        self.version = 0  # changes whenever the copies change
        self.on_change: Callable[[bytes, bool], object] | None = None  # with True when saved

    def __contains__(self, name: object) -> bool:
        return name in self._saved and name not in self._unreadable

    def __len__(self) -> int:
        return len(self._saved)

    @property
    def num_written(self) -> int:
        """Slots that a step in flight writes."""
        return len(self._written)

    @property
    def num_replaceable(self) -> int:
        """Slots of copies that no step in flight reads."""
        return len(self._saved) - len(self._pins)

    def slots(self) -> Iterator[int]:
        """All slots that are not free."""
        yield from self._saved.values()
        yield from self._written.values()

    def has_or_writes(self, name: bytes) -> bool:
        """Whether there is a copy, or will be when the steps in flight return."""
        return name in self._saved or name in self._written

    def restore(self, copies: Iterable[tuple[int, bytes]]) -> None:
        """Copies that exist already, by their slots, which are free. A second copy of a page is
        not kept."""
        self.version += 1
        for slot, name in copies:
            if name not in self._saved:
                self._saved[name] = slot
                self.order.add(name, is_retained=False)
        taken = set(self._saved.values())
        self._free[:] = [slot for slot in self._free if slot not in taken]

    def learn(self, names: Iterable[bytes]) -> None:
        """The tier, which others write to, has these copies."""
        for name in names:
            if not self.has_or_writes(name) and self.put(name) is not None:
                self.finish_put(name, is_complete=True)

    def put(self, name: bytes) -> int | None:
        """The slot for a new copy; None if every slot is in use by a step in flight."""
        assert not self.has_or_writes(name), "a page is saved once"
        if not self._free and not self.make_room(1):
            return None
        slot = self._written[name] = self._free.pop()
        return slot

    def finish_put(self, name: bytes, *, is_complete: bool) -> None:
        """The step that wrote the copy has returned; a copy that is not complete is dropped."""
        slot = self._written.pop(name, None)
        if slot is None:  # reset meanwhile
            return
        if is_complete:
            self._saved[name] = slot
            self.order.add(name, is_retained=name in self.retained.names)
            self.version += 1
            if self.on_change is not None:
                self.on_change(name, True)
        else:
            self._free.append(slot)

    def take(self, name: bytes) -> int:
        """The slot of a copy that a step is going to read; until `drop` it is not replaced."""
        if self.order.remove(name):
            self.order.add(name, is_retained=name in self.retained.names)
        self._pins[name] = self._pins.get(name, 0) + 1
        return self._saved[name]

    def drop(self, name: bytes, *, is_readable: bool = True) -> None:
        """The step that read the copy has returned. A copy that could not be read is not found any
        more: else requests whose loads overlap would read it in turn for ever."""
        if not is_readable and name in self._saved:
            self._unreadable.add(name)
            self.version += 1
            self.num_drops += 1
        left = self._pins.pop(name, 0) - 1
        if left > 0:
            self._pins[name] = left
        elif name in self._unreadable:
            self._replace(name)

    def make_room(self, num_slots: int) -> bool:
        """Replace copies until so many slots are free; False if too many are being read."""
        short = num_slots - len(self._free)
        if short > 0:
            replaceable = (one for one in self.order if one not in self._pins)
            for name in list(islice(replaceable, short)):
                self._replace(name)
        return len(self._free) >= num_slots

    def abandon(self) -> None:
        """No step in flight will return: copies being written are not complete."""
        self._free.extend(self._written.values())
        self._written.clear()
        self._pins.clear()
        for name in list(self._unreadable):
            self._replace(name)

    def clear(self) -> None:
        """All copies are lost. The caller makes the slots free."""
        self.num_drops += len(self._saved)
        self.version += 1
        self._saved.clear()
        self.order.clear()
        self._written.clear()
        self._pins.clear()
        self._unreadable.clear()

    def check(self) -> None:
        """Assert that every slot is in exactly one state, if no other owner has any."""
        slots = sorted([*self._free, *self.slots()])
        assert slots == list(range(self.num_slots)), "a slot of a tier is lost or owned twice"
        assert {*self.order} == self._saved.keys(), "a copy is never evicted"
        assert self._pins.keys() <= self._saved.keys(), "a copy is read that is not saved"
        assert self._unreadable <= self._pins.keys(), "an unreadable copy is kept for no load"

    def _replace(self, name: bytes) -> None:
        self._free.append(self._saved.pop(name))
        self.order.remove(name)
        self._unreadable.discard(name)
        self.num_drops += 1
        self.version += 1
        if self.on_change is not None:
            self.on_change(name, False)


class LowerTiers(dict[Tier, LowerTier]):
    """The tiers in which cached pages of one kind are saved, the fastest first."""

    @classmethod
    def of(cls, host: LowerTier | None, disk: LowerTier, store: LowerTier) -> "LowerTiers":
        """The tiers that have slots."""
        tiers = {Tier.HOST: host, Tier.DISK: disk, Tier.STORE: store}
        return cls({tier: one for tier, one in tiers.items() if one is not None and one.num_slots})

    @property
    def version(self) -> int:
        """Changes whenever the copies change."""
        return sum([copies.version for copies in self.values()])

    @property
    def num_drops(self) -> int:
        """Copies that were dropped so far."""
        return sum([copies.num_drops for copies in self.values()])

    def has(self, name: bytes) -> bool:
        """Whether a tier has a copy of the page."""
        return any(name in copies for copies in self.values())

    def without(self, name: bytes) -> list[tuple[Tier, LowerTier]]:
        """The tiers that neither have a copy of the page nor get one from a step in flight."""
        return [pair for pair in self.items() if not pair[1].has_or_writes(name)]

    def begin_load(self, name: bytes) -> tuple[Tier, int] | None:
        """The fastest tier with a copy, and its slot, which stays until `finish_load`."""
        for tier, copies in self.items():
            if name in copies:
                return tier, copies.take(name)
        return None

    def finish_load(self, tier: Tier, name: bytes, *, is_readable: bool) -> None:
        """The step that read the copy has returned. A copy that is not readable is dropped."""
        self[tier].drop(name, is_readable=is_readable)

    def abandon(self) -> None:
        """No step in flight will return; what outlives the worker is kept."""
        for tier, copies in self.items():
            if tier is not Tier.HOST:
                copies.abandon()

    def restore_disk(self, names: bytes) -> None:
        """The disk tier has these contents from earlier: `HASH_BYTES` for each slot, zeros for an
        unused one."""
        slots = (names[at : at + HASH_BYTES] for at in range(0, len(names), HASH_BYTES))
        if Tier.DISK in self:
            self[Tier.DISK].restore((slot, name) for slot, name in enumerate(slots) if any(name))

    def listen(self, listener: PrefixListener) -> None:
        """Report to `listener` which copies this server has; those of a shared store are not its
        own."""
        for tier, copies in self.items():
            if tier is not Tier.STORE:
                copies.on_change = partial(listener.copied, tier)
