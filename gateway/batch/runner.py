"""Runner: takes batches to their end, from wherever they are, in what others leave of the engine.

A line is an order like that of a route, marked as background, and its answer is kept in the same
transaction as the counts. So whenever the process dies, what is answered stays answered, and the
next start goes on with the rest.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from engine.errors import (
    EngineError,
    InvalidRequest,
    Overloaded,
    StepFailed,
    Unavailable,
    WorkerLost,
)
from gateway.access.callers import Caller
from gateway.batch.lines import (
    LineLimits,
    LineReader,
    answer_line,
    expired_line,
    request_id,
    tokens_of,
)
from gateway.errors import PathNotFound, StoreFailed, verdict
from gateway.generation.choices import ChoiceGroup
from gateway.generation.reply import generate_body
from gateway.schema.dialect import OPENAI
from gateway.store.batches import BatchLine, BatchRecord, LineAnswer
from gateway.store.files import FileRecord

if TYPE_CHECKING:
    from gateway.generation.plan import GenerationPlan
    from gateway.service import Service


logger = logging.getLogger(__name__)

Endpoint = Callable[[bytes, Caller, "Service"], Awaitable["GenerationPlan"]]  # body to plan
ATTEMPTS = 3  # at a line that the engine lost
RETRY_SECONDS = 1.0  # while there is no worker
OUTPUT_SECONDS = 30 * 86_400  # that output files are kept, unless the batch says otherwise


@dataclass(frozen=True, slots=True)
class BatchRunner:
    """Runs all batches at the same time, with at most `seats` lines in the engine."""

    service: "Service"
    endpoints: Mapping[str, Endpoint]
    seats: int
    limits: LineLimits = field(default_factory=LineLimits)

    async def run(self) -> None:
        """Go on with what a former process has left, then with what arrives, until cancelled."""
        desk = self.service.store.desk
        seats = asyncio.Semaphore(self.seats)
        async with asyncio.TaskGroup() as group:
            for record in await desk.batches.live():
                group.create_task(_Run(self, record, seats).to_the_end())
            while True:
                record = await desk.arrivals.get()
                group.create_task(_Run(self, record, seats).to_the_end())


class _Run:
    """One batch. Seats are taken in turn, so that a long batch does not hold up a short one."""

    def __init__(self, runner: BatchRunner, record: BatchRecord, seats: asyncio.Semaphore) -> None:
        self._record = record
        self._seats = seats
        self._num_seats = runner.seats
        self._reading = asyncio.Lock()
        self._last_number = 0  # of the lines that were begun
        self._limits = runner.limits
        self._service = runner.service
        self._plan = runner.endpoints.get(record.endpoint, _no_endpoint)
        self._batches = runner.service.store.desk.batches

    async def to_the_end(self) -> None:
        """Whatever is left to do. A store that fails leaves the batch to the next start."""
        desk, batch_id = self._service.store.desk, self._record.id
        told = desk.take(batch_id)
        try:
            if self._record.status == "validating":
                await self._validate()
            if self._record.status == "in_progress":
                await self._work(told)
            if not self._record.has_ended:
                await self._finish()
        except StoreFailed as error:
            logger.error("batch %s rests until the next start: %s", batch_id, error)
        else:
            record = self._record
            logger.info(
                "batch %s %s lines=%d completed=%d failed=%d",
                *(batch_id, record.status, record.num_lines),
                *(record.num_completed, record.num_failed),
            )
        finally:
            desk.put_down(batch_id)

    async def _validate(self) -> None:
        """Read the whole input file; a batch with anything wrong in it fails."""
        record, reader = self._record, LineReader(self._record.endpoint, self._limits)
        await self._batches.forget_lines(record.id)
        number = 0
        while (piece := await self._batches.piece(record.input_file_id, number)) is not None:
            await self._take(reader, partial(reader.feed, piece))
            number += 1
            if reader.has_given_up:
                break
        await self._take(reader, reader.finish)
        reader.conclude()
        now = self._service.unix_now()
        if reader.errors:
            self._record = await self._batches.fail(record.id, now, tuple(reader.errors))
        else:
            self._record = await self._batches.begin(record.id, now, reader.num_lines, reader.model)

    async def _take(self, reader: LineReader, read: Callable[[], Iterable[BatchLine]]) -> None:
        for line in await self._batches.add_lines(self._record.id, read):
            reader.refuse_double(line)

    async def _work(self, told: asyncio.Event) -> None:
        """Answer all lines, unless somebody cancels the batch or its time is over before."""
        record = self._record
        working = asyncio.create_task(self._answer_all())
        telling = asyncio.create_task(told.wait())
        seconds = max(0, record.expires_at - self._service.unix_now())
        try:
            await asyncio.wait(
                (working, telling), timeout=seconds, return_when=asyncio.FIRST_COMPLETED
            )
            is_done = working.done()
        finally:
            for task in (working, telling):
                task.cancel()
            await asyncio.wait((working, telling))
        if is_done:
            working.result()
        is_late = not (is_done or told.is_set())
        now = self._service.unix_now()
        self._record = await self._batches.wind_up(record.id, now, is_late=is_late)

    async def _answer_all(self) -> None:
        """Every line that has no answer, in order, as seats become free."""
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(self._num_seats, self._record.num_lines)):
                    group.create_task(self._answer_next())
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from failed

    async def _answer_next(self) -> None:
        """One line after the other, each in a seat of its own, until there are no more."""
        while True:
            async with self._seats:
                line = await self._next_line()
                if line is None:
                    return
                await self._keep_answer(line)

    async def _next_line(self) -> BatchLine | None:
        async with self._reading:
            lines = await self._batches.unanswered(self._record.id, self._last_number, 1)
            self._last_number = lines[0].number if lines else self._last_number
        return lines[0] if lines else None

    async def _keep_answer(self, line: BatchLine) -> None:
        record = self._record
        try:
            body = await self._answer(line)
        except EngineError as error:
            answer = _failed(record, line, error)
        except Exception as error:  # a doorway: our bug in one line is no other line's end
            logger.exception("batch %s line %d", record.id, line.number)
            answer = _failed(record, line, error)
        else:
            text = answer_line(record, line, 200, body)
            answer = LineAnswer(line.number, text, is_error=False, tokens=tokens_of(body))
        await self._batches.answer(record.id, answer)

    async def _answer(self, line: BatchLine) -> bytes:
        """The body of its response. A full queue is waited for, and a lost worker; what is lost
        in the engine is tried again."""
        num_lost = 0
        while True:
            try:
                return await self._ask(line)
            except Overloaded as error:
                await asyncio.sleep(error.retry_after)
            except Unavailable:
                await asyncio.sleep(RETRY_SECONDS)
            except (StepFailed, WorkerLost):
                num_lost += 1
                if num_lost == ATTEMPTS:
                    raise

    async def _ask(self, line: BatchLine) -> bytes:
        service = self._service
        caller = Caller(request_id(self._record, line), service.clock(), self._record.tenant)
        plan = await self._plan(line.body, caller, service)
        if plan.is_stream:
            raise InvalidRequest("'stream' is not supported in a batch.", "stream")
        plan = replace(plan, scheduling=plan.scheduling._replace(is_background=True))
        return await generate_body(plan, ChoiceGroup(plan, service))

    async def _finish(self) -> None:
        """Write down what there is."""
        record = self._record
        files = (self._file("output"), self._file("errors"))
        late = partial(expired_line, record)
        now = self._service.unix_now()
        self._record = await self._batches.finish(record.id, now, files, late)

    def _file(self, what: str) -> FileRecord:
        record, service = self._record, self._service
        now = service.unix_now()
        return FileRecord(
            id=service.new_id("file-"),
            tenant=record.tenant,
            filename=f"{record.id}_{what}.jsonl",
            purpose="batch_output",
            num_bytes=0,
            created_at=now,
            expires_at=now + (record.output_seconds or OUTPUT_SECONDS),
        )


async def _no_endpoint(body: bytes, caller: Caller, service: "Service") -> "GenerationPlan":
    raise PathNotFound("This server does not have the endpoint of the batch any more.")


def _failed(record: BatchRecord, line: BatchLine, error: Exception) -> LineAnswer:
    text = answer_line(record, line, verdict(error).status, OPENAI.error_body(error, ""))
    return LineAnswer(line.number, text, is_error=True)
