"""Nemotron-H: layers of one part each, Mamba 2, attention without RoPE, or an MLP without a gate.

A layer with an MLP and the one before it are one layer here, so that it is as in other models.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from adapters.models.base.fields import Fields
from adapters.models.base.projections import Projections
from adapters.models.base.rope_fields import LayerRopes
from adapters.models.base.traits import FULL, FamilyTraits, LinearNames
from adapters.models.dense.nemotron import UngatedMlp
from adapters.models.hybrid.mamba_hybrid import MambaHybrid
from engine.errors import StartupError
from engine.worker.model.layers import DecoderLayer, NoMlp
from engine.worker.ports import ModelShape

MAMBA, MLP, MOE = "linear_attention", "mlp", "moe"
PATTERN = {"M": MAMBA, "*": FULL, "-": MLP, "E": MOE}
TYPES = {"mamba": MAMBA, "attention": FULL, **{each: each for each in PATTERN.values()}}
RENAMED = {
    "mamba_num_heads": "mamba_n_heads",
    "mamba_head_dim": "mamba_d_head",
    "n_groups": "mamba_n_groups",
    "ssm_state_size": "mamba_d_state",
    "conv_kernel": "mamba_d_conv",
    "use_conv_bias": "mamba_conv_bias",
    "use_bias": "mamba_proj_bias",
    "mamba_hidden_act": "hidden_act",
}


class Parts(NamedTuple):
    """The numbers in the checkpoint of the parts of a layer."""

    mixer: int
    has_attention: bool
    mlp: int | None = None


class NemotronH(MambaHybrid, UngatedMlp):
    """`NemotronHForCausalLM` without experts."""

    eps_field = "layer_norm_epsilon"
    activation_field = "mlp_hidden_act"
    token_name = "embeddings"
    mamba_name = "mixer"
    roots = ("backbone", "model")
    ignored_weights = (*UngatedMlp.ignored_weights, "mtp.*")
    defaults: Mapping[str, object] = {
        "layer_norm_epsilon": 1e-5,
        "mlp_hidden_act": "relu2",
        "head_dim": 128,
        "mamba_n_groups": 8,
        "mamba_d_state": 128,
        "mamba_d_head": 64,
    }

    def __init__(self, config: Mapping[str, object]) -> None:
        self._parts = tuple(_parts(_types(config)))
        own = {RENAMED.get(name, name): value for name, value in config.items()}
        sizes = {"num_hidden_layers": len(self._parts), "tie_word_embeddings": False}  # never tied
        super().__init__({**own, **sizes})

    def traits(self, fields: Fields) -> FamilyTraits:
        fields.reject_unless("attention_bias", False)
        return FamilyTraits(
            mlp_bias=fields.flag("mlp_bias", False),
            names=LinearNames(norm="norm_f", attention="mixer"),
        )

    def ropes(self, fields: Fields, shape: ModelShape) -> LayerRopes:
        return LayerRopes((), (None,) * shape.num_layers)

    def mamba_width(self, fields: Fields, shape: ModelShape) -> int:
        return fields.integer("mamba_n_heads", 128) * fields.integer("mamba_d_head")

    def has_attention(self, fields: Fields, num_layers: int) -> Sequence[bool]:
        return [parts.has_attention for parts in self._parts]

    def _block(self, projections: Projections, layer: int) -> DecoderLayer:
        parts, at = self._parts[layer], f"{projections.root}.layers"
        mixer, mlp = f"{at}.{parts.mixer}", f"{at}.{parts.mlp}"
        has_mlp = parts.mlp is not None
        return DecoderLayer(
            attention_norm=self._norm(projections, f"{mixer}.norm"),
            attention=self._attention(projections, mixer, layer),
            mlp_norm=self._norm(projections, f"{mlp}.norm") if has_mlp else None,
            mlp=self._mlp(projections, f"{mlp}.mixer") if has_mlp else NoMlp(),
        )


def _types(config: Mapping[str, object]) -> list[str]:
    """The types of the checkpoint's layers, from a list or a pattern. Raises `StartupError`."""
    name = next(
        (each for each in ("layers_block_type", "layer_types") if config.get(each)),
        "hybrid_override_pattern",
    )
    found, known = config.get(name), PATTERN if name.endswith("pattern") else TYPES
    if not isinstance(found, str | list) or not found or {*found} - known.keys():
        raise StartupError(f"config.json: {name} is {found!r}; expected {', '.join(known)}")
    return [known[each] for each in found]


def _parts(types: Sequence[str]) -> Iterator[Parts]:
    """The layers, of which each has a mixer. Raises `StartupError`."""
    for at, kind in enumerate(types):
        if kind == MOE:
            raise StartupError(
                "config.json: Nemotron-H with experts (moe) is not supported: they have no gate, "
                "and no device computes experts without one"
            )
        if kind == MLP and (at == 0 or types[at - 1] == MLP):
            raise StartupError(f"config.json: layer {at} is an MLP behind no attention or Mamba")
        if kind != MLP:
            has_mlp = types[at + 1 : at + 2] == [MLP]
            yield Parts(at, kind == FULL, at + 1 if has_mlp else None)
