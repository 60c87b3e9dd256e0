"""Files, stored in pieces so that no whole file needs to be in memory."""

import sqlite3
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
from msgspec.structs import replace

from gateway.errors import FileNotFound, StoreFull
from gateway.store.database import Database

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


@dataclass(frozen=True, slots=True)
class FileLimits:
    """Maximum bytes of one file, and of all files of all tenants."""

    file_bytes: int = 200 << 20
    total_bytes: int = 4 << 30


class Files:
    """The files of all tenants. Every lookup is limited to one tenant."""

    def __init__(self, database: Database, limits: FileLimits) -> None:
        self.limits = limits
        self._database = database

    async def put(self, record: FileRecord, read: Callable[[int], Awaitable[bytes]]) -> FileRecord:
        """Store a new file. `read(n)` returns up to n bytes, b"" at the end. Returns the record
        with its size. Raises `StoreFull`; nothing is stored then."""
        number = num_bytes = 0
        is_kept = False
        try:
            while piece := await read(PIECE_BYTES):
                await self._database.do(
                    partial(_write, file_id=record.id, number=number, piece=piece)
                )
                number, num_bytes = number + 1, num_bytes + len(piece)
            record = replace(record, num_bytes=num_bytes)
            total_bytes = self.limits.total_bytes
            await self._database.do(partial(_add, record=record, total_bytes=total_bytes))
            is_kept = True
        finally:
            if not is_kept:
                await self._database.do(partial(_delete, file_ids=[record.id]))
        return record

    async def find(self, file_id: str, tenant: str, now: int) -> FileRecord:
        """Raises `FileNotFound` if this tenant has no such file, or it has expired."""
        return await self._database.do(lambda db: find_file(db, file_id, tenant, now))

    async def listed(
        self, tenant: str, purpose: str | None, now: int, *, ascending: bool
    ) -> list[FileRecord]:
        """All files of a tenant, by age. `purpose`: only these."""

        def read(db: sqlite3.Connection) -> list[FileRecord]:
            _purge(db, now)
            rows = db.execute(
                "SELECT record FROM file WHERE tenant = ? AND coalesce(?, purpose) = purpose"
                f" ORDER BY seq {'ASC' if ascending else 'DESC'}",
                (tenant, purpose),
            )
            return [_DECODER.decode(record) for (record,) in rows]

        return await self._database.do(read)

    async def piece(self, file_id: str, number: int) -> bytes | None:
        """Piece `number` of the content, from 0; None after the last one."""
        return await self._database.do(lambda db: read_piece(db, file_id, number))

    async def delete(self, file_id: str, tenant: str, now: int) -> None:
        """Raises `FileNotFound`."""

        def remove(db: sqlite3.Connection) -> None:
            find_file(db, file_id, tenant, now)
            _delete(db, [file_id])

        await self._database.do(remove)


def find_file(db: sqlite3.Connection, file_id: str, tenant: str, now: int) -> FileRecord:
    """Raises `FileNotFound` if this tenant has no such file, or it has expired."""
    _purge(db, now)
    query = "SELECT record FROM file WHERE id = ? AND tenant = ?"
    row = db.execute(query, (file_id, tenant)).fetchone()
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
    number = num_bytes = 0
    pending: list[bytes] = []
    size = 0
    for line in lines:
        pending.append(line)
        size += len(line)
        if size >= PIECE_BYTES:
            _write(db, record.id, number, b"".join(pending))
            number, num_bytes, size = number + 1, num_bytes + size, 0
            pending.clear()
    _write(db, record.id, number, b"".join(pending))
    num_bytes += size
    _add(db, replace(record, num_bytes=num_bytes), None)
    return num_bytes


def _add(db: sqlite3.Connection, record: FileRecord, total_bytes: int | None) -> None:
    """Add the record of a file whose pieces are stored. Raises `StoreFull` if all files together
    exceed `total_bytes`."""
    _purge(db, record.created_at)
    if total_bytes is not None:
        (used,) = db.execute("SELECT coalesce(sum(num_bytes), 0) FROM file").fetchone()
        if used + record.num_bytes > total_bytes:
            raise StoreFull(total_bytes)
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
