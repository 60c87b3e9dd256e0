"""Falcon-H1: attention and Mamba 2 side by side in each layer, and a multiplier of each linear."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from adapters.models.base.fields import Fields
from adapters.models.base.mamba import MambaFields
from adapters.models.base.projections import Projections
from adapters.models.base.traits import FamilyTraits, LinearNames, NormNames
from adapters.models.dense.llama import Llama
from engine.errors import StartupError
from engine.worker.model.layers import FeedForward, Mixer, Mlp
from engine.worker.model.mixers import ParallelMixers, ScaledGate
from engine.worker.ports import AttentionOptions, ModelShape

NUM_PARTS = 5  # `in_proj` has rows for so many outputs
BIASES = ("attention_bias", "mlp_bias", "mamba_proj_bias", "projectors_bias")


class FalconH1(Llama):
    """`FalconH1ForCausalLM`, without biases of linears.

    The multipliers of k and of what attention reads are in the scale of the scores and the
    multiplier of its result, since RoPE and attention are linear in them.
    """

    defaults: Mapping[str, object] = {
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        "mamba_d_ssm": 1024,
    }

    def traits(self, fields: Fields) -> FamilyTraits:
        for name in BIASES:
            fields.reject_unless(name, False)
        return FamilyTraits(
            norms=NormNames(mlp="pre_ff_layernorm"),
            names=LinearNames(norm="final_layernorm", mlp="feed_forward"),
            embedding_scale=fields.number("embedding_multiplier", 1.0),
            logit_scale=fields.number("lm_head_multiplier", 1.0),
        )

    def attention(self, fields: Fields, num_layers: int) -> tuple[AttentionOptions, ...]:
        heads = fields.integer("num_attention_heads")
        head_dim = self.head_dim(fields, fields.integer("hidden_size") // heads)
        read, key = (fields.number(f"{name}_multiplier", 1.0) for name in ("attention_in", "key"))
        return (AttentionOptions(scale=head_dim**-0.5 * read**2 * key),) * num_layers

    def sized(self, fields: Fields, shape: ModelShape) -> ModelShape:
        expanded = fields.integer("mamba_expand", 2) * shape.hidden_size
        width, has_norm = fields.integer("mamba_d_ssm", expanded), _has_norm(fields)
        found = MambaFields.read(fields, width, fields.number("rms_norm_eps"))
        read = fields.number("ssm_in_multiplier", 1.0)
        parts = _numbers(fields, "ssm_multipliers", NUM_PARTS)
        multipliers = tuple(each * read for each in parts)
        self._mamba = found._replace(has_norm=has_norm, multipliers=multipliers)
        self._mlp_multipliers = _numbers(fields, "mlp_multipliers", 2)
        out = fields.number("attention_out_multiplier", 1.0)
        self._scales = (
            out * fields.number("attention_in_multiplier", 1.0),
            fields.number("ssm_out_multiplier", 1.0),
        )
        recurrent = (self._mamba.shape,) * shape.num_layers
        return replace(shape, recurrent=recurrent, mixes_both=True)

    def _attention(self, projections: Projections, at: str, layer: int) -> Mixer:
        shard = projections.shard
        attention = super()._attention(projections, at, layer)
        mamba = self._mamba.layer(projections, f"{at}.mamba", shard.number_of(layer))
        values = len(shard.even(self._mamba.shape.num_value_heads).run)
        widths = (
            len(shard.heads.run) * shard.shape.head_dim,
            values * self._mamba.shape.value_dim,
        )
        return ParallelMixers((attention, mamba), widths, self._scales)

    def _mlp(self, projections: Projections, at: str) -> FeedForward:
        mlp = super()._mlp(projections, at)
        assert isinstance(mlp, Mlp), "the one of Llama"
        return replace(mlp, activation=ScaledGate(mlp.activation, *self._mlp_multipliers))


def _has_norm(fields: Fields) -> bool:
    """Whether there is a norm between Mamba and its `out_proj`, behind the gate."""
    has_norm = fields.flag("mamba_rms_norm", False)
    if has_norm and fields.flag("mamba_norm_before_gate", True):
        raise StartupError(f"{fields.where}: mamba_norm_before_gate=True is not supported")
    return has_norm


def _numbers(fields: Fields, name: str, count: int) -> Sequence[float]:
    """A list of positive numbers, by default 1."""
    return (1.0,) * count if fields.get(name) is None else fields.numbers(name, count)
