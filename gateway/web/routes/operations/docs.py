"""`GET /openapi.json` describes this server's API; `GET /docs` is the same as a web page."""

from typing import TYPE_CHECKING

from starlette.responses import Response

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest

    from gateway.web.openapi import Documents

POLICY = "default-src 'none'; style-src 'unsafe-inline'"  # no scripts, no external resources


async def openapi(http: "HttpRequest") -> bytes:
    """The OpenAPI document, made from the app's routes when the server started."""
    documents: Documents = http.app.state.documents
    return documents.json


async def docs(http: "HttpRequest") -> Response:
    """The OpenAPI document as a page."""
    documents: Documents = http.app.state.documents
    headers = {"content-security-policy": POLICY}
    return Response(documents.page, headers=headers, media_type="text/html")
