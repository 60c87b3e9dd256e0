"""The shape of models whose heads of q, k and v are equally many: GPT-2, OPT and encoders."""

from typing import NamedTuple

from adapters.models.base.fields import Fields
from engine.worker.ports import ModelShape


class SizeNames(NamedTuple):
    """The fields of config.json that have the sizes of a model."""

    hidden: str = "hidden_size"
    heads: str = "num_attention_heads"
    inner: str = "intermediate_size"
    layers: str = "num_hidden_layers"
    positions: str = "max_position_embeddings"


DEFAULT_NAMES = SizeNames()


def equal_heads(
    fields: Fields,
    names: SizeNames = DEFAULT_NAMES,
    *,
    mlp_matrices: int = 2,
    default_inner: int | None = None,  # in units of the hidden size
) -> ModelShape:
    """The shape without attention options. `mlp_matrices` is the number of matrices in an MLP.

    Raises `StartupError` for a missing or invalid size.
    """
    hidden, heads = fields.integer(names.hidden), fields.integer(names.heads)
    inner = fields.integer(names.inner, default_inner and default_inner * hidden)
    return ModelShape(
        num_layers=fields.layers(names.layers),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        hidden_size=hidden,
        inner_size=inner,
        layer_parameters=hidden * (4 * hidden + mlp_matrices * inner),
        vocab_size=fields.integer("vocab_size"),
        max_positions=fields.integer(names.positions),
    )
