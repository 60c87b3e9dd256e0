"""The ASGI app: a table of routes, one door that names every caller, errors as JSON.

Handlers raise; the door and the tables of `gateway.errors` make of it what the client sees.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import Route

from engine.errors import EngineError
from gateway.access import Caller, sane_request_id
from gateway.errors import MethodNotAllowed, PathNotFound
from gateway.reply import error_response
from gateway.routes import admin, chat, completions, health, models, requests
from gateway.service import Service, caller_of, service_of

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest
    from starlette.types import ASGIApp, Receive, Scope, Send

ROUTES = (
    Route("/v1/chat/completions", chat.create_chat_completion, methods=["POST"]),
    Route("/v1/completions", completions.create_completion, methods=["POST"]),
    Route("/v1/models", models.list_models, methods=["GET"]),
    Route("/v1/models/{model:path}", models.retrieve_model, methods=["GET"]),
    Route("/v1/requests/{request_id:path}/cancel", requests.cancel, methods=["POST"]),
    Route("/admin/policy", admin.policy, methods=["GET", "POST"]),
    Route("/health", health.health, methods=["GET"]),
    Route("/ready", health.ready, methods=["GET"]),
    Route("/metrics", health.metrics, methods=["GET"]),
)
GUARDED = ("/v1/", "/admin/")
CLOSED_REQUEST = 499  # nobody reads it; nginx's word for a client that left


class Door:
    """The outermost app: every caller gets a name, and at `GUARDED` paths must show a key.

    It leaves the server's own `send` in the scope: what follows a stream's status line goes
    there directly, past middleware that only looks at the status line.
    """

    def __init__(self, app: "ASGIApp", service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        service = self._service
        offered, authorization = _headers(scope)
        request_id = sane_request_id(offered) or f"req_{service.random.getrandbits(128):032x}"
        caller = Caller(request_id, service.clock())
        scope["podway.send"] = send
        try:
            if scope["path"].startswith(GUARDED):
                caller = replace(caller, tenant=service.keys.tenant(authorization))
        except EngineError as error:
            await error_response(error, caller, service.clock)(scope, receive, send)
        else:
            scope["podway.caller"] = caller
            await self._app(scope, receive, send)


def build_app(service: Service) -> "ASGIApp":
    """The app over a service; it starts and stops nothing."""
    app = Starlette(
        routes=ROUTES,
        exception_handlers={
            EngineError: _tell,
            HTTPException: _tell_http,
            ClientDisconnect: _tell_nobody,
            Exception: _tell,
        },
    )
    app.router.redirect_slashes = False
    app.state.service = service
    return Door(app, service)


def _headers(scope: "Scope") -> tuple[str | None, str | None]:
    """The offered request id and the authorization."""
    found = dict(scope["headers"])
    request_id, authorization = found.get(b"x-request-id"), found.get(b"authorization")
    return (
        None if request_id is None else request_id.decode("latin-1"),
        None if authorization is None else authorization.decode("latin-1"),
    )


async def _tell(http: "HttpRequest", error: Exception) -> Response:
    return error_response(error, caller_of(http), service_of(http).clock)


async def _tell_http(http: "HttpRequest", error: Exception) -> Response:
    """Starlette's own refusals: no such path, no such method."""
    assert isinstance(error, HTTPException), "registered for this class"
    if error.status_code == 405:
        allow = ", ".join(sorted((error.headers or {})["Allow"].split(", ")))
        return await _tell(http, MethodNotAllowed(http.method, allow))
    return await _tell(http, PathNotFound(f"No endpoint at {http.scope['path'][:200]}."))


async def _tell_nobody(http: "HttpRequest", error: Exception) -> Response:
    """The client left while it was sending its body."""
    return Response(status_code=CLOSED_REQUEST)
