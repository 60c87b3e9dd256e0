"""KVLedger: who holds which KV blocks. Integers only; the tensors live in the workers.

A slot is the KV room of one token in all layers of all stages (Orca, section 4.2); a block is a
fixed run of slots. Every block is free or held by exactly one request: free + held = all.
"""

from array import array
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Container

    from engine.step import RequestId


class KVLedger:
    """Hands out blocks and takes them back; never waits and never hands out a part.

        free ──reserve──▶ held by one request ──release──▶ free

    The scheduler must not release a request that is in an iteration in flight: the workers
    may still write to its blocks.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        assert num_blocks > 0, "a ledger has at least one block"
        assert block_size > 0, "a block has at least one slot"
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))
        self._held: dict[RequestId, array[int]] = {}

    def __repr__(self) -> str:
        return (
            f"KVLedger(free={self.num_free}, held={self.num_held}, all={self.num_blocks}, "
            f"holders={len(self._held)})"
        )

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    @property
    def num_held(self) -> int:
        """Blocks held by requests."""
        return self.num_blocks - len(self._free)

    @property
    def num_slots(self) -> int:
        """Room for so many tokens in all."""
        return self.num_blocks * self.block_size

    def blocks_for(self, num_slots: int) -> int:
        """Blocks that `num_slots` slots need."""
        return -(-num_slots // self.block_size)

    def reserve(self, request_id: "RequestId", num_slots: int) -> bool:
        """Make the request hold at least `num_slots` slots; False, and no change, if short."""
        held = self._held.get(request_id)
        if held is None:
            held = array("i")
        missing = -(-num_slots // self.block_size) - len(held)
        if missing > len(self._free):
            return False
        if missing > 0:
            self._held[request_id] = held
            held.extend(self._free[: -missing - 1 : -1])
            del self._free[-missing:]
        return True

    def release(self, request_id: "RequestId") -> int:
        """Take back all that the request holds; the number of blocks."""
        held = self._held.pop(request_id, array("i"))
        self._free.extend(reversed(held))
        return len(held)

    def table(self, request_id: "RequestId") -> bytes:
        """The request's block table as int32, oldest block first (see `StepEntry.blocks`)."""
        return self._held[request_id].tobytes()

    def num_orphans(self, live: "Container[RequestId]") -> int:
        """Blocks held by nobody alive: always 0, or we have a leak."""
        return sum(len(held) for owner, held in self._held.items() if owner not in live)

    def check(self) -> None:
        """Assert that every block is in exactly one place."""
        everywhere = list(self._free)
        for held in self._held.values():
            everywhere.extend(held)
        assert len(everywhere) == self.num_blocks, f"blocks lost or doubled: {self!r}"
        assert sorted(everywhere) == list(range(self.num_blocks)), f"a block owned twice: {self!r}"
