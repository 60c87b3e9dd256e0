"""Files, stored in pieces so that no whole file needs to be in memory."""

import sqlite3
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial

import msgspec
from msgspec.structs import replace

from engine.errors import InvalidRequest
from gateway.errors import FileNotFound
from gateway.store.database import Database, in_pieces
from gateway.store.usage import StoreLimits, check_bytes, check_file_count

PIECE_BYTES = 256 << 10


class FileRecord(msgspec.Struct, frozen=True):
    """A file without its content. `_at` fields are Unix seconds."""

    id: str
    tenant: str
    filename: str
    purpose: str
    num_bytes: int
    created_at: int
    expires_at: int | None = None


class Files:
    """The files of all tenants. Every lookup is limited to one tenant."""

    def __init__(self, database: Database, limits: StoreLimits) -> None:
        self.limits = limits
        self._database = database
        self._uploading: Counter[str] = Counter()  # bytes of unfinished uploads, by tenant

    async def check_room(self, tenant: str, now: int) -> None:
        """Raises `StoreFull` or `StoreOutOfSpace` if this tenant can store no further file."""
        await self._database.check_writable()

        def check(db: sqlite3.Connection) -> None:
            _purge(db, now)
            check_file_count(db, tenant, self.limits)
            check_bytes(db, tenant, 1, self.limits)

        await self._database.write(check)

    async def put(self, record: FileRecord, read: Callable[[int], Awaitable[bytes]]) -> FileRecord:
        """Store a new file. `read(n)` returns up to n bytes, b"" at the end. Returns the record
        with its size.

        Raises `StoreFull`, `StoreOutOfSpace`, or `InvalidRequest` for an empty file; nothing is
        stored then.
        """
        number = num_bytes = 0
        is_kept = False
        try:
            while piece := await read(PIECE_BYTES):
                self._uploading[record.tenant] += len(piece)
                num_bytes += len(piece)
                await self._put_piece(record, number, piece)
                number += 1
            if not num_bytes:
                raise InvalidRequest("Invalid 'file': it is empty.", "file")
            record = replace(record, num_bytes=num_bytes)
            await self._database.write(partial(_add, record=record, limits=self.limits))
            is_kept = True
        finally:
            self._uploading[record.tenant] -= num_bytes
            if not is_kept and number:
                await self._database.write(partial(_delete, file_ids=[record.id]))
        return record

    async def _put_piece(self, record: FileRecord, number: int, piece: bytes) -> None:
        own = self._uploading[record.tenant]
        others = self._uploading.total() - own

        def write(db: sqlite3.Connection) -> None:
            check_bytes(db, record.tenant, own, self.limits, others)
            _write(db, record.id, number, piece)

        await self._database.write(write)

    async def find(self, file_id: str, tenant: str, now: int) -> FileRecord:
        """Raises `FileNotFound` if this tenant has no such file, or it has expired."""
        return await self._database.read(lambda db: find_file(db, file_id, tenant, now))

    async def listed(
        self, tenant: str, purpose: str | None, now: int, *, ascending: bool
    ) -> list[FileRecord]:
        """All files of a tenant, by age. `purpose`: only these."""

        def read(db: sqlite3.Connection) -> list[FileRecord]:
            rows = db.execute(
                "SELECT record FROM file WHERE tenant = ? AND coalesce(?, purpose) = purpose"
                " AND coalesce(expires_at, ?) > ?"
                f" ORDER BY seq {'ASC' if ascending else 'DESC'}",
                (tenant, purpose, now + 1, now),
            )
            return [_DECODER.decode(record) for (record,) in rows]

        return await self._database.read(read)

    async def piece(self, file_id: str, number: int) -> bytes | None:
        """Piece `number` of the content, from 0; None after the last one."""
        return await self._database.read(lambda db: read_piece(db, file_id, number))

    async def delete(self, file_id: str, tenant: str, now: int) -> None:
        """Raises `FileNotFound`."""

        def remove(db: sqlite3.Connection) -> None:
            find_file(db, file_id, tenant, now)
            _delete(db, [file_id])

        await self._database.write(remove)


def find_file(db: sqlite3.Connection, file_id: str, tenant: str, now: int) -> FileRecord:
    """Raises `FileNotFound` if this tenant has no such file, or it has expired."""
    query = "SELECT record FROM file WHERE id = ? AND tenant = ? AND coalesce(expires_at, ?) > ?"
    row = db.execute(query, (file_id, tenant, now + 1, now)).fetchone()
    if row is None:
        raise FileNotFound(file_id)
    return _DECODER.decode(row[0])


def read_piece(db: sqlite3.Connection, file_id: str, number: int) -> bytes | None:
    """Piece `number` of the content, from 0; None after the last one."""
    query = "SELECT content FROM file_piece WHERE file_id = ? AND number = ?"
    row = db.execute(query, (file_id, number)).fetchone()
    return None if row is None else bytes(row[0])


def write_file(db: sqlite3.Connection, record: FileRecord, lines: Iterable[bytes]) -> int:
    """Store a file that the server made, without regard to limits. Returns its size in bytes;
    `record.num_bytes` is ignored."""
    num_bytes = 0
    for number, piece in enumerate(in_pieces(lines, PIECE_BYTES)):
        content = b"".join(piece)
        _write(db, record.id, number, content)
        num_bytes += len(content)
    _add(db, replace(record, num_bytes=num_bytes), limits=None)
    return num_bytes


def _add(db: sqlite3.Connection, record: FileRecord, limits: StoreLimits | None) -> None:
    """Add the record of a file whose pieces are stored. Raises `StoreFull`, unless `limits` is
    None."""
    _purge(db, record.created_at)
    if limits is not None:
        check_file_count(db, record.tenant, limits)
    db.execute(
        "INSERT INTO file (id, tenant, purpose, num_bytes, expires_at, record)"
        " VALUES (?, ?, ?, ?, ?, ?)",
        (
            record.id,
            record.tenant,
            record.purpose,
            record.num_bytes,
            record.expires_at,
            msgspec.json.encode(record),
        ),
    )


def _purge(db: sqlite3.Connection, now: int) -> None:
    """Delete expired files."""
    rows = db.execute("SELECT id FROM file WHERE expires_at <= ?", (now,)).fetchall()
    if rows:
        _delete(db, [file_id for (file_id,) in rows])


def _delete(db: sqlite3.Connection, file_ids: Sequence[str]) -> None:
    for file_id in file_ids:
        db.execute("DELETE FROM file WHERE id = ?", (file_id,))
        db.execute("DELETE FROM file_piece WHERE file_id = ?", (file_id,))


def _write(db: sqlite3.Connection, file_id: str, number: int, piece: bytes) -> None:
    db.execute("INSERT INTO file_piece VALUES (?, ?, ?)", (file_id, number, piece))


_DECODER = msgspec.json.Decoder(FileRecord)
