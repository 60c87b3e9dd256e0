"""Service: everything the routes use, built once at startup and never modified."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from engine.loop import Engine
from engine.policy import PolicySettings
from engine.pooling import PoolingReport
from engine.ports import Clock
from gateway.access.callers import BodyLimits, Caller
from gateway.access.grammar_check import GrammarCheck
from gateway.access.keys import Keys
from gateway.access.origins import OriginPolicy
from gateway.access.quotas import Quotas
from gateway.errors import ModelNotFound, UnsupportedByModel
from gateway.loras import LoraNames
from gateway.observe.backpressure import LoopWatch
from gateway.observe.exposition import Exposition
from gateway.observe.live import LiveView
from gateway.observe.readings import Readings
from gateway.observe.request_log import RequestLog
from gateway.observe.timelines import Timelines
from gateway.observe.traces import Traces
from gateway.ports import ChatTemplate, Dialect, Tokenizer
from gateway.schema.fields.sampling import SamplingDefaults, Vocabulary
from gateway.schema.rendering import ResponseHeader
from gateway.store.running import RunningResponses
from gateway.store.store import Store

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest

    from engine.request import Request

SEED_BITS = 63
HOLD_SECONDS = 1.0
PING_SECONDS = 15.0
STALL_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The one model of this server: its name in requests and responses, and its text adapters.

    `created` is in Unix seconds. Without a `template` there is no chat; without a `dialect` the
    output is content only.
    """

    name: str
    created: int
    fingerprint: str
    vocabulary: Vocabulary
    tokenizer: Tokenizer
    template: ChatTemplate | None
    dialect: Dialect | None = None
    aliases: tuple[str, ...] = ()  # further names
    sampling_defaults: SamplingDefaults = SamplingDefaults()  # noqa: RUF009 # frozen
    trusts_request_templates: bool = False  # requests may have a `chat_template`
    pooling: PoolingReport | None = None  # None: it generates text

    @property
    def names(self) -> tuple[str, ...]:
        """All names that requests may use."""
        return (self.name, *self.aliases)


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

    engine: Engine
    model: ServedModel
    grammars: GrammarCheck
    readings: Readings
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
    running: RunningResponses = field(default_factory=RunningResponses)
    origins: OriginPolicy = field(default_factory=OriginPolicy)
    rejects_unknown_fields: bool = False
    is_strict_about_max_tokens: bool = False  # completions always are
    policies: PolicySettings = PolicySettings()  # noqa: RUF009 # frozen
    live: LiveView = field(default_factory=LiveView)
    timelines: Timelines = field(default_factory=Timelines)
    traces: Traces | None = None
    loras: LoraNames = field(default_factory=LoraNames)
    has_page: bool = True

    def check_model(self, name: str) -> None:
        """Raise `ModelNotFound` unless this is a name of the served model or of a LoRA adapter."""
        if name not in self.model.names and self.loras.find(name) is None:
            raise ModelNotFound(name, (*self.model.names, *self.loras.served))

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

    def num_written(self, request: "Request") -> int:
        """Prompt tokens that a request adds to the prefix cache, in full blocks; 0 before it has
        started."""
        scheduler = self.engine.scheduler
        if not scheduler.settings.reuses_prefixes or request.admitted_at is None:
            return 0
        size = scheduler.kv.block_size
        known = max(request.num_cached, request.spec.shared_len // size * size)
        return max(0, request.prompt_len // size * size - known)

    def room_for_output(self, prompt_len: int) -> int:
        """The most output tokens after such a prompt; `ContextTooLong` if there are none."""
        self.engine.check_fits(prompt_len, 1)
        scheduler = self.engine.scheduler
        room = min(scheduler.settings.max_model_len, scheduler.kv.longest_request + 1)
        return room - prompt_len


def _purpose(pooling: PoolingReport) -> str:
    if pooling.task == "embed":
        return "it is served for /v1/embeddings, /v1/rerank and /score"
    return "it is served for /v1/rerank and /score"


def unix_now() -> int:
    """Wall time in seconds."""
    return int(datetime.now(UTC).timestamp())


def service_of(http: "HttpRequest") -> Service:
    """The service behind the app that serves this HTTP request."""
    service = http.app.state.service
    assert isinstance(service, Service), "the app was built with its service"
    return service


def caller_of(http: "HttpRequest") -> Caller:
    """The caller of this HTTP request, set by `gateway.web.middleware` before any route runs."""
    caller = http.scope["podway.caller"]
    assert isinstance(caller, Caller), "the middleware sets a caller for every HTTP request"
    return caller
