"""The block tables of one request, and which blocks of them a copy on the host has."""

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from engine.step import BlockTable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from engine.kv.layer_groups import Table
    from engine.step import Page, PageKind


@dataclass(slots=True)
class Holding:
    """What one request holds: a table for each layer group. They cover `num_slots` slots."""

    tables: "tuple[Table, ...]"
    num_slots: int = 0

    def blocks(self) -> "Iterator[int]":
        """The blocks of all tables."""
        for table in self.tables:
            yield from table.blocks

    def block_tables(self) -> "tuple[BlockTable, ...]":
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

    page: "Page"
    name: bytes


class PagePairs(NamedTuple):
    """Pages of one kind to copy: `device[i]` to or from `host[i]`."""

    kind: "PageKind"
    device: "array[int]"
    host: "array[int]"
