"""Journal: the requests of streams that go on without a client, so that they survive the server.

A request is stored before the engine has it, with its body, its seed and the ids of its prompt. If
the server is killed, the next one runs it again: it has the same events. When a stream has ended,
its events are stored, as long as they can be read.
"""

import sqlite3
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from gateway.errors import StoreFailed, StoreOutOfSpace
from gateway.store.database import Database
from gateway.store.event_ring import RingLimits


class StreamRecord(msgspec.Struct, frozen=True):
    """A request whose stream is held. `seed` is that of its ids and of its sampling; `prompts` are
    empty if they are not plain token ids; `fingerprint` names the model."""

    id: str
    tenant: str
    names: list[str]
    request_id: str
    path: str
    body: bytes
    seed: int
    created_at: int
    fingerprint: str
    prompts: list[list[int]] = []

    def with_prompts(self, prompts: list[list[int]]) -> "StreamRecord":
        """The record with the ids of its prompts."""
        return msgspec.structs.replace(self, prompts=prompts)


class Ended(NamedTuple):
    """A stream that has ended, and its events."""

    record: StreamRecord
    events: bytes


class Journal:
    """The records of all tenants. `limits` bound what ended streams take, and for how long."""

    def __init__(self, database: Database, limits: RingLimits) -> None:
        self._database = database
        self._limits = limits
        self._own: set[str] | None = None  # ids that were added beside another server

    def begin_beside(self) -> None:
        """Another server uses the journal as well: the streams that begin here are not those of a
        former server."""
        self._own = set()

    @property
    def is_on(self) -> bool:
        """Whether it is in a file, which the next server reads."""
        return self._database.path is not None

    async def add(self, record: StreamRecord) -> None:
        """Store a request that begins. Raises `StoreOutOfSpace` beyond the limits."""
        data = _ENCODER.encode(record)

        def write(db: sqlite3.Connection) -> None:
            if _trim(db, self._limits, len(data)) > self._limits.total_bytes:
                raise StoreOutOfSpace
            if self._own is not None:
                self._own.add(record.id)
            db.execute(
                "INSERT INTO stream (id, num_bytes, record) VALUES (?, ?, ?)",
                (record.id, len(data), data),
            )

        await self._database.write(write)

    async def end(self, record_id: str, events: bytes, now: int) -> None:
        """Store the events of a stream that has ended, and forget streams that ended too long ago,
        and the first ended of those beyond the limits."""

        def write(db: sqlite3.Connection) -> None:
            db.execute(
                "UPDATE stream SET ended_at = ?, events = ?, num_bytes = num_bytes + ?"
                " WHERE id = ?",
                (now, events, len(events), record_id),
            )
            db.execute("DELETE FROM stream WHERE ended_at <= ?", (now - self._limits.seconds,))
            _trim(db, self._limits)

        await self._database.write(write)

    async def remove(self, record_id: str) -> None:
        """Forget a stream."""

        def write(db: sqlite3.Connection) -> None:
            db.execute("DELETE FROM stream WHERE id = ?", (record_id,))

        await self._database.write(write)

    async def running(self) -> list[StreamRecord]:
        """The streams of former servers that have not ended, in the order of their beginning."""

        def read(db: sqlite3.Connection) -> list[StreamRecord]:
            rows = db.execute("SELECT record FROM stream WHERE ended_at IS NULL ORDER BY seq")
            return self._former([_decoded(record) for (record,) in rows])

        return await self._database.read(read)

    async def ended(self, now: int) -> list[Ended]:
        """The streams of former servers that have ended, and can still be read."""
        since = now - self._limits.seconds

        def read(db: sqlite3.Connection) -> list[Ended]:
            query = "SELECT record, events FROM stream WHERE ended_at > ? ORDER BY seq"
            rows = db.execute(query, (since,))
            streams = [Ended(_decoded(record), events) for record, events in rows]
            former = {record.id for record in self._former(each.record for each in streams)}
            return [each for each in streams if each.record.id in former]

        return await self._database.read(read)

    def _former(self, records: Iterable[StreamRecord]) -> list[StreamRecord]:
        """The records that were not added here."""
        own = self._own or set()
        return [record for record in records if record.id not in own]


def _decoded(data: bytes) -> StreamRecord:
    try:
        return _DECODER.decode(data)
    except msgspec.DecodeError as error:
        raise StoreFailed(f"the journal has a record of another form: {error}") from error


def _trim(db: sqlite3.Connection, limits: RingLimits, more: int = 0) -> int:
    """Forget the streams that ended first, until there is room for `more` bytes. Returns the bytes
    of the others and those."""
    (size,) = db.execute("SELECT coalesce(sum(num_bytes), 0) FROM stream").fetchone()
    size += more
    if size > limits.total_bytes:
        ended = "SELECT seq, num_bytes FROM stream WHERE ended_at IS NOT NULL ORDER BY seq"
        for seq, num_bytes in db.execute(ended).fetchall():
            db.execute("DELETE FROM stream WHERE seq = ?", (seq,))
            size -= num_bytes
            if size <= limits.total_bytes:
                break
    return int(size)


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(StreamRecord)
