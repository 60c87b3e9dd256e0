"""`POST /score` and `/v1/score`; `POST /rerank`, `/v1/rerank` and `/v2/rerank`."""

from typing import TYPE_CHECKING

from gateway.access.callers import read_body
from gateway.pooling.group import respond
from gateway.pooling.scores import plan_rerank, plan_score
from gateway.service import caller_of, service_of

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest
    from starlette.types import ASGIApp


async def create_score(http: "HttpRequest") -> "ASGIApp":
    """A JSON body; raises `InvalidRequest` for what cannot be served."""
    service = service_of(http)
    body = await read_body(http, service.limits)
    return respond(plan_score(body, caller_of(http), service), service)


async def create_rerank(http: "HttpRequest") -> "ASGIApp":
    """A JSON body; raises `InvalidRequest` for what cannot be served."""
    service = service_of(http)
    body = await read_body(http, service.limits)
    return respond(plan_rerank(body, caller_of(http), service), service)
