"""Middleware: request ids, API keys, rate limits and retries.

    IdentifyCaller ─▶ (CORS) ─▶ AccessControl ─▶ routes

`IdentifyCaller` puts the server's own `send` into the scope (`podway.send`): a stream writes its
events there directly, because middleware reads the status line and the last message only.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from weakref import WeakValueDictionary

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.errors import EngineError
from engine.ports import Clock
from gateway.access.callers import Caller, header_of, valid_request_id
from gateway.access.intake import Intake
from gateway.access.key_file import Key
from gateway.access.keys import is_basic
from gateway.access.networks import network_of
from gateway.access.retries import Attempt
from gateway.errors import Forbidden, InvalidApiKey, Superseded, http_error
from gateway.generation.reply import error_response
from gateway.generation.threads import thread_meter
from gateway.observe.request_log import RequestRecord, trace_id_of
from gateway.schema.decoding import HEADER, UnknownFields
from gateway.service import Service
from gateway.store.database import store_meter
from gateway.web.route import Access, Route, RouteTable

CANCELS = "/cancel"  # the end of the paths of cancellations
EXPOSED = (
    "x-request-id",
    "openai-processing-ms",
    "retry-after",
    "retry-after-ms",
    "x-should-retry",
    "x-ratelimit-limit-requests",
    "x-ratelimit-remaining-requests",
    "x-ratelimit-reset-requests",
    "x-ratelimit-limit-tokens",
    "x-ratelimit-remaining-tokens",
    "x-ratelimit-reset-tokens",
    HEADER,
)


class IdentifyCaller:
    """The outermost app: gives every HTTP request an id and a `Caller`."""

    def __init__(self, app: ASGIApp, service: Service, routes: RouteTable) -> None:
        self._service = service
        self._routes = routes
        intake = partial(
            Intake,
            service.clock,
            service.cpu_clock,
            # Requests that wait when the server begins to drain get its 503 at once.
            lambda: service.groups.is_generating and not service.groups.is_draining,
            lambda: service.watch.is_busy,
        )
        self._intake = intake()
        # Probes and cancellations wait for those of their own client only.
        self._urgent_intake = intake(max_debt=0.0)
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._app: ASGIApp = AccessControl(app, service)
        if service.origins.cors_origins:
            self._app = CORSMiddleware(
                self._app,
                allow_origins=service.origins.cors_origins,
                allow_methods=("GET", "POST", "DELETE"),
                allow_headers=("*",),
                expose_headers=EXPOSED,
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = self._identify(scope)
        scope["podway.send"] = send
        progress = scope["podway.progress"] = _Progress(send, record)
        intake, client = self._intake_of(scope, record), scope["podway.caller"].network
        turn = self._turns.setdefault(client, asyncio.Lock())
        thread_meter.set(ThreadWork(intake, turn, client))
        store_meter.set(partial(intake.charge_piece, client=client))
        if "podway.upgrade" in scope:
            scope["podway.app"] = self  # serves each message of the WebSocket as a request
            scope["podway.turn_of_loop"] = partial(intake.next_turn, client)
        try:
            await intake.enter(client)
            work = self._app(scope, intake.gated(receive, client), progress.send)
            await intake.metered(work, record, client)
        finally:
            # They refer back to the scope
            for name in ("podway.send", "podway.progress", "podway.chunks", "podway.upgrade"):
                scope.pop(name, None)
            if rejection := scope.get("podway.rejection"):  # by the connection
                record.status, record.reason = rejection
            self._service.request_log.close(record)
            if not progress.is_complete and (record.num_running or record.prompt_tokens):
                intake.abandoned(client)

    def _intake_of(self, scope: Scope, record: RequestRecord) -> Intake:
        is_urgent = record.is_probe or scope["path"].endswith(CANCELS)
        return self._urgent_intake if is_urgent else self._intake

    def _identify(self, scope: Scope) -> RequestRecord:
        """Set the scope's `Route`, if any, and `Caller`; returns its entry in the request log."""
        service, now = self._service, self._service.clock()
        given_id = header_of(scope, b"x-request-id")
        request_id = valid_request_id(given_id) or f"req_{service.random.getrandbits(128):032x}"
        client = (scope.get("client") or ("-",))[0]
        record = RequestRecord(request_id, now, scope["method"], scope["path"], client)
        record.trace_id = trace_id_of(header_of(scope, b"traceparent"))
        route = scope["podway.route"] = self._routes.find(scope["method"], scope["path"])
        if route is not None:
            record.route, record.is_probe = route.path, route.is_probe
        scope["podway.caller"] = Caller(
            request_id,
            now,
            dialect=self._routes.dialect_of(scope["path"]),
            unknown_fields=UnknownFields(rejects_all=service.rejects_unknown_fields),
            record=record,
            turn=scope.get("podway.turn"),
            network=network_of(client),
        )
        if service.traces is not None and (parent := header_of(scope, b"traceparent")):
            service.traces.begin(request_id, parent)
        return record


@dataclass(frozen=True, slots=True)
class ThreadWork:
    """What one request does in threads: a `ThreadMeter`. `turn` is its client's, which does one
    thing at a time."""

    intake: Intake
    turn: asyncio.Lock
    client: str

    @property
    def cpu_clock(self) -> Clock:
        return self.intake.cpu_clock

    async def begin(self, *, is_new: bool) -> None:
        await self.turn.acquire()
        try:
            if is_new:
                await self.intake.enter(self.client)
        except BaseException:
            self.turn.release()
            raise

    def end(self, seconds: float, *, in_one_piece: bool) -> None:
        charge = self.intake.charge_piece if in_one_piece else self.intake.charge
        charge(seconds, self.client)
        self.turn.release()

    async def pause(self) -> None:
        await self.intake.next_turn(self.client)


class AccessControl:
    """Checks the API key and its limits, and lets a retry supersede the earlier attempt."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route: Route | None = scope.get("podway.route")
        if scope["type"] != "http" or (route is not None and route.access is Access.OPEN):
            await self._app(scope, receive, send)
            return
        service = self._service
        caller: Caller = scope["podway.caller"]
        is_metered = route is None or route.is_metered
        try:
            key = self._key_of(scope)
            caller = caller.authenticated(key)  # the log names it also if it is refused
            self._check_rights(scope, route, key)
            if caller.record is not None:
                service.request_log.watch(caller.record)
            if is_metered:
                caller = replace(caller, limits=service.quotas.enter(key, service.clock()))
        except EngineError as error:
            response = error_response(error, caller, service.clock)
            if isinstance(error, InvalidApiKey) and route is not None and route.asks_browser:
                response.headers["www-authenticate"] = 'Basic realm="an API key as the password"'
            await response(scope, receive, send)
            return
        scope["podway.caller"] = caller
        if not is_metered:
            await self._app(scope, receive, send)
            return
        try:
            await self._serve(scope, receive, send)
        finally:
            service.quotas.leave(key)

    def _key_of(self, scope: Scope) -> Key:
        """The request's API key. Raises `InvalidApiKey`."""
        authorization = header_of(scope, b"authorization")
        return self._service.keys.key_of(authorization, header_of(scope, b"x-api-key"))

    def _check_rights(self, scope: Scope, route: Route | None, key: Key) -> None:
        """Raises `Forbidden`."""
        service = self._service
        if service.keys.is_open or is_basic(header_of(scope, b"authorization")):
            service.origins.check(scope)
        if route is not None and route.access is Access.ADMIN:
            if service.keys.is_open:
                service.origins.check_admin(scope)
            elif not key.is_admin:
                path = "/admin/" if scope["path"].startswith("/admin/") else scope["path"]
                raise Forbidden(
                    f"The API key {key.name!r} may not use {path}; it needs an admin key."
                )

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request. If a newer attempt with its idempotency key supersedes it, it ends with
        an error."""
        attempt = self._service.retries.begin(scope, receive)
        if attempt is None:
            await self._app(scope, receive, send)
            return
        scope["podway.attempt"] = attempt
        with attempt:
            await self._app(scope, attempt.receive, send)
            if attempt.is_superseded:
                await self._end_superseded(attempt, scope, send)

    async def _end_superseded(self, attempt: Attempt, scope: Scope, send: Send) -> None:
        """End the response that the app left open; its connection may still be alive."""
        caller: Caller = scope["podway.caller"]
        response: _Progress = scope["podway.progress"]
        error = Superseded()
        caller.note(http_error(error).code)
        if not response.has_started:
            whole = error_response(error, caller, self._service.clock)
            await whole(scope, attempt.receive, send)
        elif not response.is_complete:
            dialect, request_id = caller.dialect, caller.request_id
            render = dialect.error_event if response.is_stream else dialect.error_body
            rest = render(error, request_id)
            await send({"type": "http.response.body", "body": rest, "more_body": False})


class _Progress:
    """How far a response has been sent. Events of a stream do not pass through here."""

    def __init__(self, send: Send, record: RequestRecord) -> None:
        self.has_started = False
        self.is_complete = False
        self._headers: Sequence[tuple[bytes, bytes]] = ()
        self._send = send
        self._record = record

    @property
    def is_stream(self) -> bool:
        return dict(self._headers).get(b"content-type", b"").startswith(b"text/event-stream")

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.has_started = True
            self._headers = message["headers"]
            self._record.status = message["status"]
        else:
            self.is_complete = self.is_complete or not message.get("more_body", False)
        await self._send(message)
