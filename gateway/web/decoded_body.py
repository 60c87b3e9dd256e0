"""The body of a request, decoded where that does not hold the event loop."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from gateway.access.callers import read_body
from gateway.generation.threads import read_body_with
from gateway.service import service_of

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest

T = TypeVar("T")


async def decoded_body(http: "HttpRequest", read: Callable[[bytes], T]) -> T:
    """What `read` makes of the body, in a thread if the body is long. Raises `InvalidRequest`."""
    body = await read_body(http, service_of(http).limits)
    return await read_body_with(partial(read, body), body)
