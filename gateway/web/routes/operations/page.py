"""`GET /`: the web page, and its files below `/page/`; `GET /admin/live`: the engine's live
state."""

from functools import cache, partial
from importlib import resources
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

import orjson
from starlette.responses import Response

from gateway.errors import PathNotFound
from gateway.generation.reply import unless_disconnected
from gateway.observe.ticked import Ticked
from gateway.service import caller_of, service_of

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest
    from starlette.types import Receive, Scope, Send

    from gateway.service import Service

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
TEXT = """Podway serves {model} over OpenAI's API.

    curl -N {base}/v1/chat/completions -H 'content-type: application/json' \\
      -d '{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'

In a browser this address is a chat and a live view of the engine. API reference: {base}/docs
"""


async def index(http: "HttpRequest") -> Response:
    """The page for browsers; a short text for clients that do not accept HTML, such as curl."""
    service = service_of(http)
    if "text/html" not in http.headers.get("accept", ""):
        text = TEXT.format(model=service.model.name, base=str(http.base_url).rstrip("/"))
        return Response(text, media_type="text/plain; charset=utf-8")
    return _file_response(http, "index.html")


async def file(http: "HttpRequest") -> Response:
    """A file of the page."""
    return _file_response(http, http.path_params["name"])


def _file_response(http: "HttpRequest", name: str) -> Response:
    service = service_of(http)
    content = _files().get(name) if service.has_page else None
    if content is None:
        raise PathNotFound(f"No endpoint at {http.scope['path'][:200]}.")
    return Response(content, headers=HEADERS, media_type=MEDIA_TYPES[PurePosixPath(name).suffix])


@cache
def _files() -> dict[str, bytes]:
    """All files of the page by their path below `gateway/web/page`."""
    root = resources.files("gateway.web") / "page"
    found = {each.name: each.read_bytes() for each in root.iterdir() if each.is_file()}
    for each in (root / "vendor").iterdir():
        found[f"vendor/{each.name}"] = each.read_bytes()
    return {name: data for name, data in found.items() if PurePosixPath(name).suffix in MEDIA_TYPES}


async def live(http: "HttpRequest") -> "LiveStream":
    """Server-sent events with the engine's state, at most ten a second, until the client leaves."""
    service = service_of(http)
    return LiveStream(service, http.app.state.live, caller_of(http).headers(service.clock()))


def live_state(service: "Service") -> Ticked[bytes]:
    """The engine's state as JSON, made at most once per tick for all readers."""

    def make() -> bytes:
        lag, now = service.watch.last_lag, service.clock()
        return orjson.dumps(service.live.snapshot(service.engine, service.readings, lag, now))

    return Ticked(make, service.clock)


class LiveStream:
    """An ASGI response: one snapshot per tick. It ends when the server begins to shut down."""

    def __init__(self, service: "Service", state: Ticked[bytes], headers: dict[str, str]) -> None:
        self._service = service
        self._state = state
        self._headers = headers | {
            "content-type": "text/event-stream",
            "cache-control": "no-store",
            "x-accel-buffering": "no",
        }

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        """Stream until the client disconnects."""
        headers = [(name.encode(), value.encode()) for name, value in self._headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        with self._service.live.watch():
            await unless_disconnected(receive, partial(self._stream, send), lambda: None)

    async def _stream(self, send: "Send") -> None:
        service, view = self._service, self._service.live
        since = view.last_number
        while not service.engine.is_draining:
            state = await self._state.get()  # once per tick
            iterations = view.newer(since)
            since = view.last_number
            event = b"data: " + state[:-1] + b',"iterations":' + iterations + b"}\n\n"
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
