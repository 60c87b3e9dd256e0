"""Group: one model with its workers, its pages and its scheduler, which may be unloaded.

    unloaded ──load──▶ loading ──▶ loaded ──unload──▶ unloading ──last request ends──▶ unloaded
                          └──▶ failed (the next request tries again)

A request holds a lease on its model (`gateway.groups.leases`), and a model is closed only when no
lease is active. `Serving` is everything that the routes use of a model while it is loaded.
"""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field
from enum import Enum

from engine.control.scheduler import IterationScheduler
from engine.errors import Unavailable
from engine.pooling import PoolingReport
from engine.ports import Clock
from engine.replicas.replicas import ServingEngine
from gateway.access.grammar_check import GrammarCheck
from gateway.groups.leases import Leases
from gateway.groups.terms import Terms
from gateway.images.reader import ImageReader
from gateway.loras import LoraRegistry
from gateway.observe.live import LiveView
from gateway.observe.readings import Readings
from gateway.observe.timelines import Timelines
from gateway.ports import ChatTemplate, Dialect, Tokenizer
from gateway.schema.fields.sampling import SamplingDefaults, Vocabulary

TEXT_ONLY = "this model reads text only"


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model's name in requests and responses, and its text adapters.

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
    images: ImageReader | None = None
    no_images: str = TEXT_ONLY  # why there are no `images`

    @property
    def names(self) -> tuple[str, ...]:
        """All names that requests may use."""
        return (self.name, *self.aliases)


@dataclass(frozen=True, slots=True)
class Serving:
    """A loaded model. `num_bytes` are its weights, KV and states in memory."""

    engine: ServingEngine
    model: ServedModel
    grammars: GrammarCheck
    readings: Readings
    loras: LoraRegistry
    live: LiveView = field(default_factory=LiveView)
    timelines: Timelines = field(default_factory=Timelines)
    num_bytes: int = 0


OpenServing = Callable[[], AbstractAsyncContextManager["Serving"]]  # the model is loaded inside

UNMEASURED_LOAD_SECONDS = 10.0  # forecast of the first load
RETRY_SECONDS = 10.0  # after a failed load, before the next one


class Status(Enum):
    """The status of a model in `/v1/models`, under llama.cpp's names where it has one."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"
    UNLOADING = "unloading"  # its last requests are computed; new ones wait
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Deployment:
    """What is known of a model before it is loaded; `num_bytes` is an estimate of its memory."""

    name: str
    aliases: tuple[str, ...] = ()
    loras: tuple[str, ...] = ()  # the names of its LoRA adapters
    terms: Terms = field(default_factory=Terms)
    num_bytes: int = 0
    created: int = 0  # in Unix seconds

    @property
    def names(self) -> tuple[str, ...]:
        """The names under which requests may use the model and its adapters."""
        return (self.name, *self.aliases, *self.loras)


def _forget(seconds: float) -> None:
    """The forecast of the first load after a start is a default."""


class Group:
    """A model that is loaded or not. `num_bytes` are the bytes that it has, or would have."""

    def __init__(
        self,
        deployment: Deployment,
        open_serving: OpenServing,
        clock: Clock,
        load_seconds: float = UNMEASURED_LOAD_SECONDS,
        on_measured: Callable[[float], object] = _forget,
    ) -> None:
        """`load_seconds` is how long the last load took; `on_measured` is called with the seconds
        of each load."""
        self.deployment = deployment
        self.status = Status.UNLOADED
        self.num_bytes = deployment.num_bytes
        self.load_seconds = load_seconds
        self.leases = Leases(clock)
        self.error = ""  # why it could not be loaded
        self._open = open_serving
        self._on_measured = on_measured
        self._clock = clock
        self._serving: Serving | None = None
        self._stack = AsyncExitStack()
        self._changed_at = clock()  # when `status` changed
        self.on_change: Callable[[Group], object] = _ignore  # called when the status changes

    def __repr__(self) -> str:
        return f"<Group {self.name!r} {self.status.value} leases={len(self.leases)}>"

    @classmethod
    def of(cls, serving: Serving, clock: Clock) -> "Group":
        """The group of a model that is loaded and stays loaded."""
        model = serving.model
        group = cls(Deployment(model.name, model.aliases), _nothing, clock)
        group._serving = serving
        group.change(Status.LOADED)
        return group

    @property
    def name(self) -> str:
        return self.deployment.name

    @property
    def terms(self) -> Terms:
        return self.deployment.terms

    @property
    def names(self) -> tuple[str, ...]:
        """The names that requests may use now."""
        serving = self._serving
        if serving is None:
            return self.deployment.names
        return (*serving.model.names, *serving.loras.served)

    @property
    def serving(self) -> Serving:
        """The loaded model. Raises `Unavailable` if it is not loaded."""
        if self._serving is None:
            raise Unavailable(f"The model {self.name!r} is not loaded.", self.load_seconds)
        return self._serving

    @property
    def loaded(self) -> Serving | None:
        """The loaded model; None if it is not loaded."""
        return self._serving

    @property
    def accepts(self) -> bool:
        """Whether the model is loaded, and stays so for a request that comes now."""
        return self.status is Status.LOADED

    @property
    def is_in_memory(self) -> bool:
        return self.status in (Status.LOADING, Status.LOADED, Status.UNLOADING)

    @property
    def is_used(self) -> bool:
        """Whether a request of the model has not ended."""
        if (serving := self._serving) is None:
            return len(self.leases) > 0
        pools = [engine.scheduler.pool for engine in serving.engine.engines]
        return len(self.leases) > 0 or any(pools)

    @property
    def since(self) -> float:
        """Seconds for which it has had its status."""
        return self._clock() - self._changed_at

    @property
    def seconds_left(self) -> float:
        """The most seconds until all of its requests have ended, if there come no more."""
        if (serving := self._serving) is None:
            return 0.0
        return max(_seconds_left(engine.scheduler) for engine in serving.engine.engines)

    def change(self, status: Status) -> None:
        """Change the status, and with it whether requests that wait for the model have it."""
        self.status = status
        self._changed_at = self._clock()
        if status is Status.LOADED:
            self.leases.open()
        else:
            self.leases.shut()
        self.on_change(self)

    async def open(self) -> Serving:
        """Load the model, which accepts requests when its status is changed to LOADED. Raises
        `StartupError`."""
        began = self._clock()
        self.change(Status.LOADING)
        stack = AsyncExitStack()
        try:
            self._serving = await stack.enter_async_context(self._open())
        except BaseException:
            self.change(Status.UNLOADED)
            raise
        self._stack = stack
        self.load_seconds = self._clock() - began
        self._on_measured(self.load_seconds)
        self.num_bytes = self._serving.num_bytes or self.num_bytes
        self.leases.used_at = self._clock()
        self.error = ""
        return self._serving

    async def drain(self) -> None:
        """Accept no request any more, and wait until those that are accepted have ended."""
        self.change(Status.UNLOADING)
        await self.leases.wait_until_free()
        await self.serving.engine.drain(None)

    async def close(self) -> None:
        """End the workers. Idempotent."""
        stack, self._stack = self._stack, AsyncExitStack()
        self._serving = None
        try:
            await stack.aclose()
        finally:
            self.change(Status.UNLOADED)

    def fail(self, error: str) -> None:
        """The model could not be loaded, or its workers cannot be restarted."""
        self.error = error
        self.change(Status.FAILED)

    def check_retry(self) -> None:
        """Raise `Unavailable` if a load has failed just now."""
        left = RETRY_SECONDS - self.since
        if self.status is Status.FAILED and left > 0:
            raise Unavailable(f"The model {self.name!r} cannot be loaded: {self.error}", left)


def _seconds_left(scheduler: IterationScheduler) -> float:
    tokens = sum(request.spec.max_tokens - request.produced for request in scheduler.pool)
    return scheduler.cost.seconds_for(tokens + scheduler.pool.waiting_tokens)


def _ignore(group: Group) -> None:
    """Nobody watches the status."""


def _nothing() -> AbstractAsyncContextManager[Serving]:
    raise AssertionError("the model is always loaded")
