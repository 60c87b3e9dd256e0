"""The ASGI app: a table of routes behind `gateway.web.middleware`.

Routes raise errors; the table in `gateway.errors` gives each its status and JSON body.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import Route

from engine.errors import EngineError
from gateway.errors import MethodNotAllowed, PathNotFound
from gateway.generation.reply import error_response
from gateway.service import Service, caller_of, service_of
from gateway.web.middleware import IdentifyCaller
from gateway.web.routes import (
    batches,
    chat,
    completions,
    embeddings,
    files,
    messages,
    models,
    requests,
    responses,
    scoring,
    tokens,
)
from gateway.web.routes.operations import admin, docs, health, loads, loras, page, simulate

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest
    from starlette.types import ASGIApp

Endpoint = Callable[["HttpRequest"], Awaitable["ASGIApp"]]


def _route(path: str, **endpoints: Endpoint) -> Route:
    """A path with a different endpoint for each method."""

    async def dispatch(http: "HttpRequest") -> "ASGIApp":
        method = "GET" if http.method == "HEAD" else http.method
        return await endpoints[method](http)

    return Route(path, dispatch, methods=[*endpoints])


ROUTES = (
    Route("/v1/chat/completions", chat.create_chat_completion, methods=["POST"]),
    Route("/v1/completions", completions.create_completion, methods=["POST"]),
    Route("/v1/models", models.list_models, methods=["GET"]),
    Route("/v1/models/{model:path}", models.retrieve_model, methods=["GET"]),
    Route("/v1/chat/completions/render", chat.render_chat, methods=["POST"]),
    Route("/tokenize", tokens.tokenize, methods=["POST"]),
    Route("/detokenize", tokens.detokenize, methods=["POST"]),
    _route("/v1/files", GET=files.list_files, POST=files.create_file),
    _route("/v1/files/{file_id}", GET=files.retrieve_file, DELETE=files.delete_file),
    _route("/v1/files/{file_id}/content", GET=files.retrieve_content),
    _route("/v1/batches", GET=batches.list_batches, POST=batches.create_batch),
    _route("/v1/batches/{batch_id}", GET=batches.retrieve_batch),
    _route("/v1/batches/{batch_id}/cancel", POST=batches.cancel_batch),
    Route("/v1/embeddings", embeddings.create_embeddings, methods=["POST"]),
    Route("/score", scoring.create_score, methods=["POST"]),
    Route("/v1/score", scoring.create_score, methods=["POST"]),
    Route("/rerank", scoring.create_rerank, methods=["POST"]),
    Route("/v1/rerank", scoring.create_rerank, methods=["POST"]),
    Route("/v2/rerank", scoring.create_rerank, methods=["POST"]),
    Route("/v1/messages", messages.create_message, methods=["POST"]),
    Route("/v1/messages/count_tokens", messages.count_tokens, methods=["POST"]),
    Route("/v1/responses", responses.create_response, methods=["POST"]),
    Route("/v1/responses/input_tokens", responses.count_input_tokens, methods=["POST"]),
    Route("/v1/responses/compact", responses.compact_response, methods=["POST"]),
    _route(
        "/v1/responses/{response_id}",
        GET=responses.retrieve_response,
        DELETE=responses.delete_response,
    ),
    _route("/v1/responses/{response_id}/cancel", POST=responses.cancel_response),
    _route("/v1/responses/{response_id}/input_items", GET=responses.list_input_items),
    Route("/v1/requests/{request_id:path}/cancel", requests.cancel, methods=["POST"]),
    Route("/v1/requests/{request_id:path}/timeline", requests.timeline, methods=["GET"]),
    Route("/", page.index, methods=["GET"]),
    Route("/page/{name:path}", page.file, methods=["GET"]),
    Route("/v1/load_lora_adapter", loras.load_lora, methods=["POST"]),
    Route("/v1/unload_lora_adapter", loras.unload_lora, methods=["POST"]),
    Route("/admin/simulate", simulate.simulate, methods=["POST"]),
    Route("/admin/live", page.live, methods=["GET"]),
    Route("/admin/policy", admin.policy, methods=["GET", "POST"]),
    Route("/health", health.health, methods=["GET"]),
    Route("/v1/loads", loads.loads, methods=["GET"]),
    Route("/ready", health.ready, methods=["GET"]),
    Route("/metrics", health.metrics, methods=["GET"]),
    Route("/openapi.json", docs.openapi, methods=["GET"]),
    Route("/docs", docs.docs, methods=["GET"]),
)
CLIENT_CLOSED_REQUEST = 499  # nginx's status for a client that disconnected; not delivered


def build_app(service: Service) -> "ASGIApp":
    """The app over a service. It starts and stops nothing."""
    app = Starlette(
        routes=ROUTES,
        exception_handlers={
            EngineError: _error,
            HTTPException: _routing_error,
            ClientDisconnect: _disconnected,
            Exception: _error,
        },
    )
    app.router.redirect_slashes = False
    app.state.service = service
    app.state.simulations = asyncio.Semaphore(1)
    return IdentifyCaller(app, service, ROUTES)


async def _error(http: "HttpRequest", error: Exception) -> Response:
    return error_response(error, caller_of(http), service_of(http).clock)


async def _routing_error(http: "HttpRequest", error: Exception) -> Response:
    """Starlette's own errors: no such path, no such method."""
    assert isinstance(error, HTTPException), "registered for this class"
    if error.status_code == 405:
        allow = ", ".join(sorted((error.headers or {})["Allow"].split(", ")))
        return await _error(http, MethodNotAllowed(http.method, allow))
    return await _error(http, PathNotFound(f"No endpoint at {http.scope['path'][:200]}."))


async def _disconnected(http: "HttpRequest", error: Exception) -> Response:
    """The client disconnected before its request had a response."""
    return Response(status_code=CLIENT_CLOSED_REQUEST)
