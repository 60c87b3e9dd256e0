"""`/health` is liveness, `/ready` means that a request would be served now, `/metrics` counts."""

from typing import TYPE_CHECKING

from starlette.responses import Response

from engine.errors import Unavailable
from gateway.generation.reply import json_response
from gateway.observe.exposition import CONTENT_TYPE
from gateway.service import caller_of, service_of

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest


async def health(http: "HttpRequest") -> Response:
    """The process answers."""
    return json_response(b'{"status":"ok"}', caller_of(http), service_of(http).clock)


async def ready(http: "HttpRequest") -> Response:
    """A worker finished an iteration lately, or nobody waits for one; else `Unavailable`."""
    service = service_of(http)
    refusal = service.engine.rejection()
    if refusal is not None:
        raise refusal
    if not service.engine.is_ready:
        raise Unavailable("The server is not ready: no iteration has returned for too long.")
    return json_response(b'{"status":"ready"}', caller_of(http), service.clock)


async def metrics(http: "HttpRequest") -> Response:
    """All metrics in Prometheus' text format."""
    service = service_of(http)
    headers = caller_of(http).headers(service.clock())
    return Response(service.exposition.render(), headers=headers, media_type=CONTENT_TYPE)
