"""How fast a step could be: what it must read and compute, over what the machine can do.

A step reads every matrix once and the KV that its tokens see, and multiplies each token by each
matrix; of the last layer only what makes its KV, except in rows that draw. Norms, embeddings
and biases are small beside these and left out, so that no floor is too high.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from engine.errors import StartupError
from engine.step import WorkerReport

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "fp8": 1}
LOGIT_BYTES = 4


class Limit(NamedTuple):
    """The best rate that was measured, a second, and who reached it."""

    rate: float
    by: str


class LowerBound(NamedTuple):
    """Seconds that a step takes at least, by its bytes and by its operations."""

    reading: float
    computing: float

    @property
    def seconds(self) -> float:
        return max(self)

    @property
    def bound(self) -> str:
        return "read" if self.reading >= self.computing else "compute"


class Work(NamedTuple):
    """A step of requests alike: each computes `num_tokens` and then has `context` tokens cached."""

    num_requests: int
    num_tokens: int
    context: int


@dataclass(frozen=True, slots=True)
class WeightSizes:
    """Matrix elements and attention of a model, as its config.json says them."""

    num_layers: int
    kv_elements: int  # of the matrices that make k and v, in one layer
    other_elements: int  # of the other matrices of a layer
    head_elements: int
    attention_width: int  # heads × head size
    kv_width: int  # the same of keys, or values
    max_positions: int
    window: int | None

    @classmethod
    def of(cls, config: Mapping[str, object]) -> "WeightSizes":
        """Raises `StartupError` where a field is missing."""
        if "n_embd" in config:
            hidden, inner = _number(config, "n_embd"), config.get("n_inner")
            mlp = 2 * hidden * (inner if isinstance(inner, int) else 4 * hidden)
            return cls(
                num_layers=_number(config, "n_layer"),
                kv_elements=2 * hidden * hidden,
                other_elements=2 * hidden * hidden + mlp,
                head_elements=hidden * _number(config, "vocab_size"),
                attention_width=hidden,
                kv_width=hidden,
                max_positions=_number(config, "n_positions"),
                window=None,
            )
        hidden, heads = _number(config, "hidden_size"), _number(config, "num_attention_heads")
        named = config.get("head_dim")
        dim = named if isinstance(named, int) else hidden // heads
        kv_heads = _number(config, "num_key_value_heads") if "num_key_value_heads" in config else 0
        width, kv_width = heads * dim, (kv_heads or heads) * dim
        window = config.get("sliding_window")
        has_window = isinstance(window, int) and config.get("use_sliding_window", True)
        return cls(
            num_layers=_number(config, "num_hidden_layers"),
            kv_elements=2 * hidden * kv_width,
            other_elements=2 * hidden * width + 3 * hidden * _number(config, "intermediate_size"),
            head_elements=hidden * _number(config, "vocab_size"),
            attention_width=width,
            kv_width=kv_width,
            max_positions=_number(config, "max_position_embeddings"),
            window=window if has_window and isinstance(window, int) else None,
        )

    @property
    def elements(self) -> int:
        """Of all matrices that a step reads."""
        return self.num_layers * (self.kv_elements + self.other_elements) + self.head_elements

    def block_bytes(self, block_size: int) -> int:
        """Bytes of a KV block in float32: no format takes more."""
        return 2 * self.num_layers * block_size * self.kv_width * ITEM_BYTES["float32"]

    def products(self, work: Work) -> int:
        """Operations of the linears."""
        tokens, rows = work.num_requests * work.num_tokens, work.num_requests
        layer = self.kv_elements + self.other_elements
        full = (self.num_layers - 1) * layer + self.kv_elements
        return 2 * (tokens * full + rows * (self.other_elements + self.head_elements))

    def attention(self, work: Work) -> int:
        """Operations of attention: scores and sums of values, causal."""
        pairs = _seen(work.context, self.window) - _seen(
            work.context - work.num_tokens, self.window
        )
        last = min(work.context, self.window or work.context)
        seen = (self.num_layers - 1) * pairs + last
        return 4 * self.attention_width * work.num_requests * seen


def lower_bound_of(
    sizes: WeightSizes, work: Work, report: WorkerReport, limits: Mapping[str, Limit]
) -> LowerBound:
    """Of a step on the worker of this report."""
    seen = min(work.context, sizes.window or work.context)
    token_bytes = report.bytes_per_block / report.block_size
    written = work.num_requests * (work.num_tokens * token_bytes + LOGIT_BYTES * report.vocab_size)
    weights = sizes.elements * ITEM_BYTES[weights_of(report)]
    num_bytes = weights + work.num_requests * seen * token_bytes + written
    products = sizes.products(work) / limits[weights_of(report)].rate
    attention = sizes.attention(work) / limits[report.dtype].rate
    return LowerBound(num_bytes / limits["read"].rate, products + attention)


def weights_of(report: WorkerReport) -> str:
    """The format of the linear layers, without how it is computed with."""
    return report.weights.partition(" ")[0]


def _seen(length: int, window: int | None) -> int:
    """Pairs of a token and one that it sees, over the first `length` tokens."""
    if window is None or length <= window:
        return length * (length + 1) // 2
    return window * (window + 1) // 2 + (length - window) * window


def _number(config: Mapping[str, object], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int):
        raise StartupError(f"config.json: {name} is {value!r}, expected a positive integer")
    return value
