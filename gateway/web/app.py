"""The ASGI app: the routes of `gateway.web.table` behind `gateway.web.middleware`.

Routes raise errors; the table in `gateway.errors` gives each its status and JSON body.
"""

import asyncio

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp

from engine.errors import EngineError
from gateway.errors import MethodNotAllowed, PathNotFound
from gateway.generation.held import HeldResponses
from gateway.generation.reply import error_response
from gateway.service import Service, caller_of, service_of
from gateway.web.middleware import IdentifyCaller
from gateway.web.openapi import documents
from gateway.web.routes.operations.page import LiveStates
from gateway.web.table import ROUTES

METHODS = ", ".join(sorted({"HEAD", "OPTIONS", *(route.method for route in ROUTES.routes)}))
CLIENT_CLOSED_REQUEST = 499  # nginx's status for a client that disconnected; not delivered


def build_app(service: Service) -> ASGIApp:
    """The app over a service. It starts and stops nothing."""
    app = Starlette(
        routes=ROUTES.endpoints,
        exception_handlers={
            EngineError: _error,
            HTTPException: _routing_error,
            ClientDisconnect: _disconnected,
            Exception: _error,
        },
    )
    app.router.redirect_slashes = False
    app.state.service = service
    app.state.routes = ROUTES
    app.state.documents = documents(ROUTES.routes)
    app.state.live = LiveStates(service)
    app.state.held = HeldResponses()
    app.state.simulations = asyncio.Semaphore(1)
    return IdentifyCaller(app, service, ROUTES)


async def _error(http: HttpRequest, error: Exception) -> Response:
    return error_response(error, caller_of(http), service_of(http).clock)


async def _routing_error(http: HttpRequest, error: Exception) -> Response:
    """Starlette's own errors: no such path, no such method."""
    assert isinstance(error, HTTPException), "registered for this class"
    if error.status_code == 405:
        allow = ", ".join(sorted((error.headers or {})["Allow"].split(", ")))
        return await _error(http, MethodNotAllowed(http.method, allow))
    path: str = http.scope["path"]
    if (http.method, path) == ("OPTIONS", "*"):  # about the server in general (RFC 9110, 9.3.7)
        headers = {**caller_of(http).headers(service_of(http).clock()), "allow": METHODS}
        return Response(status_code=204, headers=headers)
    meant = ROUTES.instead_of(http.method, path)
    hint = f" Did you mean {meant[:200]}?" if meant else ""
    return await _error(http, PathNotFound(f"No endpoint at {path[:200]}.{hint}"))


async def _disconnected(http: HttpRequest, error: Exception) -> Response:
    """The client disconnected before its request had a response."""
    return Response(status_code=CLIENT_CLOSED_REQUEST)
