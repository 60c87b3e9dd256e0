"""Stored responses with their input items, bounded per tenant: its least recently used are deleted
first."""

import sqlite3
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from gateway.errors import ResponseNotFound, StoreOutOfSpace
from gateway.store.database import Database, Work

Item = dict[str, Any]


class ResponseRecord(msgspec.Struct, frozen=True):
    """A response object, and the input items of the model: this input and all turns before it."""

    id: str
    tenant: str
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
    """The responses of all tenants. Every lookup is limited to one tenant."""

    _table = "response"
    _not_found: type[ResponseNotFound] = ResponseNotFound

    def __init__(self, database: Database, limits: ResponseLimits) -> None:
        self._database = database
        self._limits = limits

    async def put(self, record: ResponseRecord, now: int) -> None:
        """Store it, then delete the least recently used ones until the limits hold. One that is
        larger than the limit by itself is deleted, too."""
        data = msgspec.json.encode(record)

        def write(db: sqlite3.Connection) -> None:
            db.execute(
                f"INSERT INTO {self._table} (id, tenant, num_bytes, expires_at, used_at, record)"
                " VALUES (?, ?, ?, ?, ?, ?)",
                (
                    *(record.id, record.tenant, len(data)),
                    *(now + self._limits.seconds, self._next_use(db), data),
                ),
            )
            self._trim(db, record.tenant, now)

        await self._database.write(write)

    async def find(self, response_id: str, tenant: str, now: int) -> ResponseRecord:
        """Raises `ResponseNotFound` if this tenant has no such response, or it has expired."""
        find = partial(self._find, response_id=response_id, tenant=tenant, now=now)
        if self._database.is_writable:
            with suppress(StoreOutOfSpace):
                return await self._database.write(partial(self._use, find=find))
        return await self._database.read(find)

    async def check_room(self) -> None:
        """Raises `StoreOutOfSpace` if no response can be stored now."""
        await self._database.check_writable()

    async def delete(self, response_id: str, tenant: str, now: int) -> None:
        """Raises `ResponseNotFound`."""

        def remove(db: sqlite3.Connection) -> None:
            self._find(db, response_id, tenant, now)
            db.execute(f"DELETE FROM {self._table} WHERE id = ?", (response_id,))

        await self._database.write(remove)

    def _find(
        self, db: sqlite3.Connection, response_id: str, tenant: str, now: int
    ) -> ResponseRecord:
        query = f"SELECT record FROM {self._table} WHERE id = ? AND tenant = ? AND expires_at > ?"
        row = db.execute(query, (response_id, tenant, now)).fetchone()
        if row is None:
            raise self._not_found(response_id)
        return _DECODER.decode(row[0])

    def _use(self, db: sqlite3.Connection, find: Work[ResponseRecord]) -> ResponseRecord:
        """What `find` finds, which is now the most recently used."""
        record = find(db)
        query = f"UPDATE {self._table} SET used_at = ? WHERE id = ?"
        db.execute(query, (self._next_use(db), record.id))
        return record

    def _next_use(self, db: sqlite3.Connection) -> int:
        """A counter of uses; seconds would not order two uses within one second."""
        query = f"SELECT coalesce(max(used_at), 0) FROM {self._table}"
        return int(db.execute(query).fetchone()[0]) + 1

    def _trim(self, db: sqlite3.Connection, tenant: str, now: int) -> None:
        """Delete expired responses, and this tenant's least recently used ones above its limits."""
        table, limits = self._table, self._limits
        db.execute(f"DELETE FROM {table} WHERE expires_at <= ?", (now,))
        count, size = db.execute(
            f"SELECT count(*), coalesce(sum(num_bytes), 0) FROM {table} WHERE tenant = ?", (tenant,)
        ).fetchone()
        oldest = f"SELECT seq, num_bytes FROM {table} WHERE tenant = ? ORDER BY used_at LIMIT 1"
        while count > limits.count or size > limits.num_bytes:
            seq, num_bytes = db.execute(oldest, (tenant,)).fetchone()
            db.execute(f"DELETE FROM {table} WHERE seq = ?", (seq,))
            count, size = count - 1, size - num_bytes


_DECODER = msgspec.json.Decoder(ResponseRecord)
