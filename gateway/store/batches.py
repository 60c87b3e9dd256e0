"""Batches and their lines. A line is answered at most once, also across crashes and restarts.

    validating ──▶ in_progress ──▶ finalizing ──▶ completed
        └──▶ failed      ├──▶ cancelling ──▶ cancelled
                         └──▶ expired

Every change of a batch is one transaction over its record and its lines, so the counts of the
record always agree with the lines.
"""

import asyncio
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import msgspec
from msgspec.structs import replace

from gateway.errors import BatchNotFound, StoreOutOfSpace, TooManyBatches
from gateway.store.batch_records import BatchLine, BatchRecord, LineAnswer, LineError
from gateway.store.database import RETRY_SECONDS, Database
from gateway.store.files import FileRecord, read_piece, write_file
from gateway.store.usage import StoreLimits, check_bytes

MAX_LIVE = 50  # batches of a tenant that have not ended; each stores its lines until then
MAX_ENDED = 1000  # batches of a tenant that have ended; older ones are deleted


class Batches:
    """The batches of all tenants. Every lookup is limited to one tenant."""

    def __init__(self, database: Database, limits: StoreLimits) -> None:
        self._database = database
        self._limits = limits

    async def wait_for_room(self) -> None:
        """Wait until answers can be stored; then generating them is not in vain."""
        while True:
            try:
                await self._database.check_writable()
            except StoreOutOfSpace:
                await asyncio.sleep(RETRY_SECONDS)
            else:
                return

    async def add(self, record: BatchRecord, forget_before: int) -> None:
        """Store a new batch; delete ended ones that were created before `forget_before`.

        Raises `TooManyBatches`, `StoreFull` or `StoreOutOfSpace`.
        """
        await self._database.check_writable()

        def write(db: sqlite3.Connection) -> None:
            tenant = record.tenant
            live = "SELECT count(*) FROM batch WHERE tenant = ? AND is_live = 1"
            if db.execute(live, (tenant,)).fetchone()[0] >= MAX_LIVE:
                raise TooManyBatches(MAX_LIVE)
            _forget_old(db, tenant, forget_before)
            size = "SELECT coalesce(max(num_bytes), 0) FROM file WHERE id = ?"
            (num_bytes,) = db.execute(size, (record.input_file_id,)).fetchone()
            check_bytes(db, tenant, num_bytes, self._limits)
            db.execute(
                "INSERT INTO batch (id, tenant, created_at, is_live, record, num_bytes)"
                " VALUES (?, ?, ?, 1, ?, ?)",
                (record.id, tenant, record.created_at, msgspec.json.encode(record), num_bytes),
            )

        await self._database.write(write)

    async def find(self, batch_id: str, tenant: str) -> BatchRecord:
        """Raises `BatchNotFound` if this tenant has no such batch."""
        return await self._database.read(partial(_find, batch_id=batch_id, tenant=tenant))

    async def listed(self, tenant: str, after: str | None, limit: int) -> list[BatchRecord]:
        """Newest first, starting after the batch `after`. Raises `BatchNotFound`."""

        def read(db: sqlite3.Connection) -> list[BatchRecord]:
            before = 1 << 62
            if after is not None:
                query = "SELECT seq FROM batch WHERE id = ? AND tenant = ?"
                row = db.execute(query, (after, tenant)).fetchone()
                if row is None:
                    raise BatchNotFound(after, "after")
                (before,) = row
            rows = db.execute(
                "SELECT record FROM batch WHERE tenant = ? AND seq < ? ORDER BY seq DESC LIMIT ?",
                (tenant, before, limit),
            )
            return [_DECODER.decode(record) for (record,) in rows]

        return await self._database.read(read)

    async def live(self) -> list[BatchRecord]:
        """All batches that have not ended, oldest first."""

        def read(db: sqlite3.Connection) -> list[BatchRecord]:
            rows = db.execute("SELECT record FROM batch WHERE is_live = 1 ORDER BY seq")
            return [_DECODER.decode(record) for (record,) in rows]

        return await self._database.read(read)

    async def fail(self, batch_id: str, now: int, errors: tuple[LineError, ...]) -> BatchRecord:
        """validating → failed, with the errors of its input file."""

        def write(db: sqlite3.Connection) -> BatchRecord:
            _drop_lines(db, batch_id)
            db.execute("UPDATE batch SET num_bytes = 0 WHERE id = ?", (batch_id,))
            return _change(db, batch_id, status="failed", failed_at=now, errors=errors)

        return await self._database.write(write)

    async def begin(
        self, batch_id: str, now: int, num_lines: int, model: str | None
    ) -> BatchRecord:
        """validating → in_progress, once its lines are stored."""

        def write(db: sqlite3.Connection) -> BatchRecord:
            found = {"num_lines": num_lines, "model": model}
            if _load(db, batch_id).status != "validating":
                return _change(db, batch_id, **found)
            return _change(db, batch_id, status="in_progress", in_progress_at=now, **found)

        return await self._database.write(write)

    async def wind_up(self, batch_id: str, now: int, *, is_late: bool) -> BatchRecord:
        """in_progress → finalizing: all lines are answered, or (`is_late`) the time is over."""

        def write(db: sqlite3.Connection) -> BatchRecord:
            record = _load(db, batch_id)
            if record.status != "in_progress":
                return record
            expired_at = now if is_late else None
            return _change(
                db, batch_id, status="finalizing", finalizing_at=now, expired_at=expired_at
            )

        return await self._database.write(write)

    async def cancel(self, batch_id: str, tenant: str, now: int) -> BatchRecord:
        """validating or in_progress → cancelling; later states stay. Raises `BatchNotFound`."""

        def write(db: sqlite3.Connection) -> BatchRecord:
            record = _find(db, batch_id, tenant)
            if record.status not in ("validating", "in_progress"):
                return record
            return _change(db, batch_id, status="cancelling", cancelling_at=now)

        return await self._database.write(write)

    async def piece(self, file_id: str, number: int) -> bytes | None:
        """Piece `number` of an input file, from 0; None after the last one."""
        return await self._database.read(partial(read_piece, file_id=file_id, number=number))

    async def forget_lines(self, batch_id: str) -> None:
        """Delete its lines."""
        await self._database.write(partial(_drop_lines, batch_id=batch_id))

    async def add_lines(
        self, batch_id: str, read: Callable[[], Iterable[BatchLine]]
    ) -> list[BatchLine]:
        """Store the lines that `read` yields, which runs off the loop. Returns the lines that were
        not stored because their custom_id occurs twice."""

        def write(db: sqlite3.Connection) -> list[BatchLine]:
            insert = (
                "INSERT OR IGNORE INTO batch_line (batch_id, number, custom_id, body)"
                " VALUES (?, ?, ?, ?)"
            )
            return [line for line in read() if not db.execute(insert, (batch_id, *line)).rowcount]

        return await self._database.write(write)

    async def unanswered(self, batch_id: str, after: int) -> BatchLine | None:
        """The first line with a number above `after` that has no answer."""

        def read(db: sqlite3.Connection) -> BatchLine | None:
            row = db.execute(
                "SELECT number, custom_id, body FROM batch_line"
                " WHERE batch_id = ? AND number > ? AND answer IS NULL ORDER BY number LIMIT 1",
                (batch_id, after),
            ).fetchone()
            return None if row is None else BatchLine(*row)

        return await self._database.read(read)

    async def answer(self, batch_id: str, answer: LineAnswer) -> None:
        """Store a line's answer, unless the line has one or its batch has ended."""
        await self._database.write(partial(_answer, batch_id=batch_id, answer=answer))

    async def finish(
        self,
        batch_id: str,
        now: int,
        files: tuple[FileRecord, FileRecord],
        late: Callable[[BatchLine], bytes],
    ) -> BatchRecord:
        """Write the output and the error file, unless empty, and delete the lines. In an expired
        batch, unanswered lines get the answer that `late` returns."""

        def write(db: sqlite3.Connection) -> BatchRecord:
            record = _load(db, batch_id)
            if record.expired_at is not None:
                _answer_rest(db, record, late)
            output, errors = files
            ended = replace(
                _load(db, batch_id),
                output_file_id=_write_answers(db, batch_id, output, is_error=False),
                error_file_id=_write_answers(db, batch_id, errors, is_error=True),
                **_end_of(record, now),
            )
            _save(db, ended)
            _drop_lines(db, batch_id)
            db.execute("UPDATE batch SET num_bytes = 0 WHERE id = ?", (batch_id,))
            return ended

        return await self._database.write(write)


def _forget_old(db: sqlite3.Connection, tenant: str, before: int) -> None:
    """Delete ended batches that were created earlier, and the tenant's oldest above `MAX_ENDED`."""
    db.execute("DELETE FROM batch WHERE is_live = 0 AND created_at < ?", (before,))
    db.execute(
        "DELETE FROM batch WHERE seq IN (SELECT seq FROM batch WHERE tenant = ? AND is_live = 0"
        " ORDER BY seq DESC LIMIT -1 OFFSET ?)",
        (tenant, MAX_ENDED),
    )


def _end_of(record: BatchRecord, now: int) -> dict[str, object]:
    """The last status of a batch that is finalizing or cancelling."""
    if record.status == "cancelling":
        return {"status": "cancelled", "cancelled_at": now}
    if record.expired_at is not None:
        return {"status": "expired"}
    return {"status": "completed", "completed_at": now}


def _answer(db: sqlite3.Connection, batch_id: str, answer: LineAnswer) -> None:
    """Store an answer and count it; a second answer changes nothing."""
    query = (
        "SELECT length(body) FROM batch_line WHERE batch_id = ? AND number = ? AND answer IS NULL"
    )
    if (row := db.execute(query, (batch_id, answer.number)).fetchone()) is not None:
        db.execute(
            "UPDATE batch_line SET answer = ?, is_error = ?, body = ''"
            " WHERE batch_id = ? AND number = ?",
            (answer.text, answer.is_error, batch_id, answer.number),
        )
        added = len(answer.text) - row[0]
        db.execute("UPDATE batch SET num_bytes = num_bytes + ? WHERE id = ?", (added, batch_id))
        record = _load(db, batch_id)
        _change(
            db,
            batch_id,
            num_completed=record.num_completed + (not answer.is_error),
            num_failed=record.num_failed + answer.is_error,
            tokens=record.tokens + answer.tokens,
        )


def _answer_rest(
    db: sqlite3.Connection, record: BatchRecord, late: Callable[[BatchLine], bytes]
) -> None:
    query = (
        "SELECT number, custom_id FROM batch_line"
        " WHERE batch_id = ? AND answer IS NULL ORDER BY number"
    )
    for number, custom_id in db.execute(query, (record.id,)).fetchall():
        text = late(BatchLine(number, custom_id, b""))
        _answer(db, record.id, LineAnswer(number, text, is_error=True))


def _load(db: sqlite3.Connection, batch_id: str) -> BatchRecord:
    (record,) = db.execute("SELECT record FROM batch WHERE id = ?", (batch_id,)).fetchone()
    return _DECODER.decode(record)


def _save(db: sqlite3.Connection, record: BatchRecord) -> None:
    db.execute(
        "UPDATE batch SET record = ?, is_live = ? WHERE id = ?",
        (msgspec.json.encode(record), not record.has_ended, record.id),
    )


def _find(db: sqlite3.Connection, batch_id: str, tenant: str) -> BatchRecord:
    query = "SELECT record FROM batch WHERE id = ? AND tenant = ?"
    row = db.execute(query, (batch_id, tenant)).fetchone()
    if row is None:
        raise BatchNotFound(batch_id)
    return _DECODER.decode(row[0])


def _change(db: sqlite3.Connection, batch_id: str, **fields: object) -> BatchRecord:
    record = replace(_load(db, batch_id), **fields)
    _save(db, record)
    return record


def _drop_lines(db: sqlite3.Connection, batch_id: str) -> None:
    db.execute("DELETE FROM batch_line WHERE batch_id = ?", (batch_id,))


def _write_answers(
    db: sqlite3.Connection, batch_id: str, file: FileRecord, *, is_error: bool
) -> str | None:
    """Write the answers of this kind, in the order of the lines. The file's id; None if empty."""

    def answers() -> Iterator[bytes]:
        rows = db.execute(
            "SELECT answer FROM batch_line WHERE batch_id = ? AND is_error = ? ORDER BY number",
            (batch_id, is_error),
        )
        return (answer + b"\n" for (answer,) in rows)

    if next(answers(), None) is None:
        return None
    write_file(db, file, answers())
    return file.id


_DECODER = msgspec.json.Decoder(BatchRecord)


class BatchQueue:
    """Hands new batches from the routes to the batch runner, in order of arrival, and cancels
    running ones."""

    def __init__(self, batches: Batches) -> None:
        self.batches = batches
        self.arrivals: asyncio.Queue[BatchRecord] = asyncio.Queue()
        self._cancelled: dict[str, asyncio.Event] = {}  # by id, of the running batches

    async def submit(self, record: BatchRecord, forget_before: int) -> None:
        """Store a new batch and queue it. Raises `TooManyBatches`."""
        await self.batches.add(record, forget_before)
        self.arrivals.put_nowait(record)

    async def cancel(self, batch_id: str, tenant: str, now: int) -> BatchRecord:
        """End a batch early; its answered lines are kept. Raises `BatchNotFound`."""
        record = await self.batches.cancel(batch_id, tenant, now)
        if record.status == "cancelling" and batch_id in self._cancelled:
            self._cancelled[batch_id].set()
        return record

    def open(self, batch_id: str) -> asyncio.Event:
        """Mark a batch as running. The returned event is set when it is cancelled."""
        return self._cancelled.setdefault(batch_id, asyncio.Event())

    def close(self, batch_id: str) -> None:
        """The batch no longer runs."""
        self._cancelled.pop(batch_id, None)
