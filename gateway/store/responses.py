"""Stored responses with their input items, bounded per tenant: its least recently used are deleted
first. Each item is a row, so that one is read or added without the others."""

import sqlite3
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import msgspec

from engine.errors import InvalidRequest
from gateway.errors import ResponseNotFound, StoreOutOfSpace
from gateway.store.database import Database, in_pieces

T = TypeVar("T")
Item = dict[str, Any]
Found = Callable[[sqlite3.Connection, int], T]  # what is done with the row of this `seq`
ROWS = 100  # items added by one statement
DECODED_BYTES = 1 << 16  # records decoded as one, while the interpreter's lock is held


class Key(NamedTuple):
    """A response or a conversation of a tenant, `now` in Unix seconds."""

    id: str
    tenant: str
    now: int


class WholeResponse(NamedTuple):
    """A response object, and the input items of the model: this input and all turns before it."""

    response: dict[str, Any]
    items: list[Item]

    @property
    def turns(self) -> list[Item]:
        """The items that a response with this `previous_response_id` continues."""
        return [*self.items, *self.response["output"]]


@dataclass(frozen=True, slots=True)
class ResponseLimits:
    """Per tenant: maximum number of stored responses and their bytes. And their lifetime."""

    count: int = 10_000
    num_bytes: int = 256 << 20
    seconds: int = 30 * 86_400


class Responses:
    """The responses of all tenants. Every lookup is limited to one tenant, and raises
    `ResponseNotFound` if it has no such response, or that has expired."""

    _table = "response"
    _not_found: type[ResponseNotFound] = ResponseNotFound

    def __init__(self, database: Database, limits: ResponseLimits) -> None:
        self._database = database
        self._limits = limits

    async def put(self, key: Key, response: dict[str, Any], items: Iterable[Item]) -> None:
        """Store it in place of the one that has its id, which a server stored that was killed
        before it had noted its stream's end. Then delete the least recently used ones until the
        limits hold; one that is larger than the limit by itself is deleted, too."""

        def write(db: sqlite3.Connection) -> None:
            data, expires_at = msgspec.json.encode(response), key.now + self._limits.seconds
            query = f"DELETE FROM {self._table} WHERE id = ? AND tenant = ?"
            db.execute(query, (key.id, key.tenant))
            db.execute(
                f"INSERT INTO {self._table} (id, tenant, num_bytes, expires_at, used_at, record)"
                " VALUES (?, ?, ?, ?, ?, ?)",
                (key.id, key.tenant, len(data), expires_at, self._next_use(db), data),
            )
            self._add(db, self._find(db, key), items)
            self._trim(db, key)

        await self._database.write(write)

    async def find(self, key: Key) -> dict[str, Any]:
        """The object without its items."""
        return await self._read(key, self._object)

    async def whole(self, key: Key) -> WholeResponse:
        """The object with all items."""
        return await self._read(
            key, lambda db, seq: WholeResponse(self._object(db, seq), self._items(db, seq))
        )

    async def page(
        self, key: Key, after: str | None, limit: int, *, ascending: bool
    ) -> list[tuple[str, bytes]]:
        """The ids of at most `limit` items, oldest or newest first, starting after the item
        `after`, and these items in JSON. Raises `InvalidRequest` if there is no such item."""
        order, beyond, first = ("ASC", ">", 0) if ascending else ("DESC", "<", 1 << 62)
        rows = f"FROM {self._table}_item WHERE owner = ?"

        def read(db: sqlite3.Connection, seq: int) -> list[tuple[str, bytes]]:
            place = (first,)
            if after is not None:
                query = f"SELECT seq {rows} AND id = ? ORDER BY seq {order}"
                place = db.execute(query, (seq, after)).fetchone()
                if place is None:
                    raise InvalidRequest(f"Invalid 'after': no item {after[:100]!r}.", "after")
            query = f"SELECT id, record {rows} AND seq {beyond} ? ORDER BY seq {order} LIMIT ?"
            return db.execute(query, (seq, *place, limit)).fetchall()

        return await self._read(key, read)

    async def delete(self, key: Key) -> None:
        """Delete it with its items."""

        def remove(db: sqlite3.Connection) -> None:
            db.execute(f"DELETE FROM {self._table} WHERE seq = ?", (self._find(db, key),))

        await self._database.write(remove)

    async def _read(self, key: Key, read: Found[T]) -> T:
        """What `read` reads of a response, which is now the most recently used."""

        def use(db: sqlite3.Connection) -> T:
            seq = self._find(db, key)
            query = f"UPDATE {self._table} SET used_at = ? WHERE seq = ?"
            db.execute(query, (self._next_use(db), seq))
            return read(db, seq)

        if self._database.is_writable:
            with suppress(StoreOutOfSpace):
                return await self._database.write(use)
        return await self._database.read(lambda db: read(db, self._find(db, key)))

    def _find(self, db: sqlite3.Connection, key: Key) -> int:
        query = f"SELECT seq FROM {self._table} WHERE id = ? AND tenant = ? AND expires_at > ?"
        row = db.execute(query, key).fetchone()
        if row is None:
            raise self._not_found(key.id)
        return int(row[0])

    def _object(self, db: sqlite3.Connection, seq: int) -> dict[str, Any]:
        query = f"SELECT record FROM {self._table} WHERE seq = ?"
        found: dict[str, Any] = msgspec.json.decode(db.execute(query, (seq,)).fetchone()[0])
        return found

    def _items(self, db: sqlite3.Connection, seq: int) -> list[Item]:
        """All items. The interpreter's lock is free while SQLite reads each."""
        query = f"SELECT record FROM {self._table}_item WHERE owner = ? ORDER BY seq"
        items: list[Item] = []
        for piece in in_pieces((record for (record,) in db.execute(query, (seq,))), DECODED_BYTES):
            items += msgspec.json.decode(b"[%b]" % b",".join(piece))
        return items

    def _add(self, db: sqlite3.Connection, seq: int, items: Iterable[Item]) -> None:
        """Store items after those that are there, `ROWS` at a time, which takes two thirds of the
        time of one at a time."""
        records = [(item["id"], msgspec.json.encode(item)) for item in items]
        query = f"INSERT INTO {self._table}_item (owner, id, record) VALUES "
        for first in range(0, len(records), ROWS):
            rows = records[first : first + ROWS]
            values = [value for row in rows for value in (seq, *row)]
            db.execute(query + ", ".join(["(?, ?, ?)"] * len(rows)), values)
        self._grow(db, seq, len(records), sum(len(record) for _, record in records))

    def _grow(self, db: sqlite3.Connection, seq: int, num_items: int, num_bytes: int) -> None:
        db.execute(
            f"UPDATE {self._table} SET num_items = num_items + ?, num_bytes = num_bytes + ?"
            " WHERE seq = ?",
            (num_items, num_bytes, seq),
        )

    def _next_use(self, db: sqlite3.Connection) -> int:
        """A counter of uses; seconds would not order two uses within one second."""
        query = f"SELECT coalesce(max(used_at), 0) FROM {self._table}"
        return int(db.execute(query).fetchone()[0]) + 1

    def _trim(self, db: sqlite3.Connection, key: Key) -> None:
        """Delete expired responses, and this tenant's least recently used ones above its limits."""
        table, limits = self._table, self._limits
        db.execute(f"DELETE FROM {table} WHERE expires_at <= ?", (key.now,))
        count, size = db.execute(
            f"SELECT count(*), coalesce(sum(num_bytes), 0) FROM {table} WHERE tenant = ?",
            (key.tenant,),
        ).fetchone()
        oldest = f"SELECT seq, num_bytes FROM {table} WHERE tenant = ? ORDER BY used_at LIMIT 1"
        while count > limits.count or size > limits.num_bytes:
            seq, num_bytes = db.execute(oldest, (key.tenant,)).fetchone()
            db.execute(f"DELETE FROM {table} WHERE seq = ?", (seq,))
            count, size = count - 1, size - num_bytes
