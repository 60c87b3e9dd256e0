"""Requests about what runs in the former server, which the new one passes on to it.

The former server goes on generating its held streams. Their clients ask the new server for them: it
sends such a request over a private Unix socket, and relays the response. It does so too with a
retry of a request that runs there, after it has asked for its `idempotency-key`. Once the former
server has ended, its streams are in the journal, and these requests wait until that has been read.
"""

import asyncio
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from secrets import compare_digest
from typing import Any
from urllib.parse import quote

import aiohttp
from aiohttp.client_proto import ResponseHandler
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from yarl import URL

from engine.errors import EngineError, Unavailable
from gateway.access.callers import header_of
from gateway.access.retries import HEADER as RETRIED
from gateway.errors import StreamNotFound
from gateway.generation.held_streams import CONVERSATION, LAST_EVENT
from gateway.generation.reply import unless_disconnected
from gateway.serve.upgrade.channel import Predecessor, private_socket
from gateway.service import Service

SECRET, CLIENT = b"podway-upgrade", b"podway-client"
ASKING = b"podway-asking"  # the secret of a question: whether an attempt at the request runs
ASKING_SECONDS = 5.0
UNKNOWN = frozenset({401, 403, 404})  # the former server may not even know the API key
RETRY_SECONDS = 1.0
OF_CONNECTION = frozenset(
    {b"connection", b"keep-alive", b"transfer-encoding", b"content-length", b"expect"}
)
_NAMED = re.compile(r"/v1/(responses|stream|requests)/(?P<name>.+?)(/cancel|/timeline)?", re.DOTALL)


class PrivateApp:
    """The app of the former server for requests that its successor passes on."""

    def __init__(self, app: ASGIApp, service: Service, secret: str) -> None:
        self._app = app
        self._service = service
        self._secret = secret.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        if compare_digest(headers.get(ASKING, b""), self._secret):
            await _send_status(204 if _runs(scope, self._service) else 404, send)
            return
        if not compare_digest(headers.get(SECRET, b""), self._secret):
            await _send_status(403, send)
            return
        added = (SECRET, CLIENT) if headers[b"host"] != self._secret else (SECRET, CLIENT, b"host")
        scope["client"] = (headers[CLIENT].decode(), 0)
        scope["headers"] = [pair for pair in scope["headers"] if pair[0] not in added]
        await self._app(scope, receive, send)


class Forwarding:
    """The app of the successor: asks the former server first about what only that may know."""

    def __init__(self, app: ASGIApp, service: Service, predecessor: Predecessor) -> None:
        self._app = app
        self._service = service
        self._predecessor = predecessor

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._predecessor.restored.is_set() or scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        former = scope["podway.former"] = Former(self._predecessor, scope)
        if await self._is_asked_there(scope, former):
            body, is_whole = await _body(receive, self._service.limits.max_bytes)
            relay = partial(self._is_relayed, former, body, send)
            if is_whole and await unless_disconnected(receive, relay, lambda: None) is not False:
                return  # or the client has left
            receive = _replayed(body, receive, is_whole=is_whole)
        await self._app(scope, receive, send)

    async def _is_asked_there(self, scope: Scope, former: "Former") -> bool:
        """Whether the former server is to answer, if it can."""
        name = self._name(scope)
        try:
            tenant = _tenant(scope, self._service)
            if name is not None:
                self._service.store.held.find(tenant, name)
                return False
        except StreamNotFound:
            return True
        except EngineError:  # it is rejected here
            return False
        has_key = RETRIED in dict(scope["headers"])
        return has_key and not self._service.retries.runs(tenant, scope) and await former.runs()

    def _name(self, scope: Scope) -> str | None:
        """The stream, response or request that is asked for by a name."""
        if (match := _NAMED.fullmatch(scope["path"])) is not None:
            return match["name"]
        is_resumed = header_of(scope, LAST_EVENT) is not None
        return header_of(scope, CONVERSATION) if is_resumed else None

    async def _is_relayed(self, former: "Former", body: bytes, send: Send) -> bool:
        """Relay the former server's response; False if it does not know what is asked for."""
        try:
            async with former.asked(body) as response:
                if response.status in UNKNOWN:
                    return False
                await _relay(response, send)
                return True
        except aiohttp.ClientConnectionError:
            await self._predecessor.restored.wait()
            return False


class Former:
    """The former server, as the client of one request may ask it."""

    def __init__(self, predecessor: Predecessor, scope: Scope) -> None:
        self._predecessor = predecessor
        self._method: str = scope["method"]
        self._path = quote(scope["path"])
        self._query: str = scope["query_string"].decode("latin-1")
        self._headers = [
            (name.decode("latin-1"), value.decode("latin-1"))
            for name, value in scope["headers"]
            if name not in OF_CONNECTION
        ]
        self._headers.append((CLIENT.decode(), (scope.get("client") or ("-",))[0]))

    async def runs(self) -> bool:
        """Whether an attempt at the request runs there; not if it does not say so soon."""
        with suppress(aiohttp.ClientError, TimeoutError):
            async with asyncio.timeout(ASKING_SECONDS), self.asked(secret=ASKING) as response:
                return response.status == 204
        return False

    async def delete(self, name: str) -> None:
        """End the client's stream of that name. One that is in the journal only is forgotten when
        that is read here."""
        with suppress(aiohttp.ClientError):
            async with self.asked(method="DELETE", path=quote(f"/v1/stream/{name}")):
                pass

    async def streams(self) -> list[dict[str, Any]]:
        """What it lists of the client's streams. Raises `Unavailable`."""
        try:
            async with self.asked(method="GET") as response:
                if response.status in UNKNOWN:
                    return []
                if response.status != 200:
                    message = (
                        "The server before this one, which still runs streams, did not list them."
                    )
                    raise Unavailable(message, RETRY_SECONDS)
                listed: list[dict[str, Any]] = (await response.json())["data"]
                return listed
        except aiohttp.ClientError:
            await self._predecessor.restored.wait()
            return []

    @asynccontextmanager
    async def asked(
        self, body: bytes = b"", *, method: str = "", path: str = "", secret: bytes = SECRET
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Its response to the request, or to another one with the same headers. The secret stands
        for the host that a client of HTTP/1.0 need not name."""
        connector = PrivateConnector(private_socket(self._predecessor.pid), force_close=True)
        timeout = aiohttp.ClientTimeout(total=None)
        target = path or (f"{self._path}?{self._query}" if self._query else self._path)
        known = self._predecessor.secret
        url = URL(f"http://{known}{target}", encoded=True)
        headers = [*self._headers, (secret.decode(), known)]
        async with (
            aiohttp.ClientSession(
                connector=connector, timeout=timeout, auto_decompress=False
            ) as session,
            session.request(method or self._method, url, headers=headers, data=body) as response,
        ):
            yield response


class PrivateConnector(aiohttp.UnixConnector):
    """Connects to a socket in the abstract namespace, which uvloop cannot do by its name."""

    async def _create_connection(self, req: Any, traces: Any, timeout: Any) -> ResponseHandler:  # noqa: ASYNC109 # as aiohttp
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        peer.setblocking(False)
        try:
            peer.connect(self.path)
        except OSError as error:
            peer.close()
            raise aiohttp.ClientConnectorError(req.connection_key, error) from error
        _, handler = await self._loop.create_unix_connection(self._factory, sock=peer)
        return handler


def _tenant(scope: Scope, service: Service) -> str:
    """The name of the request's API key. Raises `EngineError`."""
    given = (header_of(scope, name) for name in (b"authorization", b"x-api-key"))
    return service.keys.key_of(*given).name


def _runs(scope: Scope, service: Service) -> bool:
    try:
        return service.retries.runs(_tenant(scope, service), scope)
    except EngineError:
        return False


async def _send_status(status: int, send: Send) -> None:
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": b""})


async def _relay(response: aiohttp.ClientResponse, send: Send) -> None:
    headers = [pair for pair in response.raw_headers if pair[0].lower() not in OF_CONNECTION]
    lower = [(name.lower(), value) for name, value in headers if name.lower() != b"date"]
    await send({"type": "http.response.start", "status": response.status, "headers": lower})
    async for piece in response.content.iter_any():
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _body(receive: Receive, max_bytes: int) -> tuple[bytes, bool]:
    """The body, and whether it is whole: it is not read far beyond the limit."""
    body, more = b"", True
    while more and len(body) <= max_bytes:
        message = await receive()
        if message["type"] == "http.disconnect":
            break
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return body, not more


def _replayed(body: bytes, receive: Receive, *, is_whole: bool) -> Receive:
    """Receives a body that has been read, and then what follows."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": not is_whole}]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay
