"""Lower bounds of step times: the bytes and operations of a step over the machine's limits.

A step reads every matrix once, and the KV that its tokens attend to, and multiplies each token by
each matrix. In the last layer only the rows that sample need more than the matrices of k and v.
Of a mixture of experts a step reads at least those that one token uses; how many more depends on
what its other tokens choose.
Norms, embeddings and biases are small and left out, so no bound is too high.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from engine.errors import StartupError
from engine.worker_settings import WEIGHT_BYTES, WorkerReport

# Products of bfloat16 numbers for one of attention, at least, by the dtype of the cache: AMX
# computes two for bfloat16, AVX-512 BF16 one.
SPLIT_PRODUCTS = {"float16": 3, "bfloat16": 1, "int8": 1}
LOGIT_BYTES = 4
MAX_KV_BYTES = 4  # bytes of a key or value element


class Limit(NamedTuple):
    """The best measured rate per second, and the kernel that reached it."""

    rate: float
    by: str


class LowerBound(NamedTuple):
    """The minimum seconds of a step, by its bytes and by its operations."""

    reading: float
    computing: float

    @property
    def seconds(self) -> float:
        return max(self)

    @property
    def bound(self) -> str:
        return "read" if self.reading >= self.computing else "compute"


class Work(NamedTuple):
    """A step of equal requests: each computes `num_tokens` and then has `context` cached tokens."""

    num_requests: int
    num_tokens: int
    context: int


@dataclass(frozen=True, slots=True)
class WeightSizes:
    """Matrix elements and attention sizes of a model, from its config.json.

    In a mixture of experts each token uses `top_k` of `num_experts` in every layer; those before
    the first with experts (DeepSeek) count as the others do.
    """

    num_layers: int
    kv_elements: int  # elements of the matrices that make k and v, in one layer
    other_elements: int  # elements of the other matrices of a layer that one token uses
    head_elements: int
    attention_width: int  # heads × head size
    kv_width: int  # KV heads × head size
    max_positions: int
    window: int | None
    num_experts: int = 0
    top_k: int = 0
    expert_elements: int = 0  # elements of one expert

    @classmethod
    def of(cls, config: Mapping[str, object]) -> "WeightSizes":
        """Read a GPT-2 or Llama-like config. Raises `StartupError` for a missing field."""
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
        head_dim = config.get("head_dim")
        dim = head_dim if isinstance(head_dim, int) else hidden // heads
        kv_heads = _number(config, "num_key_value_heads") if "num_key_value_heads" in config else 0
        width, kv_width = heads * dim, (kv_heads or heads) * dim
        window = config.get("sliding_window")
        has_window = isinstance(window, int) and config.get("use_sliding_window", True)
        num_experts, top_k, expert = _experts(config, hidden)
        shared_inner = config.get("shared_expert_intermediate_size")
        shared = hidden * (3 * shared_inner + 1) if isinstance(shared_inner, int) else 0
        shared += expert * _number(config, "n_shared_experts", 0)
        kv_elements, q_and_out, attended = 2 * hidden * kv_width, 2 * hidden * width, width
        if "kv_lora_rank" in config:
            kv_elements, q_and_out, attended, kv_width = _latent(config, hidden, heads)
        is_gated = "ffn_dim" not in config  # OPT
        inner = _number(config, "intermediate_size" if is_gated else "ffn_dim")
        mlp = (2 + is_gated) * hidden * inner
        return cls(
            num_layers=_number(config, "num_hidden_layers"),
            kv_elements=kv_elements,
            other_elements=q_and_out
            + (top_k * expert + num_experts * hidden + shared if num_experts else mlp),
            head_elements=hidden * _number(config, "vocab_size"),
            attention_width=attended,
            kv_width=kv_width,
            max_positions=_number(config, "max_position_embeddings"),
            window=window if has_window and isinstance(window, int) else None,
            num_experts=num_experts,
            top_k=top_k,
            expert_elements=expert,
        )

    @property
    def elements(self) -> int:
        """Elements of all matrices but the embedding."""
        idle = (self.num_experts - self.top_k) * self.expert_elements
        layer = self.kv_elements + self.other_elements + idle
        return self.num_layers * layer + self.head_elements

    @property
    def read_elements(self) -> int:
        """Elements of the matrices that every step reads."""
        return self.num_layers * (self.kv_elements + self.other_elements) + self.head_elements

    def block_bytes(self, block_size: int) -> int:
        """Bytes of a KV block in float32, the largest format."""
        return 2 * self.num_layers * block_size * self.kv_width * MAX_KV_BYTES

    def products(self, work: Work) -> int:
        """Operations of the linear layers."""
        tokens, rows = work.num_requests * work.num_tokens, work.num_requests
        layer = self.kv_elements + self.other_elements
        full = (self.num_layers - 1) * layer + self.kv_elements
        return 2 * (tokens * full + rows * (self.other_elements + self.head_elements))

    def attention(self, work: Work) -> int:
        """Operations of causal attention: scores and weighted sums of values."""
        pairs = _attended(work.context, self.window) - _attended(
            work.context - work.num_tokens, self.window
        )
        last = min(work.context, self.window or work.context)
        all_pairs = (self.num_layers - 1) * pairs + last
        return 4 * self.attention_width * work.num_requests * all_pairs


def bytes_of(sizes: WeightSizes, work: Work, report: WorkerReport) -> int:
    """The bytes that a step reads and writes at least, on the worker that `report` describes."""
    attended = min(work.context, sizes.window or work.context)
    token_bytes = report.bytes_per_block / report.block_size
    written = work.num_requests * (work.num_tokens * token_bytes + LOGIT_BYTES * report.vocab_size)
    weights = sizes.read_elements * WEIGHT_BYTES[weights_of(report)]
    return int(weights + work.num_requests * attended * token_bytes + written)


def lower_bound_of(
    sizes: WeightSizes,
    work: Work,
    report: WorkerReport,
    limits: Mapping[str, Limit],
    read_seconds: float | None = None,
) -> LowerBound:
    """The lower bound of a step; `read_seconds` are those of a plain read of its bytes, measured
    beside it, otherwise the best read rate counts."""
    products = sizes.products(work) / limits[weights_of(report)].rate
    rates = {name: limit.rate for name, limit in limits.items()}
    attention = sizes.attention(work) / attention_rate(rates, report.dtype, report.kv_dtype)
    if read_seconds is None:
        read_seconds = bytes_of(sizes, work, report) / limits["read"].rate
    return LowerBound(read_seconds, products + attention)


def attention_rate(rates: Mapping[str, float], dtype: str, kv_dtype: str) -> float:
    """Operations per second of attention at most: in the dtype of activations, or of bfloat16
    parts."""
    if kv_dtype not in SPLIT_PRODUCTS or "bfloat16" not in rates:
        return rates[dtype]
    return max(rates[dtype], rates["bfloat16"] / SPLIT_PRODUCTS[kv_dtype])


def weights_of(report: WorkerReport) -> str:
    """The data type of the linear layers, without the rest of the format's name."""
    return report.weights.partition(" ")[0]


def _attended(length: int, window: int | None) -> int:
    """Pairs of a query and a key that it attends to, over the first `length` tokens."""
    if window is None or length <= window:
        return length * (length + 1) // 2
    return window * (window + 1) // 2 + (length - window) * window


def _experts(config: Mapping[str, object], hidden: int) -> tuple[int, int, int]:
    """The number of experts, how many a token uses, and the matrix elements of one; or zeros."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    count = next((config[name] for name in names if name in config), 0)
    if not isinstance(count, int) or not count:
        return 0, 0, 0
    has_own = "moe_intermediate_size" in config
    inner = _number(config, "moe_intermediate_size" if has_own else "intermediate_size")
    return count, _number(config, "num_experts_per_tok"), 3 * hidden * inner


def _latent(config: Mapping[str, object], hidden: int, heads: int) -> tuple[int, int, int, int]:
    """Sizes of attention to latent vectors (MLA): elements of the matrix that makes them and of
    the others, the mean width of scores and of sums in all heads, that of keys of all heads."""
    names = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    latent, turned, plain, value = (_number(config, name) for name in names)
    q_width, rank = heads * (plain + turned), _number(config, "q_lora_rank", 0)
    q = rank * (hidden + q_width) if rank else hidden * q_width
    others = q + latent * heads * (plain + value) + heads * value * hidden
    return hidden * (latent + turned), others, heads * (2 * latent + turned) // 2, q_width


def _number(config: Mapping[str, object], name: str, default: int | None = None) -> int:
    value = config.get(name)
    value = default if value is None else value
    if not isinstance(value, int):
        raise StartupError(f"config.json: {name} is {value!r}, expected a positive integer")
    return value
