"""Service: what the routes need, built once by the doorway and never written to."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.loop import Engine
from engine.ports import Clock
from gateway.access.callers import BodyLimits, Caller
from gateway.access.keys import Keys
from gateway.access.quotas import Quotas
from gateway.generation.active import ActiveResponses
from gateway.generation.grammar_check import GrammarCheck
from gateway.observe.backpressure import LoopWatch
from gateway.observe.exposition import Exposition
from gateway.ports import ChatTemplate, Dialect, Tokenizer
from gateway.schema.fields.sampling import Vocabulary
from gateway.schema.rendering import ResponseHeader
from gateway.store.store import Store

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest

SEED_BITS = 63
HOLD_SECONDS = 1.0
PING_SECONDS = 15.0
STALL_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The one model of this server: its name on the wire, and how it reads text.

    `created` is Unix seconds. Without a `template` the model has no chat, without a `dialect` its
    answers are content alone.
    """

    name: str
    created: int
    fingerprint: str
    vocabulary: Vocabulary
    tokenizer: Tokenizer
    template: ChatTemplate | None
    dialect: Dialect | None = None


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds: a status line is held, a silent stream gets a ping, a stuck write is given up."""

    hold: float = HOLD_SECONDS
    ping: float = PING_SECONDS
    stall: float = STALL_SECONDS


@dataclass(frozen=True, slots=True)
class Service:
    """Everything behind the routes. `unix_now` is wall time in seconds, for dates only."""

    engine: Engine
    model: ServedModel
    grammars: GrammarCheck
    exposition: Exposition
    watch: LoopWatch
    clock: Clock
    unix_now: Callable[[], int]
    random: random.Random
    keys: Keys
    limits: BodyLimits
    pace: Pace
    store: Store
    quotas: Quotas = field(default_factory=Quotas)
    running: ActiveResponses = field(default_factory=ActiveResponses)
    cors_origins: Sequence[str] = ()

    def header(self, prefix: str) -> ResponseHeader:
        """The identity of a new response, `prefix-` and 24 hex digits."""
        return ResponseHeader(
            response_id=self.new_id(f"{prefix}-"),
            created=self.unix_now(),
            model=self.model.name,
            fingerprint=self.model.fingerprint,
        )

    def new_id(self, prefix: str) -> str:
        """A name that nothing else has."""
        return f"{prefix}{self.random.getrandbits(96):024x}"

    def seed(self) -> int:
        """A seed for a request that brought none."""
        return self.random.getrandbits(SEED_BITS)

    def room_for_output(self, prompt_len: int) -> int:
        """Tokens that an answer to such a prompt may have; `ContextTooLong` if there are none."""
        self.engine.check_fits(prompt_len, 1)
        scheduler = self.engine.scheduler
        room = min(scheduler.settings.max_model_len, scheduler.ledger.num_slots + 1)
        return room - prompt_len


def service_of(http: "HttpRequest") -> Service:
    """The service behind the app that serves this HTTP request."""
    service = http.app.state.service
    assert isinstance(service, Service), "the app was built with its service"
    return service


def caller_of(http: "HttpRequest") -> Caller:
    """Who asks; set by `gateway.web.app` before any route runs."""
    caller = http.scope["podway.caller"]
    assert isinstance(caller, Caller), "the app names every caller"
    return caller
