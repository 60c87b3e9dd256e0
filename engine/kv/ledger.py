"""KVLedger: who holds which KV blocks. Integers only; the tensors live in the workers.

A slot is the KV room of one token in all layers of all stages (Orca, section 4.2); a block is a
fixed run of slots. Every block of the device is free, held by requests, cached, or moving (held
by requests that are being swapped only): free + held + cached + moving = all. `host` counts the
blocks of the host tier.
"""

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from engine.kv.host_tier import HostTier

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from engine.step import RequestId


@dataclass(slots=True)
class _Holding:
    """What one request holds: its blocks, oldest first, and how many of them are published."""

    blocks: "array[int]" = field(default_factory=lambda: array("i"))
    num_published: int = 0


class BlockPairs(NamedTuple):
    """Blocks to copy between, index by index."""

    device: "array[int]"
    host: "array[int]"


class KVLedger:
    """Hands out blocks and takes them back; never waits and never hands out a part.

        free ──reserve──▶ held, private ──publish──▶ held, shared by whoever has the same prefix
          ▲                  │ release                  │ release by the last holder
          ├──────────────────┘                          ▼
          └───────── evict, least recently used ──── cached ──adopt──▶ held

    A block is published under the chained hash of all tokens up to its end, so equal hash means
    equal content; only full, computed blocks are published. The scheduler must not release a
    request that is in an iteration in flight: the workers may still write to its blocks.

    A request that is swapped out beside the compute keeps its device blocks until the step is
    back: they are *moving*, that is coming, neither free nor missing. Published blocks are copied
    like all others, and stay cached on the device; what is still there when the request comes
    back is adopted, and only the rest is moved in.
    """

    def __init__(self, num_blocks: int, block_size: int, num_host_blocks: int = 0) -> None:
        assert num_blocks > 0, "a ledger has at least one block"
        assert block_size > 0, "a block has at least one slot"
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.host = HostTier(num_host_blocks)
        self._in_motion: set[RequestId] = set()  # whose device blocks a step in flight moves
        self._held: dict[RequestId, _Holding] = {}
        self._free: list[int] = []
        self._holders: list[int] = []  # by block
        self._hash: dict[int, bytes] = {}  # of published blocks
        self._published: dict[bytes, int] = {}
        self._cached: dict[int, None] = {}  # published, held by nobody; least recent first
        self.forget()

    def __repr__(self) -> str:
        return (
            f"KVLedger(free={len(self._free)}, held={self.num_held}, cached={self.num_cached}, "
            f"moving={self.num_moving}, all={self.num_blocks}, holders={len(self._held)}, "
            f"{self.host!r})"
        )

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out: free ones, and cached ones that would be evicted."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Blocks that nobody holds and whose content may be used again."""
        return len(self._cached)

    @property
    def num_held(self) -> int:
        """Blocks held by requests, but those that only move."""
        return self.num_blocks - len(self._free) - len(self._cached) - self.num_moving

    @property
    def num_moving(self) -> int:
        """Blocks held by nobody but requests whose KV a step in flight moves."""
        movers: dict[int, int] = {}
        for owner in self._in_motion:
            for block in self._held[owner].blocks:
                movers[block] = movers.get(block, 0) + 1
        return sum(self._holders[block] == count for block, count in movers.items())

    @property
    def num_slots(self) -> int:
        """Room for so many tokens in all."""
        return self.num_blocks * self.block_size

    def blocks_for(self, num_slots: int) -> int:
        """Blocks that `num_slots` slots need."""
        return -(-num_slots // self.block_size)

    def match(self, hashes: "Sequence[bytes]") -> int:
        """How many leading hashes are published: blocks that need not be computed."""
        for count, block_hash in enumerate(hashes):
            if block_hash not in self._published:
                return count
        return len(hashes)

    def num_idle(self, hashes: "Sequence[bytes]") -> int:
        """How many of these published blocks are cached, so that adopting them takes room."""
        return sum(self._published[block_hash] in self._cached for block_hash in hashes)

    def adopt(self, request_id: "RequestId", hashes: "Sequence[bytes]") -> None:
        """Let a request that holds nothing share the published blocks of a prefix."""
        assert request_id not in self._held, "a prefix comes first"
        holding = self._held[request_id] = _Holding(num_published=len(hashes))
        for block_hash in hashes:
            block = self._published[block_hash]
            self._cached.pop(block, None)
            self._holders[block] += 1
            holding.blocks.append(block)

    def num_missing(self, request_id: "RequestId", num_slots: int) -> int:
        """Blocks short for the request to hold so many slots; none or less if they are there."""
        holding = self._held.get(request_id)
        held = len(holding.blocks) if holding is not None else 0
        return self.blocks_for(num_slots) - held - self.num_free

    def reserve(self, request_id: "RequestId", num_slots: int) -> bool:
        """Make the request hold at least `num_slots` slots; False, and no change, if short."""
        holding = self._held.get(request_id)
        held = len(holding.blocks) if holding is not None else 0
        missing = -(-num_slots // self.block_size) - held
        if missing <= 0:
            return True
        if missing > len(self._free) + len(self._cached):
            return False
        if holding is None:
            holding = self._held[request_id] = _Holding()
        while len(self._free) < missing:
            self._evict()
        taken = self._free[: -missing - 1 : -1]
        del self._free[-missing:]
        holding.blocks.extend(taken)
        for block in taken:
            self._holders[block] = 1
        return True

    def _evict(self) -> None:
        block = next(iter(self._cached))
        del self._cached[block]
        del self._published[self._hash.pop(block)]
        self._free.append(block)

    def publish(self, request_id: "RequestId", hashes: "Sequence[bytes]") -> None:
        """The request's leading blocks are full and computed: `hashes` names all of them.

        A block whose content is published already stays private, to be freed with its request.
        """
        holding = self._held[request_id]
        for index in range(holding.num_published, len(hashes)):
            block, block_hash = holding.blocks[index], hashes[index]
            if block_hash not in self._published:
                self._published[block_hash] = block
                self._hash[block] = block_hash
        holding.num_published = max(holding.num_published, len(hashes))

    def num_private(self, request_id: "RequestId", but: "Sequence[bytes]" = ()) -> int:
        """Blocks that nobody else holds, what its release makes available; without the published
        blocks that `but` names."""
        kept = {self._published[block_hash] for block_hash in but}
        blocks = self._held[request_id].blocks
        return sum([self._holders[block] == 1 and block not in kept for block in blocks])

    def copy_out(self, request_id: "RequestId", num_slots: int) -> BlockPairs | None:
        """Find host blocks for the request's first `num_slots` slots; None, and no change, if
        too few are free. A step is to copy them; until it is back both ends are moving."""
        copied = self._held[request_id].blocks[: self.blocks_for(num_slots)]
        copy = self.host.take(request_id, len(copied))
        if copy is None:
            return None
        self._in_motion.add(request_id)
        return BlockPairs(copied, copy)

    def copy_in(self, request_id: "RequestId", num_adopted: int) -> BlockPairs:
        """A step is to fill the request's blocks from its copy, but those adopted."""
        copy = self.host.read(request_id, num_adopted)
        filled = self._held[request_id].blocks[num_adopted : num_adopted + len(copy)]
        self._in_motion.add(request_id)
        return BlockPairs(filled, copy)

    def settle(self, request_id: "RequestId") -> None:
        """The request's device blocks are at rest again."""
        self._in_motion.discard(request_id)

    def leave_device(self, request_id: "RequestId") -> int:
        """Take back the request's device blocks; the number of them. A copy stays.

        The end of a prefix is forgotten before its beginning, which more requests can use.
        """
        self._in_motion.discard(request_id)
        holding = self._held.pop(request_id, None)
        if holding is None:
            return 0
        for block in reversed(holding.blocks):
            self._holders[block] -= 1
            if self._holders[block]:
                continue
            if block in self._hash:
                self._cached[block] = None
            else:
                self._free.append(block)
        return len(holding.blocks)

    def release(self, request_id: "RequestId") -> int:
        """Take back all that the request has in both tiers; the device blocks it held."""
        self.host.drop(request_id)
        return self.leave_device(request_id)

    def forget(self) -> None:
        """The worker is gone: nobody holds anything in any tier, and nothing is cached."""
        self.host.forget()
        self._in_motion.clear()
        self._held.clear()
        self._free = list(range(self.num_blocks - 1, -1, -1))
        self._holders = [0] * self.num_blocks
        self._hash.clear()
        self._published.clear()
        self._cached.clear()

    def table(self, request_id: "RequestId") -> bytes:
        """The request's block table as int32, oldest block first (see `StepEntry.blocks`)."""
        return self._held[request_id].blocks.tobytes()

    def num_orphans(self, live: "Container[RequestId]") -> int:
        """Blocks of both tiers held by nobody alive: always 0, or we have a leak."""
        held = sum(len(h.blocks) for owner, h in self._held.items() if owner not in live)
        return held + self.host.num_orphans(live)

    def check(self) -> None:
        """Assert that every block is in exactly one place, and is held as often as it says."""
        holders = [0] * self.num_blocks
        for holding in self._held.values():
            assert len(set(holding.blocks)) == len(holding.blocks), "a block twice in a table"
            for block in holding.blocks:
                holders[block] += 1
        assert holders == self._holders, f"holders drifted: {self!r}"
        idle = [block for block in range(self.num_blocks) if not holders[block]]
        assert sorted([*self._free, *self._cached]) == idle, f"lost or owned twice: {self!r}"
        assert self._in_motion <= self._held.keys(), "somebody moves who holds nothing"
        counts = (len(self._free), self.num_held, self.num_cached, self.num_moving)
        assert min(counts) >= 0, f"a negative count: {self!r}"
        assert sum(counts) == self.num_blocks, f"the counts are not all: {self!r}"
        self.host.check()
        assert self._published == {h: b for b, h in self._hash.items()}, "hashes drifted"
        assert self._cached.keys() <= self._hash.keys(), "cached without a hash"
        shared = {block for block in range(self.num_blocks) if holders[block] > 1}
        assert shared <= self._hash.keys(), "a private block is shared"
