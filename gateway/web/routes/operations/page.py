"""`GET /`: the web page, and its files below `/page/`; `GET /admin/live`: the engine's live state;
`GET /openapi.json` and `/docs`: the description of the API."""

import asyncio
import gzip
import re
from collections.abc import AsyncIterator, Iterator
from functools import cache, partial
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import PurePosixPath

import orjson
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse

from engine.errors import Unavailable
from gateway.errors import PathNotFound
from gateway.generation.event_stream import EVENT_HEADERS
from gateway.groups.group import Group
from gateway.observe.readings import Ticked
from gateway.schema.rendering import END
from gateway.service import Service, service_of
from gateway.web.openapi import Documents

DOCS_POLICY = "default-src 'none'; style-src 'unsafe-inline'"  # no scripts, no external resources
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
    "vary": "accept-encoding",
}
ACCEPTS_GZIP = re.compile(r"\bgzip\b(?!\s*;\s*q=0(?:\.0*)?\s*(?:,|$))")
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


async def openapi(http: HttpRequest) -> bytes:
    """The OpenAPI document, made from the app's routes when the server started."""
    documents: Documents = http.app.state.documents
    return documents.json


async def docs(http: HttpRequest) -> Response:
    """The OpenAPI document as a page."""
    documents: Documents = http.app.state.documents
    headers = {"content-security-policy": DOCS_POLICY}
    return Response(documents.page, headers=headers, media_type="text/html")


async def index(http: HttpRequest) -> Response:
    """The page for browsers; a short text for clients that do not accept HTML, such as curl."""
    service = service_of(http)
    if "text/html" not in http.headers.get("accept", ""):
        text = TEXT.format(model=service.group.name, base=str(http.base_url).rstrip("/"))
        return Response(text, media_type="text/plain; charset=utf-8")
    return await _file_response(http, "index.html")


async def file(http: HttpRequest) -> Response:
    """A file of the page."""
    return await _file_response(http, http.path_params["name"])


async def _file_response(http: HttpRequest, name: str) -> Response:
    service = service_of(http)
    files = await asyncio.to_thread(_files) if service.has_page else {}
    if name not in files:
        raise PathNotFound(f"No endpoint at {http.scope['path'][:200]}.")
    content, compressed = files[name]
    headers = HEADERS
    if ACCEPTS_GZIP.search(http.headers.get("accept-encoding", "")):
        content, headers = compressed, HEADERS | {"content-encoding": "gzip"}
    return Response(content, headers=headers, media_type=MEDIA_TYPES[PurePosixPath(name).suffix])


@cache
def _files() -> dict[str, tuple[bytes, bytes]]:
    """All files of the page by their path below `gateway/web/page`, each as it is and in gzip.
    The first call takes 30 ms."""
    files = _files_below(resources.files("gateway.web") / "page", "")
    return {name: (content, gzip.compress(content, mtime=0)) for name, content in files}


def _files_below(folder: Traversable, prefix: str) -> Iterator[tuple[str, bytes]]:
    for each in folder.iterdir():
        if each.is_dir():
            yield from _files_below(each, f"{prefix}{each.name}/")
        elif PurePosixPath(each.name).suffix in MEDIA_TYPES:
            yield prefix + each.name, each.read_bytes()


async def live(http: HttpRequest) -> StreamingResponse:
    """Server-sent events with the engine's state, at most ten a second, until the client leaves.
    Of several models, the one that the query's `model` names, or the first that is loaded. Raises
    `Unavailable` if it is not loaded."""
    service, name = service_of(http), http.query_params.get("model")
    groups = service.groups
    loaded = (group for group in groups if group.accepts)
    group = groups.find(name) if name else next(loaded, groups.default)
    states: LiveStates = http.app.state.live
    if not group.accepts:
        raise Unavailable(f"The model {group.name!r} is not loaded.")
    live_states = _live(service.bound_to(group), states.of(group))
    return StreamingResponse(live_states, headers=EVENT_HEADERS)


class LiveStates:
    """The states of all engines as JSON, each made at most once per tick for all readers."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._states: dict[Group, Ticked[bytes]] = {}

    def of(self, group: Group) -> Ticked[bytes]:
        """The state of one model's engine, which must be loaded."""
        if group not in self._states:
            make = partial(self._make, self._service.bound_to(group))
            self._states[group] = Ticked(make, self._service.clock)
        return self._states[group]

    def _make(self, service: Service) -> bytes:
        lag, now = service.watch.last_lag, service.clock()
        return orjson.dumps(service.live.snapshot(service.engine, service.readings, lag, now))


async def _live(service: Service, states: Ticked[bytes]) -> AsyncIterator[bytes]:
    """One snapshot per tick. It ends when the server begins to shut down, and when the model is
    unloaded."""
    view = service.live
    with view.watch():
        since = view.last_number
        while service.group.accepts and not service.groups.changes.is_ended:
            try:
                state = await states.get()  # once per tick
            except Unavailable:  # it was unloaded meanwhile
                return
            iterations = view.newer(since)
            since = view.last_number
            yield b"data: " + state[:-1] + b',"iterations":' + iterations + b"}" + END
