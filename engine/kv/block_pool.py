"""BlockPool: the state of each device block, in whichever tables it is. Integers only."""

from collections import OrderedDict
from itertools import islice
from typing import TYPE_CHECKING

from engine.iteration import Save
from engine.kv.prefix_index import PrefixIndex

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.kv.prefix_index import PrefixListener
    from engine.kv.saved_blocks import LowerTiers


class BlockPool:
    """Allocates blocks, counts their holders and keeps published ones cached.

        free ──allocate──▶ held, private ──publish──▶ held, shared by requests with this prefix
          ▲                  │ drop                     │ drop by the last holder
          ├──────────────────┘                          ▼
          └───────── evict, least recently used ──── cached ──share──▶ held

    Cached blocks are saved in the tiers below (`begin_save`), the least recently used first. Until
    the step that copies them returns they are being saved, and requests may share them.
    """

    def __init__(self, num_blocks: int, lower: "LowerTiers") -> None:
        self.num_blocks = num_blocks
        self.lower = lower
        self.prefixes = PrefixIndex()
        self._free: list[int] = []
        self._holders: list[int] = []  # by block
        self._cached: OrderedDict[int, None] = (
            OrderedDict()
        )  # published, not held; least recent first
        self._unsaved: dict[int, None] = {}  # cached and not in every tier; least recent first
        self._saving: set[int] = set()  # that a step in flight copies
        self._idle: dict[bytes, int] = {}  # what `num_idle` found since the last change
        self.reset()

    @property
    def num_available(self) -> int:
        """Blocks that can be allocated: free blocks, and cached blocks, which would be evicted."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Blocks that no request holds and whose content can be reused."""
        return len(self._cached)

    @property
    def num_saving(self) -> int:
        """Blocks that no request holds and a step in flight copies to a tier below."""
        return sum(not self._holders[block] for block in self._saving)

    @property
    def num_to_be_saved(self) -> int:
        """Blocks that a step in flight copies to a tier below."""
        return len(self._saving)

    @property
    def num_unsaved(self) -> int:
        """Cached blocks that are not saved in every tier."""
        return len(self._unsaved)

    def listen(self, listener: "PrefixListener") -> None:
        """Report to `listener` which blocks are cached, and which copies there are."""
        self.prefixes.listener = listener
        self.lower.listen(listener)

    def num_holders(self, block: int) -> int:
        """Tables that have this block."""
        return self._holders[block]

    def is_cached(self, block: int) -> bool:
        """Whether no request holds this block, whose content can be reused."""
        return block in self._cached

    def num_idle(self, hashes: "Sequence[bytes]") -> int:
        """How many of the blocks with these hashes are cached: sharing them reduces
        `num_available`. The last hash stands for all of them."""
        if not hashes:
            return 0
        last = hashes[-1]
        if last not in self._idle:
            find = self.prefixes.find
            self._idle[last] = sum(find(block_hash) in self._cached for block_hash in hashes)
        return self._idle[last]

    def allocate(self, count: int) -> list[int]:
        """So many blocks, each with one holder; at most `num_available`."""
        assert count <= self.num_available, "more blocks than can be allocated"
        while len(self._free) < count:
            self._evict()
        taken = self._free[: -count - 1 : -1]
        del self._free[-count:]
        for block in taken:
            self._holders[block] = 1
        return taken

    def _evict(self) -> None:
        block = next(iter(self._cached))
        del self._cached[block]
        self._unsaved.pop(block, None)
        self._idle.clear()
        self.prefixes.evict(block)
        self._free.append(block)

    def share(self, block_hash: bytes) -> int:
        """The published block with this hash, with one more holder."""
        block = self.prefixes.block(block_hash)
        self._idle.clear()
        self._cached.pop(block, None)
        self._unsaved.pop(block, None)
        self._holders[block] += 1
        return block

    def drop(self, block: int, *, is_stale: bool = False) -> None:
        """One holder less. A published block without holders is cached, as the most recently used
        one; if it is stale, as the one that is evicted first."""
        self._idle.clear()
        self._holders[block] -= 1
        if self._holders[block]:
            return
        if not self.prefixes.is_published(block):
            self._free.append(block)
        elif block not in self._saving:
            self._cached[block] = None
            if is_stale:
                self._cached.move_to_end(block, last=False)
            if self.lower and self.lower.without(self.prefixes.hash_of(block)):
                self._unsaved[block] = None

    def discard(self, block: int) -> None:
        """Free a cached block; one that a request holds or a step copies stays as it is."""
        if block in self._cached:
            self._cached.move_to_end(block, last=False)
            self._evict()

    def postpone_save(self, block: int) -> None:
        """Do not save a cached block before `allow_save`, since it may soon be discarded."""
        self._unsaved.pop(block, None)

    def allow_save(self, block: int) -> None:
        """Save a block whose save was postponed, if it is still cached."""
        if block in self._cached and self.lower.without(self.prefixes.hash_of(block)):
            self._unsaved[block] = None

    def begin_save(self, most: int) -> "list[Save]":
        """Let the step being planned copy at most so many cached blocks, the least recently used
        first."""
        saves: list[Save] = []
        for block in list(islice(self._unsaved, most)):
            del self._unsaved[block]
            block_hash = self.prefixes.hash_of(block)
            for tier, copies in self.lower.without(block_hash):
                slot = copies.begin_save(block_hash)
                if slot is not None:
                    saves.append(Save(tier, block, slot, block_hash))
        if saves:
            self._idle.clear()
        for save in saves:
            self._cached.pop(save.block, None)
            self._saving.add(save.block)
        return saves

    def finish_save(self, saves: "Sequence[Save]", *, is_complete: bool) -> None:
        """The step that made these copies has returned, or will not return."""
        for save in reversed(saves):  # the first was the least recently used
            self.lower[save.tier].finish_save(save.block_hash, is_complete=is_complete)
            if save.block in self._saving:
                self._saving.discard(save.block)
                if not self._holders[save.block]:
                    self._cached[save.block] = None
                    self._cached.move_to_end(save.block, last=False)
        self._idle.clear()

    def reset(self) -> None:
        """The worker is lost: all blocks are free, and no prefix is cached."""
        self._free = list(range(self.num_blocks - 1, -1, -1))
        self._holders = [0] * self.num_blocks
        self.prefixes.clear()
        self._idle.clear()
        self._cached.clear()
        self._unsaved.clear()
        self._saving.clear()

    def check(self, holders: list[int]) -> None:
        """Assert that every block is in exactly one state, given the holders found by block."""
        assert holders == self._holders, "holders drifted"
        idle = [block for block in range(self.num_blocks) if not holders[block]]
        saving = [block for block in self._saving if not holders[block]]
        found = sorted([*self._free, *self._cached, *saving])
        assert found == idle, "a block is lost or owned twice"
        assert self._unsaved.keys() <= self._cached.keys(), "unsaved, and not cached"
        self.prefixes.check()
        published = self.prefixes.blocks
        assert self._cached.keys() <= published, "cached without a hash"
        shared = {block for block in range(self.num_blocks) if holders[block] > 1}
        assert shared <= published, "a private block is shared"
