"""`GET /v1/responses`: a WebSocket on which one client generates responses and continues them.

Each `response.create` runs as a request of its own through the whole app, with the headers of the
handshake: API key, limits, request id and log line are those of `POST /v1/responses`. Its events
are the messages that come back. Messages with equal `stream_id` run in order, others beside them.

Messages take turns with the requests of others, one in a cycle of the event loop, and their client
is charged for them (`gateway.access.intake`).

The connection holds the latest conversations, so that a message needs only its new items, and only
their text is tokenized. Steering ends a running answer at a token and begins the next one from it.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import orjson
from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp, Receive, Scope, Send

from engine.errors import EngineError, InvalidRequest
from gateway.access.bodies import count_values
from gateway.errors import TooManyMessages, UpgradeRequired, http_error, message_of
from gateway.generation.held import HeldConversations
from gateway.generation.threads import read_body_with
from gateway.generation.turn import Turn
from gateway.schema.responses import socket
from gateway.schema.responses.socket import Message, Steer
from gateway.service import caller_of, service_of
from gateway.web.routes.socket_exchange import SocketExchange

Json = dict[str, Any]
MAX_LANES = 16  # responses at once on one connection
MAX_WAITING = 32  # messages of one connection that run or wait
MAX_WAITING_BYTES = 16 << 20
MAX_STEERS = 16  # for one response
MAX_PARENTS = 16  # responses whose steering input waits for the outputs of tools


class TextSocket(Protocol):
    """A WebSocket whose messages are text."""

    async def receive(self) -> bytes | None: ...

    async def send(self, messages: Iterable[bytes]) -> None: ...

    def rest(self) -> None: ...

    def ping(self) -> None: ...

    def close(self, code: int, reason: str = "") -> None: ...


async def connect(http: HttpRequest) -> ASGIApp:
    """The ASGI app that serves the connection; raises `UpgradeRequired` for any other request."""
    if "podway.upgrade" not in http.scope:
        raise UpgradeRequired(
            "GET /v1/responses is a WebSocket: send 'Upgrade: websocket', or use POST."
        )
    conversations = HeldConversations(http.app.state.held, caller_of(http).tenant)
    websocket: TextSocket = http.scope["podway.upgrade"](service_of(http).limits.max_bytes)
    record = caller_of(http).record
    if record is not None:
        record.status = 101
    return ResponseSocket(websocket, http, conversations).serve


@dataclass(slots=True, eq=False)
class _Create:
    """A message `response.create`, while it waits or runs."""

    text: bytes
    message: Message
    turn: Turn
    steers: list[Steer] = field(default_factory=list)  # for the response after this one


class ResponseSocket:
    """The responses of one connection."""

    def __init__(
        self, websocket: TextSocket, http: HttpRequest, conversations: HeldConversations
    ) -> None:
        self._socket = websocket
        self._caller = caller_of(http)
        self._service = service_of(http)
        self._app: ASGIApp = http.scope["podway.app"]
        self._turn: Callable[[], Awaitable[None]] = http.scope["podway.turn_of_loop"]
        self._scope = http.scope
        self._conversations = conversations
        self._lanes: dict[str | None, deque[_Create]] = {}  # the first of each runs
        self._parents: dict[str, list[Steer]] = {}  # steering input, by the response it is for
        self._ended = asyncio.Event()
        self._is_taking = False  # a message, which is in no lane yet

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the connection until it ends, which ends its responses."""
        try:
            async with asyncio.TaskGroup() as tasks:
                while (text := await self._socket.receive()) is not None:
                    self._is_taking = True
                    await self._turn()
                    try:
                        await self._take(text, tasks)
                    except EngineError as error:
                        await self._send_error(error)
                    self._is_taking = False
                    self._rest()
                self._ended.set()
        finally:
            self._ended.set()
            self._conversations.close()

    async def _take(self, text: bytes, tasks: asyncio.TaskGroup) -> None:
        message = await read_body_with(partial(self._read, text), text)
        if message.type == socket.STEER:
            await self._steer(text)
            return
        if limit := self._limit(len(text), message.stream_id):
            await self._send_error(TooManyMessages(limit), message.stream_id)
            return
        create = _Create(text, message, self._new_turn(message))
        lane = self._lanes.get(message.stream_id)
        if lane is None:
            lane = self._lanes[message.stream_id] = deque((create,))
            tasks.create_task(self._run(lane, message.stream_id))
        else:
            lane.append(create)

    def _read(self, text: bytes) -> Message:
        count_values(text, self._service.limits)
        return socket.read_message(text)

    def _limit(self, num_bytes: int, stream_id: str | None) -> str | None:
        """The limit that one more message would exceed."""
        waiting = [create for lane in self._lanes.values() for create in lane]
        num_bytes += sum(len(create.text) for create in waiting)
        if len(waiting) >= MAX_WAITING or num_bytes > MAX_WAITING_BYTES:
            return f"{MAX_WAITING} messages or {MAX_WAITING_BYTES} bytes wait"
        if stream_id not in self._lanes and len(self._lanes) >= MAX_LANES:
            return f"{MAX_LANES} responses run"
        return None

    def _new_turn(self, message: Message) -> Turn:
        return Turn(self._conversations, generates=message.generate is not False)

    async def _run(self, lane: deque[_Create], stream_id: str | None) -> None:
        """Run the messages of a lane in order."""
        try:
            while lane and not self._ended.is_set():
                await self._respond(lane)
                lane.popleft()
        finally:
            del self._lanes[stream_id]
            self._rest()

    def _rest(self) -> None:
        """Say that nothing runs, if so. A message that is being taken runs: while the server is
        replaced a connection at rest is closed."""
        if not self._lanes and not self._is_taking:
            self._socket.rest()

    async def _respond(self, lane: deque[_Create]) -> None:
        """Run the first message of a lane; then, if it was steered, the response after it."""
        create = lane[0]
        parent = create.message.previous_response_id or ""
        steers = self._parents.get(parent, [])
        if steers:
            create.text = await asyncio.to_thread(socket.with_steers, create.text, steers)
        exchange = await self._exchange(create)
        if exchange.status == 200:
            self._parents.pop(parent, None)
        else:
            self._conversations.drop(parent)  # as Open Responses demands
        while create.steers and not self._ended.is_set():
            successor = await self._successor(create, exchange)
            if successor is None:
                return
            lane[0], steers, create = successor, create.steers, successor
            exchange = await self._exchange(create)
            if exchange.status != 200:
                await self._fail_steers(parent, steers, "successor_creation_failed", create)

    async def _exchange(self, create: _Create) -> SocketExchange:
        """Run one message as a request through the app."""
        exchange = SocketExchange(create.text, create.message.stream_id, self._socket, self._ended)
        scope = exchange.scope_like(self._scope, create.turn)
        await self._app(scope, exchange.receive, exchange.send)
        return exchange

    async def _successor(self, create: _Create, exchange: SocketExchange) -> _Create | None:
        """The response after a steered one; None if its input waits, or cannot be used."""
        renderer = create.turn.renderer
        if renderer is None or exchange.status != 200:
            parent = create.message.previous_response_id or ""
            await self._fail_steers(parent, create.steers, "response_not_active", create)
            return None
        response_id, steers = renderer.response_id, create.steers
        if renderer.status not in ("completed", "incomplete"):
            await self._fail_steers(response_id, steers, "response_not_active", create)
            return None
        required = socket.required_input(renderer.output.items)
        if not required:
            text = await asyncio.to_thread(socket.continued, create.text, response_id, steers)
            return _Create(text, create.message, self._new_turn(create.message))
        self._parents[response_id] = steers
        while len(self._parents) > MAX_PARENTS:
            oldest = next(iter(self._parents))
            await self._fail_steers(
                oldest, self._parents.pop(oldest), "too_many_pending_steers", create
            )
        for steer in steers:
            await self._send_steer_event(
                create,
                "response.steer.pending",
                steer=steer.as_json(response_id),
                reason="waiting_for_required_input",
                required_input=required,
            )
        return None

    async def _steer(self, text: bytes) -> None:
        """Accept input for a running response, or say why not."""
        failed = partial(self._fail_unaccepted, text)
        try:
            read = partial(socket.read_steer, text)
            message = await read_body_with(read, text)
        except InvalidRequest as error:
            await failed("invalid_input", str(error))
            return
        response_id = message.previous_response_id
        create = self._running(response_id)
        if create is None:
            is_held = self._conversations.find(response_id) is not None
            code = "response_already_completed" if is_held else "response_not_found"
            await failed(code, f"No response with the id {response_id[:128]!r} runs here.")
        elif not create.turn.generates:
            await failed("steering_not_supported", "Nothing is generated that could be steered.")
        elif len(create.steers) >= MAX_STEERS:
            limit = f"A response accepts at most {MAX_STEERS} steering inputs."
            await failed("too_many_pending_steers", limit)
        else:
            steer = Steer(self._service.new_id("steer_"), bytes(message.input))
            create.steers.append(steer)
            described = steer.as_json(response_id)
            await self._send_steer_event(create, "response.steer.accepted", steer=described)
            create.turn.steer()

    def _running(self, response_id: str) -> _Create | None:
        """The message whose response this is, while it runs."""
        for lane in self._lanes.values():
            renderer = lane[0].turn.renderer if lane else None
            if renderer is not None and renderer.response_id == response_id:
                return lane[0] if renderer.status == "in_progress" else None
        return None

    async def _fail_unaccepted(self, text: bytes, code: str, reason: str) -> None:
        """Give input back that was not accepted."""
        steer = orjson.Fragment(await asyncio.to_thread(socket.unaccepted, text))
        event = {"type": "response.steer.failed", "sequence_number": 0}
        await self._send({**event, "error": _error(code, reason), "steer": steer})

    async def _fail_steers(
        self, response_id: str, steers: Iterable[Steer], code: str, create: _Create
    ) -> None:
        """Give accepted input back that no response will have."""
        error = _error(code, "The response ended in a way in which it cannot be continued.")
        for steer in steers:
            described = {**steer.as_json(response_id), "input": orjson.Fragment(steer.input)}
            await self._send_steer_event(
                create, "response.steer.failed", steer=described, error=error
            )

    async def _send_steer_event(self, create: _Create, kind: str, **fields: Any) -> None:
        renderer = create.turn.renderer
        number = 0 if renderer is None else renderer.events.next_number()
        event = {"type": kind, "sequence_number": number, **fields}
        await self._send(event, create.message.stream_id)

    async def _send_error(self, error: EngineError, stream_id: str | None = None) -> None:
        """The event for a message that did not become a request."""
        known = http_error(error)
        param = getattr(error, "param", None)
        body = {"type": known.type, "code": known.code, "message": message_of(error)}
        event = {"type": "error", "status": known.status, "error": {**body, "param": param}}
        await self._send(event, stream_id)

    async def _send(self, event: Json, stream_id: str | None = None) -> None:
        stream = {} if stream_id is None else {"stream_id": stream_id}
        await self._socket.send((orjson.dumps({**event, **stream}),))


def _error(code: str, message: str) -> Json:
    return {"type": "invalid_request_error", "code": code, "message": message}
