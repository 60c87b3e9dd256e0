"""Service: everything the routes use, built once at startup and never modified.

A server may have several models (`gateway.groups`). The service of a request is bound to the one
that the request names; `Service.at` keeps that model loaded.
"""

import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

import msgspec
from starlette.requests import Request as HttpRequest

from engine.lora import LoraAdapter
from engine.pooling import PoolingReport
from engine.ports import Clock
from engine.replicas.replicas import ServingEngine
from gateway.access.bodies import BodyLimits
from gateway.access.callers import Caller, Quotas
from gateway.access.grammar_check import GrammarCheck
from gateway.access.keys import Keys
from gateway.access.origins import OriginPolicy
from gateway.access.retries import Retries
from gateway.errors import ModelNotFound, UnsupportedByModel
from gateway.groups.group import Group, ServedModel
from gateway.groups.groups import Groups
from gateway.images.reader import Sender
from gateway.loras import LoraRegistry
from gateway.observe.backpressure import LoopWatch
from gateway.observe.exposition import Exposition
from gateway.observe.live import LiveView
from gateway.observe.readings import Readings
from gateway.observe.request_log import RequestLog
from gateway.observe.timelines import Timelines
from gateway.observe.traces import Traces
from gateway.schema.rendering import ResponseHeader
from gateway.store.running import RunningResponses
from gateway.store.store import Store

SEED_BITS = 63
HOLD_SECONDS = 1.0
PING_SECONDS = 15.0
STALL_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds of a stream: the status line is held back for `hold`, a ping follows `ping` without
    an event, a write blocked for `stall` ends the stream. `whole`: how often a space is sent
    before the body of a response that is not streamed; 0: never."""

    hold: float = HOLD_SECONDS
    ping: float = PING_SECONDS
    stall: float = STALL_SECONDS
    whole: float = 0.0


@dataclass(frozen=True, slots=True)
class Service:
    """Everything the routes use. `unix_now` is wall time in seconds, used for dates only."""

    groups: Groups
    group: Group  # the model of the request, or the default
    exposition: Exposition
    watch: LoopWatch
    clock: Clock
    unix_now: Callable[[], int]
    random: random.Random
    keys: Keys
    limits: BodyLimits
    pace: Pace
    store: Store
    request_log: RequestLog
    quotas: Quotas = field(default_factory=Quotas)
    retries: Retries = field(default_factory=Retries)
    running: RunningResponses = field(default_factory=RunningResponses)
    origins: OriginPolicy = field(default_factory=OriginPolicy)
    rejects_unknown_fields: bool = False
    is_strict_about_max_tokens: bool = False  # completions always are
    traces: Traces | None = None
    has_page: bool = True
    cpu_clock: Clock = time.thread_time  # CPU seconds of the calling thread

    @property
    def engine(self) -> ServingEngine:
        """The engine of the request's model. As all properties of a loaded model, it raises
        `Unavailable` if the model is not loaded."""
        return self.group.serving.engine

    @property
    def model(self) -> ServedModel:
        return self.group.serving.model

    @property
    def grammars(self) -> GrammarCheck:
        return self.group.serving.grammars

    @property
    def readings(self) -> Readings:
        return self.group.serving.readings

    @property
    def live(self) -> LiveView:
        return self.group.serving.live

    @property
    def timelines(self) -> Timelines:
        return self.group.serving.timelines

    @property
    def loras(self) -> LoraRegistry:
        return self.group.serving.loras

    def bound_to(self, group: Group) -> "Service":
        """The service of another model, loaded or not."""
        return self if group is self.group else replace(self, group=group)

    @asynccontextmanager
    async def at(self, group: Group) -> AsyncIterator["Service"]:
        """The service of a model, which is loaded first and stays loaded inside."""
        with group.leases.claim() as lease:
            await self.groups.loads.ensure(group, lease)
            yield self.bound_to(group)

    def at_model_of(self, body: bytes) -> AbstractAsyncContextManager["Service"]:
        """The service of the model that a body of JSON names, or of the default (`at`). Raises
        `ModelNotFound`."""
        groups = self.groups
        return self.at(groups.default if groups.are_fixed else groups.find(model_named(body)))

    def check_model(self, name: str) -> None:
        """Raise `ModelNotFound` unless this is a name of the served model or of a LoRA adapter."""
        if name not in self.model.names and name not in self.loras.served:
            raise ModelNotFound(name, self.groups.names)

    def lora_of(self, name: str) -> LoraAdapter | None:
        """The adapter of this name; None for a name of the served model."""
        served = self.loras.served.get(name)
        return None if served is None else served.adapter

    def check_generates(self, name: str) -> None:
        """Raise `ModelNotFound` for another model's name, and `UnsupportedByModel` if the model
        does not generate text."""
        self.check_model(name)
        if self.model.pooling is not None:
            raise UnsupportedByModel(
                f"The model {name!r} does not generate text: {_purpose(self.model.pooling)}.",
                "model",
            )

    def check_pools(self, name: str) -> PoolingReport:
        """What the model pools; raises `ModelNotFound`, or `UnsupportedByModel` if it generates."""
        self.check_model(name)
        if self.model.pooling is None:
            raise UnsupportedByModel(
                f"The model {name!r} generates text and makes no embeddings or scores. Serve an "
                "embedding model, or start the server with --task embed or --task score.",
                "model",
            )
        return self.model.pooling

    def check_embeds(self, name: str) -> PoolingReport:
        """What the model embeds; raises `ModelNotFound`, or `UnsupportedByModel` if it does not."""
        pooling = self.check_pools(name)
        if pooling.task != "embed":
            raise UnsupportedByModel(
                f"The model {name!r} makes no embeddings: {_purpose(pooling)}.", "model"
            )
        return pooling

    def image_sender(self, caller: Caller) -> Sender:
        """The sender of the images of a request, which may be files of its caller."""
        return Sender(caller, self.store.files, self.unix_now())

    def header(self, prefix: str, model: str) -> ResponseHeader:
        """The header of a new response; its id is `prefix-` and 24 hex digits.

        `model` is the name that the request used.
        """
        return ResponseHeader(
            response_id=self.new_id(f"{prefix}-"),
            created=self.unix_now(),
            model=model,
            fingerprint=self.model.fingerprint,
        )

    def new_id(self, prefix: str) -> str:
        """A unique id: `prefix` and 24 hex digits."""
        return f"{prefix}{self.random.getrandbits(96):024x}"

    def seed(self) -> int:
        """A random seed, for a request without one."""
        return self.random.getrandbits(SEED_BITS)

    def room_for_output(self, prompt_len: int) -> int:
        """The most output tokens after such a prompt; `ContextTooLong` if there are none."""
        self.engine.check_fits(prompt_len, 1)
        return self.engine.scheduler.max_request_len - prompt_len


class _Named(msgspec.Struct):
    model: str | None = None


def model_named(body: bytes) -> str | None:
    """The field `model` of a body; None without one, and for a body that is not such an object."""
    try:
        return _NAMED.decode(body).model
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


_NAMED = msgspec.json.Decoder(_Named)


def _purpose(pooling: PoolingReport) -> str:
    if pooling.task == "embed":
        return "it is served for /v1/embeddings, /v1/rerank and /score"
    return "it is served for /v1/rerank and /score"


def unix_now() -> int:
    """Wall time in seconds."""
    return int(datetime.now(UTC).timestamp())


def service_of(http: HttpRequest) -> Service:
    """The service of the model that this HTTP request names, or of the default model."""
    service = http.scope.get("podway.service") or http.app.state.service
    assert isinstance(service, Service), "the app was built with its service"
    return service


def caller_of(http: HttpRequest) -> Caller:
    """The caller of this HTTP request, set by `gateway.web.middleware` before any route runs."""
    caller = http.scope["podway.caller"]
    assert isinstance(caller, Caller), "the middleware sets a caller for every HTTP request"
    return caller
