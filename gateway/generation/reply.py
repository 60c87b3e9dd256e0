"""Responses in one piece, errors included. Generation ends as soon as the client disconnects."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

import anyio
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from engine.errors import EngineError
from engine.ports import Clock
from gateway.access.callers import Caller
from gateway.access.retries import Attempt
from gateway.errors import error_headers, http_error
from gateway.generation.shared_work import SharedWork
from gateway.observe.explanation import phase_seconds, slowest
from gateway.service import Service

T = TypeVar("T")
logger = logging.getLogger(__name__)
JSON = "application/json"
Work = Callable[[], Coroutine[Any, Any, bytes]]
TIMING = b"x-podway-timing"  # with this request header, a response has timing headers


def json_response(body: bytes, caller: Caller, clock: Clock, status: int = 200) -> Response:
    """A JSON body with the headers that every response carries."""
    return Response(body, status, caller.headers(clock()), JSON)


def error_response(error: BaseException, caller: Caller, clock: Clock) -> Response:
    """The status, headers and body of an error, from the table in `gateway.errors`. Its code is
    the reason in the request log."""
    caller.note(http_error(error).code)
    headers = caller.headers(clock()) | error_headers(error)
    body = caller.dialect.error_body(error, caller.request_id)
    return Response(body, http_error(error).status, headers, JSON)


class Reply:
    """The ASGI response that is not streamed: `work` runs a group's requests to their end and
    returns the body; `abandon` ends them."""

    def __init__(
        self, caller: Caller, work: Work, abandon: Callable[[], None], service: Service
    ) -> None:
        self._caller = caller
        self._work = work
        self._abandon = abandon
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the body; if the client disconnects first, end the requests and send nothing."""
        work, abandon = self._work, self._abandon
        attempt: Attempt | None = scope.get("podway.attempt")
        if attempt is not None:
            if attempt.shared is None:
                attempt.share(SharedReply(work, abandon, self._service))
            assert isinstance(attempt.shared, SharedReply), "a retry has the same body"
            work, abandon = attempt.shared.result, _nothing
        spaces = _Spaces(self._caller, self._service, send)
        body = await unless_disconnected(receive, partial(spaces.before, work), abandon)
        if body is None:
            return
        if spaces.has_begun:
            await send({"type": "http.response.body", "body": body, "more_body": False})
            return
        response = json_response(body, self._caller, self._service.clock)
        if TIMING in dict(scope["headers"]):
            response.headers.update(self._timing())
        await response(scope, receive, send)

    def _timing(self) -> dict[str, str]:
        """Milliseconds of each phase of the slowest choice, one header for each."""
        caller, now = self._caller, self._service.clock()
        timelines = self._service.timelines.find(caller.request_id, caller.tenant)
        phases = phase_seconds(slowest(timelines, now), now)
        return {f"x-podway-{name}-ms": f"{seconds * 1e3:.1f}" for name, seconds in phases.items()}


class _Spaces:
    """Sends the status line and spaces before a body that is late, if `Pace.whole` is set."""

    def __init__(self, caller: Caller, service: Service, send: Send) -> None:
        self.has_begun = False
        self._caller = caller
        self._service = service
        self._send = send

    async def before(self, work: Work) -> bytes:
        """The work's body; once the status line is sent, an error is a body, too."""
        if not self._service.pace.whole:
            return await work()
        sending = asyncio.create_task(self._send_spaces())
        try:
            return await work()
        except Exception as error:
            if not self.has_begun:
                raise
            if not isinstance(error, EngineError):
                logger.exception("request %s", self._caller.request_id)
            self._caller.note(http_error(error).code)
            return self._caller.dialect.error_body(error, self._caller.request_id)
        finally:
            sending.cancel()
            await asyncio.wait((sending,))

    async def _send_spaces(self) -> None:
        caller, service = self._caller, self._service
        while True:
            await asyncio.sleep(service.pace.whole)
            if not self.has_begun:
                self.has_begun = True
                headers = json_response(b"", caller, service.clock).headers
                del headers["content-length"]
                await self._send(
                    {"type": "http.response.start", "status": 200, "headers": headers.raw}
                )
            await self._send({"type": "http.response.body", "body": b" ", "more_body": True})


class SharedReply(SharedWork[bytes]):
    """The work of a reply in flight, which retries can take over."""

    def __init__(self, work: Work, abandon: Callable[[], None], service: Service) -> None:
        super().__init__(work, abandon)
        self._service = service

    def response(self, caller: Caller, after: int = -1) -> ASGIApp:
        """The reply for another connection."""
        return Reply(caller, self.result, _nothing, self._service)


def _nothing() -> None:
    """The work ends with the last attempt that holds it."""


async def unless_disconnected(
    receive: Receive, work: Callable[[], Awaitable[T]], on_disconnect: Callable[[], None]
) -> T | None:
    """The result of `work`, or None if the client disconnected first.

    In that case `on_disconnect` has been called at once and the work cancelled. Errors of the
    work are raised as they are.
    """
    scope = anyio.CancelScope()

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        on_disconnect()
        scope.cancel()

    watching = asyncio.create_task(watch())
    try:
        with scope:
            return await work()
        return None
    finally:
        watching.cancel()
        await asyncio.wait((watching,))
