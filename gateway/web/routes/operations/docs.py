"""`GET /openapi.json` describes this server's API; `GET /docs` is the same as a web page."""

from typing import TYPE_CHECKING

import orjson
from starlette.responses import Response

from gateway.generation.reply import json_response
from gateway.service import caller_of, service_of
from gateway.web.docs_page import render
from gateway.web.openapi import describe

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest

POLICY = "default-src 'none'; style-src 'unsafe-inline'"  # no scripts, no external resources


async def openapi(http: "HttpRequest") -> Response:
    """The OpenAPI document, generated from the app's routes."""
    body = orjson.dumps(describe(http.app.routes))
    return json_response(body, caller_of(http), service_of(http).clock)


async def docs(http: "HttpRequest") -> Response:
    """The OpenAPI document as a page."""
    headers = caller_of(http).headers(service_of(http).clock())
    headers |= {"content-security-policy": POLICY}
    page = render(describe(http.app.routes))
    return Response(page, headers=headers, media_type="text/html")
