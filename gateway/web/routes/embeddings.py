"""`POST /v1/embeddings`."""

from typing import TYPE_CHECKING

from gateway.access.callers import read_body
from gateway.pooling.embeddings import plan_embeddings
from gateway.pooling.group import respond
from gateway.service import caller_of, service_of

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest
    from starlette.types import ASGIApp


async def create_embeddings(http: "HttpRequest") -> "ASGIApp":
    """A JSON body; raises `InvalidRequest` for what cannot be served."""
    service = service_of(http)
    body = await read_body(http, service.limits)
    return respond(plan_embeddings(body, caller_of(http), service), service)
