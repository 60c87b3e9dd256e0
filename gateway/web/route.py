"""A row of the table of routes in `gateway.web.table`, and what is looked up in the table.

The app, the checks of the middleware, the endpoints of batches, the dialect of errors and the
OpenAPI document are made from these rows.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum, auto
from functools import partial
from inspect import isawaitable, iscoroutinefunction
from typing import Any, TypeVar

import msgspec
import orjson
import starlette.routing
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.access.bodies import ReadRequest, read_body
from gateway.access.callers import Caller
from gateway.errors import PathNotFound
from gateway.generation import event_stream, held_streams
from gateway.generation.plan import GenerationPlan
from gateway.generation.reply import json_response, unless_disconnected
from gateway.generation.stream_journal import Origin
from gateway.generation.threads import MAX_BYTES_ON_LOOP, read_body_with
from gateway.pooling import group
from gateway.pooling.group import Plan
from gateway.schema.dialect import OPENAI, ApiDialect
from gateway.service import Service, caller_of, model_named, service_of

T = TypeVar("T")
Json = dict[str, Any]
Endpoint = Callable[[HttpRequest], Awaitable[ASGIApp | Json | bytes]]  # bytes of JSON
Planner = Callable[[bytes, Caller, Service], Plan | Awaitable[Plan]]

JSON = "application/json"
EVENTS = "text/event-stream"
TEXT = "text/plain"
HTML = "text/html"
MAX_TYPED = 60  # characters of a path that is compared with the routes
BACKGROUND = b'"background"'  # a body with this may be that of a held stream


async def decoded_body(http: HttpRequest, read: Callable[[bytes], T]) -> T:
    """What `read` makes of the body, in a thread if the body is long. Raises `InvalidRequest`."""
    body = await read_body(http, service_of(http).limits)
    return await read_body_with(partial(read, body), body)


class Access(Enum):
    """The API key that a route needs, if the server has any."""

    OPEN = auto()  # none: probes and routers cannot send keys, and the web page asks for it itself
    TENANT = auto()
    ADMIN = auto()


@dataclass(frozen=True, slots=True)
class Route:
    """A method and a path, the function that serves it, and all that others know of it.

    A route with a `plan` and no `endpoint` responds with what the plan of its body generates.
    """

    method: str
    path: str
    tag: str  # the section of the OpenAPI document
    summary: str
    endpoint: Endpoint | None = None
    body: type[msgspec.Struct] | None = None  # decodes the request
    plan: Planner | None = None  # plans a request from its body
    access: Access = Access.TENANT
    is_metered: bool = False  # counts against the request limits of its key
    is_batchable: bool = False
    is_probe: bool = False  # if it succeeds, its line in the request log has level DEBUG
    asks_browser: bool = False  # browsers ask for the key in a password dialog
    dialect: ApiDialect = OPENAI
    media_types: tuple[str, ...] = (JSON,)  # the response's media types
    query: tuple[str, ...] = ()
    is_of_model: bool = False  # its body or its query names a model, which must be loaded
    form: tuple[str, ...] = ()  # parts of a multipart body, all required; `file` is a file

    async def respond(self, http: HttpRequest) -> ASGIApp:
        """The response to a request of this route. Raises what its endpoint or its plan does."""
        service = service_of(http)
        if service.groups.are_fixed or not (self.is_of_model or self.plan is not None):
            return await self.respond_with(service, http)
        return OfModel(self, http)

    async def respond_with(self, service: Service, http: HttpRequest) -> ASGIApp:
        """The response of the service, whose model is loaded."""
        if self.endpoint is not None:
            return _response(await self.endpoint(http), caller_of(http), service)
        body = await read_body(http, service.limits)
        scope, caller = http.scope, caller_of(http)
        is_resumable = "podway.attempt" in scope or any(
            name in held_streams.HEADERS for name, _ in scope["headers"]
        )
        if is_resumable and (response := held_streams.resumed(scope, caller, service)):
            return response
        may_be_held = is_resumable or BACKGROUND in body
        if not may_be_held:
            plan = await self.plan_of(body, caller, service)
            may_be_held = isinstance(plan, GenerationPlan) and plan.background is not None
        if may_be_held:
            origin = Origin.new(self.path, body, service)
            plan = await self.plan_of(body, caller, origin.service)
            origin.planned()
            if isinstance(plan, GenerationPlan) and (is_resumable or plan.background is not None):
                return held_streams.respond(plan, service, scope, origin)
        if isinstance(plan, GenerationPlan):
            return event_stream.respond(plan, service)
        return group.respond(plan, service)

    async def plan_of(self, body: bytes, caller: Caller, service: Service) -> Plan:
        """The plan of a request body. Raises `InvalidRequest` for what cannot be served."""
        assert self.plan is not None, "a route has an endpoint or a plan"
        if iscoroutinefunction(self.plan) or len(body) <= MAX_BYTES_ON_LOOP:
            plan = self.plan(body, caller, service)
        else:
            plan = await read_body_with(partial(self.plan, body, caller, service), body)
        return await plan if isawaitable(plan) else plan


class OfModel:
    """The response to a request that names one of several models: it waits until that is loaded,
    which then stays so until the response has ended."""

    def __init__(self, route: Route, http: HttpRequest) -> None:
        self._route = route
        self._http = http

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond. Raises `ModelNotFound`, and `Unavailable` if the model cannot be loaded."""
        service, http = service_of(self._http), self._http
        name = http.query_params.get("model")
        if http.method == "POST":
            body = await read_body(http, service.limits)
            http = ReadRequest(scope, receive, body)
            name = await read_body_with(partial(model_named, body), body) or name
        group = service.groups.find(name)
        with group.leases.claim() as lease:
            if not lease.is_active:
                load = partial(service.groups.loads.ensure, group, lease)
                await unless_disconnected(receive, load, lambda: None)
                if not lease.is_active:
                    raise ClientDisconnect
            serving = scope["podway.service"] = service.bound_to(group)
            response = await self._route.respond_with(serving, http)
            await response(scope, receive, send)


class RouteTable:
    """The routes by path and method."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self.routes = routes
        self._by_path: dict[str, dict[str, Route]] = {}
        for route in routes:
            self._by_path.setdefault(route.path, {})[route.method] = route
        self.endpoints = [
            starlette.routing.Route(path, _dispatcher(methods), methods=[*methods])
            for path, methods in self._by_path.items()
        ]
        self.planners = {
            route.path: route.plan_of
            for route in routes
            if route.plan and EVENTS in route.media_types
        }
        self.batch_endpoints = {route.path: route.plan_of for route in routes if route.is_batchable}
        self._patterns = [
            (each.path_regex, self._by_path[each.path])
            for each in self.endpoints
            if each.param_convertors
        ]
        self._dialects = [
            (route.path, route.dialect) for route in routes if route.dialect is not OPENAI
        ]

    def find(self, method: str, path: str) -> Route | None:
        """The route of a request. For a method that the path does not have, any of the path's."""
        method = "GET" if method == "HEAD" else method
        places = [self._by_path[path]] if path in self._by_path else []
        places += [methods for regex, methods in self._patterns if regex.match(path)]
        found = next((each[method] for each in places if method in each), None)
        return found or next((route for each in places for route in each.values()), None)

    def instead_of(self, method: str, path: str) -> str | None:
        """The path of a route that a client whose base URL has `/v1` twice, or not, or a slash too
        many, or who mistyped it, has probably meant by one that no route has."""
        single = "/" + path.strip("/")
        tries = [single, f"/v1{single}", single.removeprefix("/v1")]
        if len(path) <= MAX_TYPED:
            tries += get_close_matches(single, self._by_path, n=1, cutoff=0.85)
        return next((each for each in tries if self.find(method, each)), None)

    def dialect_of(self, path: str) -> ApiDialect:
        """The dialect of the API that a path belongs to, also if no route has this path."""
        return next(
            (dialect for start, dialect in self._dialects if path.startswith(start)), OPENAI
        )


def _response(result: ASGIApp | Json | bytes, caller: Caller, service: Service) -> ASGIApp:
    """What an endpoint returned as a response, with the headers that every response carries."""
    if isinstance(result, dict):
        result = orjson.dumps(result)
    if isinstance(result, bytes):
        return json_response(result, caller, service.clock)
    if isinstance(result, Response):
        result.headers.update(caller.headers(service.clock()))
    return result


def _dispatcher(
    methods: dict[str, Route],
) -> Callable[[HttpRequest], Awaitable[ASGIApp]]:
    """The endpoint of a path with a different route for each method. It serves only the route whose
    access was checked."""

    async def dispatch(http: HttpRequest) -> ASGIApp:
        route = methods["GET" if http.method == "HEAD" else http.method]
        checked: Route | None = http.scope["podway.route"]
        if checked is not route:
            raise PathNotFound(f"No endpoint at {http.scope['path'][:200]}.")
        return await route.respond(http)

    return dispatch
