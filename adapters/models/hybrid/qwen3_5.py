"""Qwen 3.5 and 3.6: three Gated DeltaNet layers to each layer of attention, whose output is gated
and whose RoPE turns a quarter of each head. The mixtures have an expert that all tokens use."""

from dataclasses import replace
from itertools import pairwise

import torch

from adapters.models.base.fields import Fields
from adapters.models.base.projections import Projections
from adapters.models.base.rope_fields import LayerRopes, read_rope
from adapters.models.base.traits import FULL, FamilyTraits
from adapters.models.dense.qwen import Qwen3
from adapters.models.encoders.families import ReadsQwenImages
from adapters.models.mixtures.families import SharingQwen
from engine.errors import StartupError
from engine.worker.model.layers import AttentionBlock, Decoder, GatedAttentionBlock, Mixer
from engine.worker.model.mixers import RecurrentMixer
from engine.worker.model.mtp import MtpLayer
from engine.worker.ports import (
    AttentionOptions,
    DeltaShape,
    DeltaWeights,
    LinearWeight,
    ModelShape,
    Operators,
    RankPart,
    Routing,
    Shard,
    StageModel,
    TensorSlice,
    WeightSource,
)

LINEAR = "linear_attention"
PERIOD = 4  # every fourth layer has attention


class Qwen35(Qwen3):
    """The text model (`Qwen3_5ForCausalLM`). Its layer for multi-token prediction is loaded for
    speculation only."""

    ignored_weights = (*Qwen3.ignored_weights, "mtp.*")

    def traits(self, fields: Fields) -> FamilyTraits:
        includes_one = fields.flag("norms_include_one", False)  # in GGUF files
        return replace(super().traits(fields), norm_offset=0.0 if includes_one else 1.0)

    def head_dim(self, fields: Fields, default: int) -> int:
        return fields.integer("head_dim", 256)

    def attention(self, fields: Fields, num_layers: int) -> tuple[AttentionOptions, ...]:
        return ()

    def ropes(self, fields: Fields, shape: ModelShape) -> LayerRopes:
        source = read_rope(fields, shape.head_dim, shape.max_positions, share=0.25)
        return LayerRopes.same(source, shape.num_layers)

    def sized(self, fields: Fields, shape: ModelShape) -> ModelShape:
        recurrent = DeltaShape(
            num_key_heads=fields.integer("linear_num_key_heads", 16),
            num_value_heads=fields.integer("linear_num_value_heads", 32),
            key_dim=fields.integer("linear_key_head_dim", 128),
            value_dim=fields.integer("linear_value_head_dim", 128),
            kernel=fields.integer("linear_conv_kernel_dim", 4),
            tiles_outputs=fields.flag("linear_out_proj_is_tiled", False),  # in GGUF files
        )
        if recurrent.num_value_heads % recurrent.num_key_heads:
            raise StartupError(
                f"config.json: linear_num_key_heads={recurrent.num_key_heads} does not divide "
                f"linear_num_value_heads={recurrent.num_value_heads}"
            )
        types = _layer_types(fields, shape.num_layers)
        layers = tuple(recurrent if each == LINEAR else None for each in types)
        return replace(shape, recurrent=layers)

    def build_mtp(
        self, weights: WeightSource, shard: Shard, operators: Operators, model: StageModel
    ) -> MtpLayer:
        """The layer `mtp.*`, which has attention."""
        if not isinstance(model, Decoder):
            raise TypeError("a model that this family has built")
        if weights.has("mtp.layers.1.input_layernorm.weight"):
            raise StartupError("one layer for multi-token prediction is supported, not several")
        projections = Projections(weights, shard, operators, "mtp")
        hidden = shard.shape.hidden_size
        join = weights.weight(TensorSlice("mtp.fc.weight", (hidden, 2 * hidden)))
        return MtpLayer(
            replace(
                model,
                blocks=(self._block(projections, 0),),
                norm=self._norm(projections, "mtp.norm"),
            ),
            embedding_norm=self._norm(projections, "mtp.pre_fc_norm_embedding"),
            features_norm=self._norm(projections, "mtp.pre_fc_norm_hidden"),
            join=operators.linear([join], None),
        )

    def _attention(self, projections: Projections, at: str, layer: int) -> Mixer:
        shard = projections.shard
        recurrent, number = shard.shape.recurrent[layer], shard.number_of(layer)
        if isinstance(recurrent, DeltaShape):
            return self._delta_net(projections, f"{at}.linear_attn", recurrent, number)
        return self._gated_attention(projections, f"{at}.self_attn", layer, number)

    def _gated_attention(
        self, projections: Projections, at: str, layer: int, number: int
    ) -> GatedAttentionBlock:
        shard, traits = projections.shard, self._traits
        width, kv_width = (
            part.times(shard.shape.head_dim) for part in (shard.heads, shard.kv_heads)
        )
        parts = {f"{at}.q_proj": width.times(2), f"{at}.k_proj": kv_width, f"{at}.v_proj": kv_width}
        inputs = projections.from_hidden(parts, has_bias=traits.qkv_bias)
        norms = self._head_norms(projections, at)
        block = AttentionBlock(
            number,
            len(shard.heads.run),
            len(shard.kv_heads.run),
            shard.shape.head_dim,
            inputs,
            projections.to_hidden(f"{at}.o_proj", width, has_bias=traits.out_bias),
            q_norm=norms.q,
            k_norm=norms.k,
            rope=self._ropes.of_layer[layer],
        )
        operators = projections.operators
        return GatedAttentionBlock(block, inputs, operators.without_gates, operators.gate_heads_)

    def _delta_inputs(
        self, projections: Projections, at: str, whole: DeltaShape
    ) -> list[LinearWeight]:
        """The weights of q, k, v, of the gates z, and of the rates b and a, of this rank's heads in
        this order."""
        shard, hidden = projections.shard, projections.shard.shape.hidden_size
        keys = shard.even(whole.num_key_heads).times(whole.key_dim)
        heads = shard.even(whole.num_value_heads)
        values = heads.times(whole.value_dim)
        slices = [("qkv", whole.channels, run) for run in _stacked(keys, keys, values)]
        slices += [("z", values.size, values.run)]
        slices += [(name, heads.size, heads.run) for name in "ba"]
        return [
            projections.weights.weight(
                TensorSlice(f"{at}.in_proj_{name}.weight", (size, hidden), rows=run)
            )
            for name, size, run in slices
        ]

    def _delta_net(
        self, projections: Projections, at: str, whole: DeltaShape, number: int
    ) -> RecurrentMixer:
        shard, weights = projections.shard, projections.weights
        keys = shard.even(whole.num_key_heads).times(whole.key_dim)
        heads = shard.even(whole.num_value_heads)
        values = heads.times(whole.value_dim)
        runs = _stacked(keys, keys, values)

        def vector(name: str, part: RankPart) -> torch.Tensor:
            return weights.tensor(TensorSlice(f"{at}.{name}", (part.size,), rows=part.run)).float()

        size = (whole.channels, 1, whole.kernel)
        convs = [weights.tensor(TensorSlice(f"{at}.conv1d.weight", size, run)) for run in runs]
        own = whole.of_rank(shard.num_ranks)
        net = DeltaWeights(
            shape=own,
            conv=torch.cat(convs)[:, 0].float().contiguous(),
            decay_rate=-vector("A_log", heads).exp(),
            decay_bias=vector("dt_bias", heads),
            norm=vector("norm.weight", RankPart.whole(whole.value_dim)),
            eps=self._settings.eps,
        )
        return RecurrentMixer(
            layer=number,
            inputs=projections.operators.linear(self._delta_inputs(projections, at, whole), None),
            recurrence=projections.operators.recurrence(net),
            out=projections.to_hidden(f"{at}.out_proj", values, has_bias=False, tiles=own.tiles),
        )


class Qwen35Multimodal(ReadsQwenImages, Qwen35):
    """`Qwen3_5ForConditionalGeneration`: the text model and its image encoder."""

    ignored_weights = (*Qwen35.ignored_weights, "model.visual.*")


def _layer_types(fields: Fields, num_layers: int) -> tuple[str, ...]:
    """`layer_types` of config.json; by default every `full_attention_interval`th is full."""
    found = fields.get("layer_types")
    period = fields.integer("full_attention_interval", PERIOD)
    if found is None:
        return tuple(LINEAR if (n + 1) % period else FULL for n in range(num_layers))
    if not isinstance(found, list) or len(found) != num_layers or not {*found} <= {LINEAR, FULL}:
        raise StartupError(
            f"{fields.where}: layer_types is {found!r}, expected {num_layers} of {LINEAR!r} and "
            f"{FULL!r}"
        )
    return tuple(found)


def _stacked(*parts: RankPart) -> list[range]:
    """This rank's rows of each part, counted in the whole tensor."""
    runs, start = [], 0
    for part in parts:
        runs.append(range(start + part.run.start, start + part.run.stop))
        start += part.size
    return runs


class Qwen35Moe(SharingQwen, Qwen35):
    """The probabilities of the chosen experts are divided by their sum."""

    def routing(self, fields: Fields) -> Routing:
        return Routing(fields.integer("num_experts_per_tok", 8), renormalizes=True)


class Qwen35MoeMultimodal(Qwen35Moe, Qwen35Multimodal):
    """`Qwen3_5MoeForConditionalGeneration`: the text model and its image encoder."""


class Qwen3Next(Qwen35Moe):
    """`Qwen3NextForCausalLM`; layers with a dense MLP between the sparse ones are not supported.

    The rows of two projections lie together by key head:

        in_proj_qkvz    for each key head: q, k, v of its value heads, z of its value heads
        in_proj_ba      for each key head: b of its value heads, a of its value heads
    """

    def routing(self, fields: Fields) -> Routing:
        fields.reject_unless("decoder_sparse_step", 1)
        fields.reject_unless("mlp_only_layers", [])
        return Routing(
            fields.integer("num_experts_per_tok", 10),
            renormalizes=fields.flag("norm_topk_prob", True),
        )

    def _delta_inputs(
        self, projections: Projections, at: str, whole: DeltaShape
    ) -> list[LinearWeight]:
        shard, per_key = projections.shard, whole.num_value_heads // whole.num_key_heads
        heads, hidden = shard.even(whole.num_key_heads), shard.shape.hidden_size
        values = per_key * whole.value_dim

        def of_heads(name: str, *widths: int) -> list[LinearWeight]:
            """The rows of this rank's heads: those of the first width of all heads first."""
            ends = [sum(widths[:count]) for count in range(len(widths) + 1)]
            shape = (whole.num_key_heads * ends[-1], hidden)
            return [
                projections.weights.weight(
                    TensorSlice(
                        f"{at}.in_proj_{name}.weight",
                        shape,
                        rows=range(head * ends[-1] + start, head * ends[-1] + stop),
                    )
                )
                for start, stop in pairwise(ends)
                for head in heads.run
            ]

        qkvz = of_heads("qkvz", whole.key_dim, whole.key_dim, values, values)
        return [*qkvz, *of_heads("ba", per_key, per_key)]
