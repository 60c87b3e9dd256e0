"""Serving: everything that the routes use of one model while it is loaded."""

from dataclasses import dataclass, field

from engine.pooling import PoolingReport
from engine.replicas.replicas import ServingEngine
from gateway.access.grammar_check import GrammarCheck
from gateway.images.reader import ImageReader
from gateway.loras import LoraNames
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
    live: LiveView = field(default_factory=LiveView)
    timelines: Timelines = field(default_factory=Timelines)
    loras: LoraNames = field(default_factory=LoraNames)
    num_bytes: int = 0
