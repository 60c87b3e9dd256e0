"""`/health` (liveness), `/ready` (a request would be served now) and `/metrics`."""

from typing import TYPE_CHECKING

from starlette.responses import Response

from engine.errors import Unavailable
from gateway.generation.reply import json_response
from gateway.observe.exposition import CONTENT_TYPE
from gateway.service import caller_of, service_of

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest


async def health(http: "HttpRequest") -> Response:
    """Liveness: the process answers."""
    return json_response(b'{"status":"ok"}', caller_of(http), service_of(http).clock)


async def ready(http: "HttpRequest") -> Response:
    """Readiness: raises `Unavailable` if requests wait and no iteration has finished lately."""
    service = service_of(http)
    error = service.engine.rejection()
    if error is not None:
        raise error
    if not service.engine.is_ready:
        raise Unavailable("The server is not ready: no iteration has finished for too long.")
    return json_response(b'{"status":"ready"}', caller_of(http), service.clock)


async def metrics(http: "HttpRequest") -> Response:
    """All metrics in the Prometheus text format."""
    service = service_of(http)
    headers = caller_of(http).headers(service.clock())
    return Response(service.exposition.render(), headers=headers, media_type=CONTENT_TYPE)
