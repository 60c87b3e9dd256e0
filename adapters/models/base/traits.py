"""How families differ from Llama, as data that the shared base (`rotary`) reads."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from adapters.models.base.fields import Fields
from engine.errors import StartupError
from engine.worker.ports import AttentionOptions

FULL, SLIDING = "full_attention", "sliding_attention"


class NormNames(NamedTuple):
    """The norms of a layer by their names in the checkpoint; None where there is no such norm."""

    attention: str | None = "input_layernorm"
    mlp: str | None = "post_attention_layernorm"
    attention_post: str | None = None
    mlp_post: str | None = None


class LinearNames(NamedTuple):
    """Names in the checkpoint: of the last norm, of the norms of q and k and the linear behind the
    attention, of the MLP and its linears, of which gate and up may be one tensor, and of the
    attention."""

    norm: str = "norm"
    q_norm: str = "q_norm"
    k_norm: str = "k_norm"
    out: str = "o_proj"
    mlp: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    gate_up: str = "gate_up_proj"
    attention: str = "self_attn"


LINEARS = LinearNames()
PRE_NORMS = NormNames()
ONLY_POST_NORMS = NormNames(None, None, "post_attention_layernorm", "post_feedforward_layernorm")
FOUR_NORMS = NormNames(
    "input_layernorm",
    "pre_feedforward_layernorm",
    "post_attention_layernorm",
    "post_feedforward_layernorm",
)


@dataclass(frozen=True, slots=True)
class FamilyTraits:
    """How a family or checkpoint differs from Llama.

    `qk_norm` is "head" for an RMS norm of each head of q and k (Qwen3), "width" for one over all
    heads together (OLMo 2). `is_fused`: the file has `qkv_proj` and `gate_up_proj` (Phi-3);
    `has_fused_mlp`: it has only the latter (GLM).
    `norm_offset` is added to the weights of norms (Gemma, Nemotron). What a layer adds to the
    residual stream is multiplied by `residual_scale`, embeddings by `embedding_scale`, logits by
    `logit_scale` (Granite).
    """

    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: str = ""
    is_fused: bool = False
    has_fused_mlp: bool = False
    norms: NormNames = PRE_NORMS
    names: LinearNames = LINEARS
    has_layer_norm: bool = False  # with a bias, instead of RMS norms
    norm_offset: float = 0.0
    residual_scale: float = 1.0
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float | None = None


def layer_types(fields: Fields, num_layers: int, default: Sequence[str]) -> tuple[str, ...]:
    """`layer_types` of config.json, or the family's `default` for each layer.

    Raises `StartupError` unless there is one known type per layer.
    """
    found = fields.get("layer_types")
    if found is None:
        return tuple(default)
    if not isinstance(found, list) or len(found) != num_layers:
        raise StartupError(f"{fields.where}: layer_types is {found!r}, expected {num_layers} names")
    for name in found:
        if name not in (FULL, SLIDING):
            raise StartupError(
                f"{fields.where}: layer_types has {name!r}, which is not supported; "
                f"known: {FULL}, {SLIDING}"
            )
    return tuple(found)


def every_nth_full(num_layers: int, period: int) -> tuple[str, ...]:
    """Sliding windows, but full attention in each layer whose number is a multiple of `period`."""
    return tuple(FULL if (i + 1) % period == 0 else SLIDING for i in range(num_layers))


def windowed(
    types: Sequence[str],
    window: int,
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
) -> tuple[AttentionOptions, ...]:
    """Options of layers of these types; scale and soft cap are equal in all."""
    return tuple(
        AttentionOptions(window if each == SLIDING else None, scale, soft_cap) for each in types
    )
