"""HostTier: whose KV has a copy in which host blocks. Integers only, the second half of the ledger.

A host block is free, held (a copy that is complete), or moving: being written by a step in flight
that swaps its request out, or read by one that swaps it in. free + held + moving = all.
"""

from array import array
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Container, Iterable

    from engine.step import RequestId


class HostTier:
    """Hands out host blocks for copies; a copy belongs to one request and is never shared.

        free ──take──▶ moving (written) ──complete──▶ held ──read──▶ moving (read) ──put──▶ free

    What is being read belongs to the step that reads it, not to the request: the request may end
    meanwhile, the blocks are free when the step is back.
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 0, "a tier has no negative size"
        self.num_blocks = num_blocks
        self._free: list[int] = []
        self._copies: dict[RequestId, array[int]] = {}
        self._written: set[RequestId] = set()  # copies that are not complete yet
        self._read: set[int] = set()
        self.forget()

    def __repr__(self) -> str:
        return (
            f"HostTier(free={self.num_free}, held={self.num_held}, moving={self.num_moving}, "
            f"all={self.num_blocks})"
        )

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_held(self) -> int:
        """Blocks of copies that are complete."""
        return self.num_blocks - len(self._free) - self.num_moving

    @property
    def num_moving(self) -> int:
        """Blocks that a step in flight writes or reads."""
        return len(self._read) + sum(len(self._copies[owner]) for owner in self._written)

    def take(self, request_id: "RequestId", num_blocks: int) -> "array[int] | None":
        """Blocks to copy a request's KV to, in the order of its table; None if too few are free."""
        assert request_id not in self._copies, "one copy is enough"
        if num_blocks > len(self._free):
            return None
        split = len(self._free) - num_blocks
        copy = self._copies[request_id] = array("i", self._free[split:])
        del self._free[split:]
        self._written.add(request_id)
        return copy

    def complete(self, request_id: "RequestId") -> None:
        """The step that wrote the copy is back."""
        self._written.remove(request_id)

    def read(self, request_id: "RequestId", skip: int) -> "array[int]":
        """A step reads the copy but its first `skip` blocks, and nobody needs it afterwards."""
        assert request_id not in self._written, "a copy is read when it is complete"
        copy = self._copies.pop(request_id)
        self._free.extend(copy[:skip])
        self._read.update(copy[skip:])
        return copy[skip:]

    def put(self, blocks: "Iterable[int]") -> None:
        """The step that read these blocks is back."""
        for block in blocks:
            self._read.remove(block)
            self._free.append(block)

    def drop(self, request_id: "RequestId") -> None:
        """Forget the request's copy, if it has one; no step in flight may be writing it."""
        self._free.extend(self._copies.pop(request_id, ()))
        self._written.discard(request_id)

    def size(self, request_id: "RequestId") -> int:
        """Blocks of the request's copy; 0 if it has none."""
        return len(self._copies.get(request_id, ()))

    def forget(self) -> None:
        """The worker is gone, and its host memory with it."""
        self._free = list(range(self.num_blocks - 1, -1, -1))
        self._copies.clear()
        self._written.clear()
        self._read.clear()

    def num_orphans(self, live: "Container[RequestId]") -> int:
        """Blocks of copies that belong to nobody alive: always 0, or we have a leak."""
        return sum(len(copy) for owner, copy in self._copies.items() if owner not in live)

    def check(self) -> None:
        """Assert that every block is in exactly one place."""
        copied = [block for copy in self._copies.values() for block in copy]
        everywhere = sorted([*self._free, *copied, *self._read])
        assert everywhere == list(range(self.num_blocks)), f"lost or owned twice: {self!r}"
        assert self._written <= self._copies.keys(), "a copy is written that nobody has"
        total = self.num_free + self.num_held + self.num_moving
        assert total == self.num_blocks, f"free + held + moving is not all: {self!r}"
