"""`GET /openapi.json` describes this server's API; `GET /docs` is the same as a web page."""

from typing import TYPE_CHECKING

from starlette.responses import Response

from gateway.generation.reply import json_response
from gateway.service import caller_of, service_of

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest

    from gateway.web.openapi import Documents

POLICY = "default-src 'none'; style-src 'unsafe-inline'"  # no scripts, no external resources


async def openapi(http: "HttpRequest") -> Response:
    """The OpenAPI document, made from the app's routes when the server started."""
    documents: Documents = http.app.state.documents
    return json_response(documents.json, caller_of(http), service_of(http).clock)


async def docs(http: "HttpRequest") -> Response:
    """The OpenAPI document as a page."""
    documents: Documents = http.app.state.documents
    headers = caller_of(http).headers(service_of(http).clock())
    headers |= {"content-security-policy": POLICY}
    return Response(documents.page, headers=headers, media_type="text/html")
