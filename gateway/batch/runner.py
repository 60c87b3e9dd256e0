"""BatchRunner: runs batches as background requests, and resumes them after a restart.

Each line becomes the same plan as in its route, marked as background. Its answer and
the batch's counts are stored in one transaction, so after a crash the answered lines stay answered
and the next start runs the others.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

from engine.errors import (
    EngineError,
    InvalidRequest,
    Overloaded,
    StepFailed,
    Unavailable,
    WorkerLost,
)
from gateway.access.callers import Caller
from gateway.access.key_file import Key
from gateway.batch.lines import (
    LineLimits,
    LineReader,
    answer_line,
    expired_line,
    request_id,
    tokens_of,
)
from gateway.errors import InvalidApiKey, PathNotFound, StoreFailed, StoreOutOfSpace, http_error
from gateway.generation.plan import GenerationPlan
from gateway.observe.request_log import RequestRecord
from gateway.pooling.group import Plan, body_of
from gateway.schema.dialect import OPENAI
from gateway.service import Service
from gateway.store.batch_records import BatchLine, BatchRecord, LineAnswer
from gateway.store.files import FileRecord

logger = logging.getLogger(__name__)

Endpoint = Callable[[bytes, Caller, "Service"], Awaitable[Plan]]  # body to plan
ATTEMPTS = 3  # at a line whose step or worker failed
RETRY_SECONDS = 1.0  # between attempts while there is no worker
OUTPUT_SECONDS = 30 * 86_400  # lifetime of output files, unless the batch sets another


@dataclass(frozen=True, slots=True)
class BatchRunner:
    """Runs all batches concurrently, with at most `max_lines` lines in the engine."""

    service: Service
    endpoints: Mapping[str, Endpoint]
    max_lines: int
    limits: LineLimits = field(default_factory=LineLimits)
    ending: asyncio.Event = field(default_factory=asyncio.Event)  # once set, no line begins
    running: set[str] = field(default_factory=set)  # ids of the batches that run

    async def run(self) -> None:
        """Resume the batches that have not ended, then run new ones, until cancelled; or until
        `ending` is set and the lines that run then are answered."""
        slots = asyncio.Semaphore(self.max_lines)
        await self.resume()
        async with asyncio.TaskGroup() as group:
            while (record := await self._next_arrival()) is not None:
                if record.id not in self.running:
                    self.running.add(record.id)
                    task = group.create_task(_Run(self, record, slots).run())
                    task.add_done_callback(partial(self._ended, record.id))

    async def resume(self) -> None:
        """Run the batches that have not ended; also those that another server has accepted."""
        queue = self.service.store.batch_queue
        for record in await queue.batches.live():
            queue.arrivals.put_nowait(record)

    def _ended(self, batch_id: str, task: asyncio.Task[None]) -> None:
        self.running.discard(batch_id)

    async def _next_arrival(self) -> BatchRecord | None:
        """The next new batch; None once `ending` is set."""
        arriving = asyncio.create_task(self.service.store.batch_queue.arrivals.get())
        ending = asyncio.create_task(self.ending.wait())
        try:
            await asyncio.wait((arriving, ending), return_when=asyncio.FIRST_COMPLETED)
            return None if ending.done() else arriving.result()
        finally:
            arriving.cancel()
            ending.cancel()


class _Run:
    """One batch. `slots` is shared and FIFO, so that a long batch does not block a short one."""

    def __init__(self, runner: BatchRunner, record: BatchRecord, slots: asyncio.Semaphore) -> None:
        self._record = record
        self._slots = slots
        self._max_lines = runner.max_lines
        self._reading = asyncio.Lock()
        self._last_number = 0  # the last line that was started
        self._limits = runner.limits
        self._ending = runner.ending
        self._answering: set[asyncio.Task[None]] = set()  # tasks that answer lines
        self._service = runner.service
        self._plan = runner.endpoints.get(record.endpoint, _no_endpoint)
        self._batches = runner.service.store.batch_queue.batches

    async def run(self) -> None:
        """Run the batch to its end, unless it has ended since it was read. If the store fails, the
        next start resumes it."""
        queue, batch_id = self._service.store.batch_queue, self._record.id
        cancelled = queue.open(batch_id)
        try:
            self._record = await self._batches.find(batch_id, self._record.tenant)
            while not (self._record.has_ended or self._ending.is_set()):
                try:
                    await self._advance(cancelled)
                except StoreOutOfSpace:
                    await self._batches.wait_for_room()
        except StoreFailed as error:
            logger.error("batch %s stops until the next start: %s", batch_id, error)
        else:
            if (record := self._record).has_ended:
                logger.info(
                    "batch %s %s lines=%d completed=%d failed=%d",
                    *(batch_id, record.status, record.num_lines),
                    *(record.num_completed, record.num_failed),
                )
        finally:
            queue.close(batch_id)

    async def _advance(self, cancelled: asyncio.Event) -> None:
        """Go on from the batch's current status."""
        if self._record.status == "validating":
            await self._validate()
        if self._record.status == "in_progress":
            await self._work(cancelled)
        if not (self._record.has_ended or self._ending.is_set()):
            await self._finish()

    async def _validate(self) -> None:
        """Read the whole input file; any error fails the batch."""
        record, reader = self._record, LineReader(self._record.endpoint, self._limits)
        await self._batches.forget_lines(record.id)
        number = 0
        while (piece := await self._batches.piece(record.input_file_id, number)) is not None:
            await self._add_lines(reader, partial(reader.feed, piece))
            number += 1
            if reader.has_stopped:
                break
        await self._add_lines(reader, reader.finish)
        reader.check()
        now = self._service.unix_now()
        if reader.errors:
            self._record = await self._batches.fail(record.id, now, tuple(reader.errors))
        else:
            self._record = await self._batches.begin(record.id, now, reader.num_lines, reader.model)

    async def _add_lines(self, reader: LineReader, read: Callable[[], Iterable[BatchLine]]) -> None:
        for line in await self._batches.add_lines(self._record.id, read):
            reader.reject_duplicate(line)

    async def _work(self, cancelled: asyncio.Event) -> None:
        """Answer all lines, until the batch is cancelled or its time is over."""
        record = self._record
        self._last_number = 0
        working = asyncio.create_task(self._answer_all())
        cancelling = asyncio.create_task(cancelled.wait())
        ending = asyncio.create_task(self._ending.wait())
        seconds = max(0, record.expires_at - self._service.unix_now())
        try:
            await asyncio.wait(
                (working, cancelling, ending), timeout=seconds, return_when=asyncio.FIRST_COMPLETED
            )
            is_done = working.done()
            if ending.done() and self._answering:
                await asyncio.wait(self._answering)
        finally:
            for task in (working, cancelling, ending):
                task.cancel()
            await asyncio.wait((working, cancelling, ending))
        if is_done:
            working.result()
        if self._ending.is_set():
            return  # the next server goes on
        is_late = not (is_done or cancelled.is_set())
        now = self._service.unix_now()
        self._record = await self._batches.wind_up(record.id, now, is_late=is_late)

    async def _answer_all(self) -> None:
        """Answer every line without an answer, in order, as slots become free, until `ending`."""
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(self._max_lines, self._record.num_lines)):
                    group.create_task(self._answer_next())
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from failed

    async def _answer_next(self) -> None:
        """Answer one line after the other, taking a slot for each, until there are no more."""
        while True:
            await self._wait_for_quota()
            async with self._slots:
                line = await self._next_line()
                if line is None:
                    return
                await self._batches.wait_for_room()
                if self._ending.is_set():
                    return
                answering = asyncio.create_task(self._store_answer(line))
                self._answering.add(answering)
                answering.add_done_callback(self._answering.discard)
                await answering

    async def _wait_for_quota(self) -> None:
        quotas, clock = self._service.quotas, self._service.clock
        while (key := self._key) and (delay := quotas.line_delay(key, clock())) > 0:  # noqa: ASYNC110 # a duration
            await asyncio.sleep(delay)

    async def _next_line(self) -> BatchLine | None:
        async with self._reading:
            line = await self._batches.unanswered(self._record.id, self._last_number)
            self._last_number = line.number if line else self._last_number
        return line

    async def _store_answer(self, line: BatchLine) -> None:
        answer = await self._line_answer(line)
        while True:
            try:
                await self._batches.answer(self._record.id, answer)
            except StoreOutOfSpace:
                await self._batches.wait_for_room()
            else:
                return

    async def _line_answer(self, line: BatchLine) -> LineAnswer:
        """The line's response or error, with an entry in the request log."""
        record = self._record
        with self._logged(line) as entry:
            try:
                body = await self._answer(line)
            except Exception as error:  # an error or a bug in one line must not end the others
                if not isinstance(error, EngineError):
                    logger.exception("batch %s line %d", record.id, line.number)
                row = http_error(error)
                entry.status, entry.reason = row.status, row.code
                body = OPENAI.error_body(error, "")
                text = answer_line(record, line, row.status, body)
                return LineAnswer(line.number, text, is_error=True)
            entry.status = 200
            text = answer_line(record, line, 200, body)
            return LineAnswer(line.number, text, is_error=False, tokens=tokens_of(body))

    @contextmanager
    def _logged(self, line: BatchLine) -> Iterator[RequestRecord]:
        record, log = self._record, self._service.request_log
        entry = RequestRecord(
            request_id(record, line),
            self._service.clock(),
            method="BATCH",
            path=record.endpoint,
            route=record.endpoint,
            key=record.tenant,
        )
        log.watch(entry)
        try:
            yield entry
        except asyncio.CancelledError:
            entry.reason = "batch_stopped"
            raise
        finally:
            log.close(entry)

    async def _answer(self, line: BatchLine) -> bytes:
        """The body of its response. Retries while the queue is full or there is no worker, and up
        to `ATTEMPTS` times after a failed step."""
        num_failures = 0
        while True:
            try:
                return await self._generate(line)
            except Overloaded as error:
                await asyncio.sleep(error.retry_after)
            except Unavailable:
                await asyncio.sleep(RETRY_SECONDS)
            except (StepFailed, WorkerLost):
                num_failures += 1
                if num_failures == ATTEMPTS:
                    raise

    async def _generate(self, line: BatchLine) -> bytes:
        service = self._service
        if (key := self._key) is None:
            raise InvalidApiKey("The API key of this batch no longer exists.")
        caller = Caller(request_id(self._record, line), service.clock()).authenticated(key)
        async with service.at_model_of(line.body) as serving:
            plan = await self._plan(line.body, caller, serving)
            if isinstance(plan, GenerationPlan) and plan.is_stream:
                raise InvalidRequest("'stream' is not supported in a batch.", "stream")
            if isinstance(plan, GenerationPlan) and plan.background is not None:
                raise InvalidRequest("'background' is not supported in a batch.", "background")
            plan = replace(plan, scheduling=plan.scheduling._replace(is_background=True))
            return await body_of(plan, serving)

    @property
    def _key(self) -> Key | None:
        """The batch's API key; None if it was revoked: then no further line is generated."""
        return self._service.keys.named(self._record.tenant)

    async def _finish(self) -> None:
        """Write the output files and end the batch."""
        record = self._record
        files = (self._file("output"), self._file("errors"))
        late = partial(expired_line, record)
        now = self._service.unix_now()
        self._record = await self._batches.finish(record.id, now, files, late)

    def _file(self, kind: str) -> FileRecord:
        record, service = self._record, self._service
        now = service.unix_now()
        return FileRecord(
            id=service.new_id("file-"),
            tenant=record.tenant,
            filename=f"{record.id}_{kind}.jsonl",
            purpose="batch_output",
            num_bytes=0,
            created_at=now,
            expires_at=now + (record.output_seconds or OUTPUT_SECONDS),
        )


async def _no_endpoint(body: bytes, caller: Caller, service: Service) -> Plan:
    raise PathNotFound("This server no longer has the endpoint of this batch.")
