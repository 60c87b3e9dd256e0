"""HeldStream: a stream whose events are generated apart from connections, into a ring.

    plan ──generate_events──▶ EventRing ──▶ any number of `HeldResponse`s

A stream is held if its request asks for it (`background`, or the header `x-conversation-id`): then
it goes on while no client listens. And one with an idempotency key is held, so that a retry can
read it from the start; it ends when the last attempt's client leaves, as all other streams do.

Its tokens are rendered one by one, however they arrive: so the same request with the same seed has
the same events. Pings are part of the ring, without a number.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from starlette.types import ASGIApp, Receive, Scope, Send

from engine.errors import EngineError, Overloaded, RequestCancelled, Unavailable
from engine.request import Abort
from gateway.access.callers import Caller
from gateway.errors import EventsEvicted
from gateway.generation.choices import ChoiceGroup, generate_events
from gateway.generation.event_stream import send_error, stream_start
from gateway.generation.plan import GenerationPlan
from gateway.generation.reply import error_response, json_response, unless_disconnected
from gateway.generation.shared_work import SharedWork
from gateway.generation.stream_journal import JournalEntry
from gateway.schema.rendering import PING, EventNumbers, split_events
from gateway.service import Service
from gateway.store.event_ring import EventRing

logger = logging.getLogger(__name__)
RETRY_SECONDS = 1.0  # until a stream of a former server is tried again


class EndedStream:
    """The events of a stream that has ended, and what all held streams have in common: clients read
    it, and the journal may have it."""

    def __init__(
        self, service: Service, ring: EventRing, created_at: int, entry: JournalEntry | None = None
    ) -> None:
        self.ring = ring
        self.created_at = created_at
        self.is_kept = True
        self.rejection: EngineError | None = None  # if it failed before its first event
        self.group: ChoiceGroup | None = None  # while it runs
        self._service = service
        self._entry = entry
        self._num_readers = 0
        self._is_counted = False  # among the running requests of its key

    def restore(self, events: bytes) -> None:
        """Take the numbered events of a stream that ended in a former process."""
        for event in split_events(events):
            add = self.ring.append_comment if event.startswith(b":") else self.ring.append
            add(event)
        self.ring.complete()

    def cancel(self) -> None:
        """It has ended."""

    async def forget(self) -> None:
        """Remove it from the journal."""
        if self._entry is not None:
            await self._entry.remove()

    async def finished(self) -> None:
        """It has ended."""

    async def stop(self) -> None:
        """It has ended."""

    def response(self, caller: Caller, after: int = -1) -> ASGIApp:
        return HeldResponse(self, self._service, caller, after=after)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """While a client reads, its connection is counted among the running requests of the key;
        otherwise the stream itself is, as long as it runs."""
        self._num_readers += 1
        self._count()
        try:
            yield
        finally:
            self._num_readers -= 1
            self._count()

    def _count(self) -> None:
        counts = not self._num_readers and not self.ring.is_complete
        if counts != self._is_counted:
            self._is_counted = counts
            self._service.quotas.add_running(self.ring.tenant, 1 if counts else -1)


class HeldStream(EndedStream):
    """A stream that is generated."""

    def __init__(
        self,
        plan: GenerationPlan,
        service: Service,
        ring: EventRing,
        on_end: "Callable[[HeldStream], None]",
        *,
        is_kept: bool,
        entry: JournalEntry | None = None,
    ) -> None:
        super().__init__(service, ring, service.unix_now(), entry)
        self.is_kept = is_kept
        self.accepted = asyncio.Event()  # also set if it was rejected
        self._on_end = on_end
        self._cancellation: EngineError | None = None
        self._numbers = EventNumbers()
        plan = replace(plan, is_held=True)
        if entry is not None:
            plan = replace(plan, tokenize=partial(entry.tokenize, plan))
        work = partial(service.group.leases.holding, partial(self._run, plan))
        self._work = SharedWork(work, self._abandon, is_kept=is_kept)
        self._work.task.add_done_callback(self._end)
        self._count()

    def hold(self) -> None:
        self._work.hold()

    def release(self) -> None:
        self._work.release()

    def cancel(self) -> None:
        """End it; its readers get an error as the last event."""
        self._cancellation = RequestCancelled("This stream was cancelled.")
        self._work.end()

    async def finished(self) -> None:
        """Wait for its end."""
        await asyncio.wait((self._work.task,))

    async def forget(self) -> None:
        await self.finished()
        await super().forget()

    async def stop(self) -> None:
        """End it as if the server had been killed."""
        self._work.end()
        await self.finished()

    def _abandon(self) -> None:
        if self.group is not None:
            self.group.close(Abort.CLIENT_GONE)

    def _end(self, task: asyncio.Task[None]) -> None:
        """Also if it was cancelled before its first step."""
        self.group = None
        self.ring.complete()
        self.accepted.set()
        self._count()
        self._on_end(self)

    async def _run(self, plan: GenerationPlan) -> None:
        pinging = asyncio.create_task(self._ping(plan))
        try:
            await self._finish(await self._generate(plan))
        except EngineError as error:
            await self._fail(plan, error)
        except asyncio.CancelledError:
            if self._cancellation is None:
                raise  # nobody listens any more
            await self._fail(plan, self._cancellation)
        except Exception as error:  # a bug in one stream must not end the server
            logger.exception("stream of %s", plan.caller.request_id)
            await self._fail(plan, error)
        finally:
            pinging.cancel()

    async def _generate(self, plan: GenerationPlan) -> bytes:
        """The last events. A stream that a former server had accepted waits for its place."""
        while True:
            self.group = ChoiceGroup(plan, self._service)
            try:
                return await generate_events(plan, self.group, self._add, self.accepted.set)
            except (Overloaded, Unavailable) as error:
                was_accepted = self._entry is not None and self._entry.is_known
                if not was_accepted or self.ring.num_events or self._service.engine.is_draining:
                    raise
                await asyncio.sleep(error.retry_after or RETRY_SECONDS)

    async def _add(self, events: bytes) -> None:
        for event in split_events(events):
            self.ring.append(self._numbers.numbered(event))

    async def _finish(self, last_events: bytes) -> None:
        """Add the last events, which are in the journal before a client can read them."""
        whole = self.ring.whole()
        numbered = [self._numbers.numbered(event) for event in split_events(last_events)]
        if self._entry is not None:
            await self._entry.end(None if whole is None else whole + b"".join(numbered))
        for event in numbered:
            self.ring.append(event)

    async def _fail(self, plan: GenerationPlan, error: Exception) -> None:
        if not self.ring.num_events and isinstance(error, EngineError):
            self.rejection = error
            await EndedStream.forget(self)
            await self._add(plan.renderer.failure(error))
            return
        if isinstance(error, Unavailable) and self._entry is not None:
            await self._add(plan.renderer.failure(error))  # the next server goes on with it
            return
        await self._finish(plan.renderer.failure(error))
        if plan.background is not None:
            await plan.background.on_failure()

    async def _ping(self, plan: GenerationPlan) -> None:
        """Add a ping per `Pace.ping` without an event."""
        seconds = self._service.pace.ping
        while True:
            end = self.ring.end
            await asyncio.sleep(seconds)
            if self.ring.end == end:
                ping = plan.renderer.ping if self.group is None else self.group.ping
                self.ring.append_comment(ping)


def held_under(
    names: Sequence[str], plan: GenerationPlan, service: Service, entry: JournalEntry | None
) -> HeldStream:
    """Generate a plan's events into a new ring, which is found by these names. Without names the
    stream is not kept."""
    held = service.store.held
    ring = held.open(plan.caller.tenant, names)
    stream = HeldStream(plan, service, ring, held.ended, is_kept=bool(names), entry=entry)
    held.add(stream, names)
    return stream


class HeldResponse:
    """The ASGI response that reads a held stream: after event `after`, or from a byte offset on."""

    def __init__(
        self,
        stream: EndedStream,
        service: Service,
        caller: Caller,
        *,
        after: int = -1,
        offset: int | None = None,
    ) -> None:
        self._stream = stream
        self._service = service
        self._caller = caller
        self._after = after
        self._offset = offset

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Return when the stream has ended, or the client leaves or does not read."""
        write: Send = scope["podway.send"]
        with self._stream.reading():
            await unless_disconnected(receive, partial(self._send_all, send, write), lambda: None)

    async def _send_all(self, send: Send, write: Send) -> None:
        ring, pace = self._stream.ring, self._service.pace
        try:
            offset = await self._position(pace.hold)
            if self._stream.rejection is not None:
                raise self._stream.rejection
        except EngineError as rejection:
            await send_error(rejection, self._caller, self._service.clock, send)
            return
        await send(stream_start(self._caller, self._service.clock))
        try:
            while offset is None:
                offset = await self._position(pace.ping)
                if offset is None:
                    await self._write(PING, write)
            while await ring.wait(offset):
                piece = ring.read(offset)
                offset += len(piece)
                await self._write(piece, write)
        except TimeoutError:
            return  # the client does not read
        except EventsEvicted as evicted:
            await self._write(self._caller.dialect.error_event(evicted, ""), write)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _position(self, seconds: float) -> int | None:
        """The offset of the first byte to send, if there is one within `seconds`. Raises
        `EventsEvicted`."""
        ring = self._stream.ring
        try:
            async with asyncio.timeout(seconds):
                offset = self._offset
                if offset is None:
                    offset = await ring.offset_after(self._after)
                ring.read(offset)  # whether it is held
                await ring.wait(offset)
        except TimeoutError:
            return None
        return offset

    async def _write(self, piece: bytes, write: Send) -> None:
        async with asyncio.timeout(self._service.pace.stall):
            await write({"type": "http.response.body", "body": piece, "more_body": True})


class AcceptedResponse:
    """The ASGI response of a background response that is not streamed: the object as it is once
    the engine has accepted it."""

    def __init__(self, stream: HeldStream, plan: GenerationPlan, service: Service) -> None:
        self._stream = stream
        self._plan = plan
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The client may leave: the response goes on."""
        caller, clock = self._plan.caller, self._service.clock
        await self._stream.accepted.wait()
        if (error := self._stream.rejection) is not None:
            response = error_response(error, caller, clock)
        else:
            assert self._plan.background is not None, "only such plans are answered so"
            response = json_response(self._plan.background.snapshot(), caller, clock)
        await response(scope, receive, send)
