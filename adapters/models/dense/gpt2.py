"""GPT-2: learned position embeddings, LayerNorm, GELU, and weights stored as `[in, out]`."""

from collections.abc import Mapping

import torch

from adapters.models.base.equal_heads import SizeNames, equal_heads
from adapters.models.base.fields import Fields
from adapters.models.base.projections import Projections, embedding_and_head
from engine.worker.model.layers import AttentionBlock, Decoder, DecoderLayer, Mlp
from engine.worker.ports import Linear, Norm, Operators, RankPart, Shard, TensorSlice, WeightSource

NAMES = SizeNames("n_embd", "n_head", "n_inner", "n_layer", "n_positions")


class Gpt2:
    """A `ModelFamily`. Names in the oldest checkpoints lack the prefix `transformer.`."""

    ignored_weights: tuple[str, ...] = ("*h.*.attn.bias", "*h.*.attn.masked_bias")

    def __init__(self, config: Mapping[str, object]) -> None:
        fields = Fields(config)
        fields.reject_unless("scale_attn_weights", True)
        fields.reject_unless("scale_attn_by_inverse_layer_idx", False)
        fields.reject_unless("add_cross_attention", False)
        self.shape = equal_heads(fields, NAMES, default_inner=4)
        self._eps = fields.number("layer_norm_epsilon", 1e-5)
        self._activation = fields.activation("activation_function", "gelu_new")
        self._tied = fields.flag("tie_word_embeddings", True)

    def build(self, weights: WeightSource, shard: Shard, operators: Operators) -> Decoder:
        shape = self.shape
        root = "transformer." if weights.has("transformer.wte.weight") else ""
        projections = Projections(weights, shard, operators)
        tokens, head = embedding_and_head(projections, f"{root}wte.weight", is_tied=self._tied)
        positions = norm = None
        if shard.is_first:
            positions = weights.tensor(
                TensorSlice(f"{root}wpe.weight", (shape.max_positions, shape.hidden_size))
            )
        if shard.is_last:
            norm = self._norm(weights, f"{root}ln_f", operators)
        return Decoder(
            blocks=tuple(self._block(projections, f"{root}h.{i}", i) for i in shard.span),
            tokens=tokens,
            learned_positions=positions,
            norm=norm,
            head=head,
        )

    def _norm(self, weights: WeightSource, name: str, operators: Operators) -> Norm:
        weight, bias = (
            weights.tensor(TensorSlice(f"{name}.{part}", (self.shape.hidden_size,)))
            for part in ("weight", "bias")
        )
        return operators.layer_norm(weight, bias, self._eps)

    def _block(self, projections: Projections, at: str, layer: int) -> DecoderLayer:
        weights, shard, operators = projections.weights, projections.shard, projections.operators
        width = shard.heads.times(shard.shape.head_dim)
        attention = AttentionBlock(
            layer=layer - shard.span.start,
            num_heads=len(shard.heads.run),
            num_kv_heads=len(shard.kv_heads.run),
            head_dim=shard.shape.head_dim,
            qkv=from_hidden(projections, f"{at}.attn.c_attn", width, repeats=3),
            out=to_hidden(projections, f"{at}.attn.c_proj", width),
        )
        return DecoderLayer(
            attention_norm=self._norm(weights, f"{at}.ln_1", operators),
            attention=attention,
            mlp_norm=self._norm(weights, f"{at}.ln_2", operators),
            mlp=Mlp(
                up=from_hidden(projections, f"{at}.mlp.c_fc", shard.inner),
                down=to_hidden(projections, f"{at}.mlp.c_proj", shard.inner),
                activation=operators.activation(self._activation, is_gated=False),
            ),
        )


def from_hidden(projections: Projections, name: str, part: RankPart, repeats: int = 1) -> Linear:
    """The linear from the hidden states to `repeats` adjacent groups of outputs, `part` of each."""
    hidden, size = projections.shard.shape.hidden_size, part.size * repeats
    runs = [
        range(part.run.start + shift, part.run.stop + shift) for shift in range(0, size, part.size)
    ]
    matrix, vector = (size, hidden), (size,)
    weights = [
        projections.weights.weight(
            TensorSlice(f"{name}.weight", matrix, rows=run, is_transposed=True)
        )
        for run in runs
    ]
    biases = [
        projections.weights.tensor(TensorSlice(f"{name}.bias", vector, rows=run)) for run in runs
    ]
    return projections.operators.linear(weights, torch.cat(biases))


def to_hidden(projections: Projections, name: str, part: RankPart) -> Linear:
    """Back to the hidden states, summed over the ranks; rank 0 adds the bias."""
    hidden, weights = projections.shard.shape.hidden_size, projections.weights
    weight = weights.weight(
        TensorSlice(f"{name}.weight", (hidden, part.size), columns=part.run, is_transposed=True)
    )
    bias = weights.tensor(TensorSlice(f"{name}.bias", (hidden,)))
    is_first = projections.shard.rank == 0
    return projections.summed(projections.operators.linear([weight], bias if is_first else None))
