"""`/health` (liveness), `/ready` (a request would be served now) and `/metrics`."""

from contextlib import suppress
from typing import TYPE_CHECKING

from starlette.responses import Response

from engine.errors import Unavailable
from gateway.errors import StoreOutOfSpace
from gateway.observe.exposition import CONTENT_TYPE
from gateway.service import caller_of, service_of

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest


async def health(http: "HttpRequest") -> dict[str, str]:
    """Liveness: raises `Unavailable` if the workers are lost for good, so the server must end."""
    failure = service_of(http).groups.failure
    if failure is not None:
        raise Unavailable(failure)
    return {"status": "ok"}


async def ready(http: "HttpRequest") -> dict[str, str]:
    """Readiness: raises `Unavailable` if requests wait and no iteration has finished lately."""
    service = service_of(http)
    error = service.groups.rejection()
    if error is not None:
        raise error
    if not service.groups.is_ready:
        raise Unavailable("The server is not ready: no iteration has finished for too long.")
    with suppress(StoreOutOfSpace):
        await service.store.database.check_writable()
    store = "writable" if service.store.database.is_writable else "read-only"
    return {"status": "ready", "store": store}


async def metrics(http: "HttpRequest") -> Response:
    """All metrics in the Prometheus text format. Requests of other API keys are for admin keys."""
    service, caller = service_of(http), caller_of(http)
    page = await service.exposition.render(None if caller.is_admin else caller.tenant)
    return Response(page, media_type=CONTENT_TYPE)
