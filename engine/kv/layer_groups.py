"""Layer groups: layers that keep the KV of the same tokens, and so share block tables; the tables
of one request, and which of their blocks a copy on the host has.

All groups take their blocks from one pool, since a block has the same number of bytes in each: it
holds the KV of `block_size` tokens in as many layers. So no memory is set aside for a group.
"""

from array import array
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.kv.prefix import name_in_group
from engine.step import BlockTable, Page, PageKind


@dataclass(slots=True)
class Table:
    """The blocks of a request in one layer group, oldest first.

    The first `first` blocks of the request are not in it any more. `num_published` counts them too.
    """

    first: int = 0
    num_published: int = 0
    blocks: "array[int]" = field(default_factory=lambda: array("i"))

    @property
    def stop(self) -> int:
        """The number of the block behind the table."""
        return self.first + len(self.blocks)


class LayerGroup(NamedTuple):
    """What one group keeps of each request: the KV of all tokens, or of a window.

    `window` is the sliding window in tokens, counting the token itself; None means all tokens.
    `most_blocks` is the largest number of blocks that one table has; None means no limit.
    """

    block_size: int
    window: int | None = None
    most_blocks: int | None = None

    @classmethod
    def of(cls, window: int | None, block_size: int, chunk: int) -> "LayerGroup":
        """A group of which at most `chunk` tokens of a request are planned beyond those that are
        computed."""
        if window is None:
            return cls(block_size)
        # The window before the next token, the tokens planned, and a part of a block at both ends.
        return cls(block_size, window, -(-(window + chunk) // block_size) + 1)

    def first_needed(self, position: int) -> int:
        """The first block that is read to compute the token at `position`."""
        if self.window is None:
            return 0
        return max(0, position - self.window + 1) // self.block_size

    def is_read_behind(self, ends: Sequence[int], place: int) -> bool:
        """Whether block number `place` is read by a request that starts behind one of so many
        tokens, which are whole blocks."""
        return any(self.first_needed(end) <= place < end // self.block_size for end in ends)

    def stop(self, num_blocks: int, first: int) -> int:
        """Where a table that begins with block number `first` ends, so that it covers the first
        `num_blocks` blocks of a request, or as many as it may have."""
        if self.most_blocks is None:
            return num_blocks
        return min(num_blocks, first + self.most_blocks)


class LayerGroups(tuple[LayerGroup, ...]):
    """All layer groups of a model."""

    @classmethod
    def of(cls, windows: Sequence[int | None], block_size: int, chunk: int = 0) -> "LayerGroups":
        """See `LayerGroup.of`; `windows` has one item for each group."""
        return cls(LayerGroup.of(window, block_size, chunk) for window in windows)

    @property
    def keeps_all(self) -> bool:
        """Whether there is one group, which keeps the KV of all tokens."""
        return len(self) == 1 and self[0].window is None

    @property
    def has_full_group(self) -> bool:
        """Whether any group keeps the KV of all tokens."""
        return any(group.window is None for group in self)

    def names(self, hashes: Sequence[bytes]) -> Sequence[bytes]:
        """The names of the published blocks that a request needs to start behind a prefix."""
        if self.keeps_all:
            return hashes
        return [name for number in range(len(self)) for name in self.names_in(number, hashes)]

    def names_in(self, number: int, hashes: Sequence[bytes]) -> Iterator[bytes]:
        """The names of one group."""
        group = self[number]
        for block_hash in hashes[group.first_needed(len(hashes) * group.block_size) :]:
            yield name_in_group(block_hash, number)

    def num_reusable(self, hashes: Sequence[bytes], most: int, published: Container[bytes]) -> int:
        """How many of the first `most` hashes, at most, a request can start behind: the largest
        number for which each group has what computing the next token reads. If the first group
        keeps the KV of all tokens, its blocks with these hashes are published."""
        count = most
        while count:
            missing = max(
                self._last_missing(number, hashes, count, published) for number in range(len(self))
            )
            if missing < 0:
                return count
            count = missing  # a larger number needs this block too
        return 0

    def _last_missing(
        self, number: int, hashes: Sequence[bytes], count: int, published: Container[bytes]
    ) -> int:
        """The last block that a group lacks so that a request can start behind `count` blocks; -1
        if it lacks none."""
        group = self[number]
        if not number and group.window is None:
            return -1
        for place in range(count - 1, group.first_needed(count * group.block_size) - 1, -1):
            if name_in_group(hashes[place], number) not in published:
                return place
        return -1

    def shortage(self, tables: Sequence[Table] | None, stop: int) -> list[int]:
        """For each group, the blocks by which its table is too short to cover the first `stop`
        blocks of a request; None means no tables yet."""
        if tables is None:
            return [group.stop(stop, 0) for group in self]
        pairs = zip(self, tables, strict=True)
        return [max(0, group.stop(stop, table.first) - table.stop) for group, table in pairs]

    def check(self, tables: Sequence[Table]) -> None:
        """Assert that no block is in a request's tables twice, and that no table has too many."""
        blocks = [block for table in tables for block in table.blocks]
        assert len(set(blocks)) == len(blocks), "a block twice in the tables of a request"
        for group, table in zip(self, tables, strict=True):
            assert group.most_blocks is None or len(table.blocks) <= group.most_blocks, (
                f"a table of {len(table.blocks)} blocks for a window of {group.window}"
            )

    def num_behind(self, prefix: int, stop: int) -> int:
        """The blocks, over all groups, that cover the first `stop` blocks of a request behind a
        prefix of `prefix` blocks."""
        ends = [one.stop(stop, one.first_needed(prefix * one.block_size)) for one in self]
        return sum([max(0, end - prefix) for end in ends])

    def longest_request(self, num_blocks: int) -> int | None:
        """The most blocks of tokens that a request alone can have in so many blocks; None if there
        is no limit."""
        num_growing, left = len(self), num_blocks
        for most in sorted(one.most_blocks for one in self if one.most_blocks is not None):
            if left < num_growing * most:
                break
            num_growing -= 1  # a table of this group grows no further
            left -= most
        return left // num_growing if num_growing else None


@dataclass(slots=True)
class Holding:
    """What one request holds: a table for each layer group. They cover `num_slots` slots. `encoded`
    are the blocks of the first table as bytes, None until they are wanted and when they change."""

    tables: tuple[Table, ...]
    num_slots: int = 0
    encoded: bytes | None = None

    def blocks(self) -> Iterator[int]:
        """The blocks of all tables."""
        for table in self.tables:
            yield from table.blocks

    def block_tables(self) -> tuple[BlockTable, ...]:
        """The table of each layer group."""
        return tuple([BlockTable(table.first, table.blocks.tobytes()) for table in self.tables])

    def to_copy(self, stop: int) -> "tuple[Copied, ...]":
        """What a copy of the first `stop` blocks of the request has."""
        return tuple([Copied(one.first, min(stop, one.stop) - one.first) for one in self.tables])

    def begin_at(self, spans: "Sequence[Copied]") -> None:
        """The tables, which are empty, begin where these spans do."""
        for table, span in zip(self.tables, spans, strict=True):
            table.first = table.num_published = span.first

    def copied(self, spans: "Sequence[Copied]", num_skipped: int = 0) -> "array[int]":
        """The blocks that a copy with these spans has, without the first ones of each table."""
        blocks = array("i")
        for table, span in zip(self.tables, spans, strict=True):
            blocks += table.blocks[num_skipped : span.num_blocks]
        return blocks


class Copied(NamedTuple):
    """The blocks of one table that a copy has."""

    first: int
    num_blocks: int


class Missing(NamedTuple):
    """A device page of a prefix that has to be loaded, and its name."""

    page: Page
    name: bytes


class PagePairs(NamedTuple):
    """Pages of one kind to copy: `device[i]` to or from `host[i]`."""

    kind: PageKind
    device: "array[int]"
    host: "array[int]"
