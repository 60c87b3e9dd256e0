"""OPT: learned positions, LayerNorm, ReLU, biases everywhere (Zhang et al., arXiv:2205.01068)."""

from collections.abc import Mapping

from adapters.models.base.equal_heads import SizeNames, equal_heads
from adapters.models.base.fields import Fields
from adapters.models.base.projections import Projections, embedding_and_head
from engine.worker.model.layers import AttentionBlock, Decoder, DecoderLayer, Mlp
from engine.worker.ports import Norm, Operators, Shard, TensorSlice, WeightSource

OFFSET = 2  # rows of the position embeddings before that of position 0
EPS = 1e-5
ROOT = "model.decoder"


class Opt:
    """A `ModelFamily`. OPT-350m, which has norms after each block and a narrower embedding, is
    not supported."""

    ignored_weights: tuple[str, ...] = ()

    def __init__(self, config: Mapping[str, object]) -> None:
        fields = Fields(config)
        self.shape = equal_heads(fields, SizeNames(inner="ffn_dim"))
        fields.reject_unless("do_layer_norm_before", True)
        fields.reject_unless("word_embed_proj_dim", self.shape.hidden_size)
        fields.reject_unless("enable_bias", True)
        fields.reject_unless("layer_norm_elementwise_affine", True)
        fields.reject_unless("_remove_final_layer_norm", False)
        self._activation = fields.activation("activation_function", "relu")
        self._tied = fields.flag("tie_word_embeddings", True)

    def build(self, weights: WeightSource, shard: Shard, operators: Operators) -> Decoder:
        projections = Projections(weights, shard, operators)
        tokens, head = embedding_and_head(
            projections, f"{ROOT}.embed_tokens.weight", is_tied=self._tied
        )
        positions = norm = None
        if shard.is_first:
            size = (self.shape.max_positions + OFFSET, self.shape.hidden_size)
            positions = weights.tensor(TensorSlice(f"{ROOT}.embed_positions.weight", size))[OFFSET:]
        if shard.is_last:
            norm = self._norm(projections, f"{ROOT}.final_layer_norm")
        return Decoder(
            blocks=tuple(self._block(projections, layer) for layer in shard.span),
            tokens=tokens,
            learned_positions=positions,
            norm=norm,
            head=head,
        )

    def _norm(self, projections: Projections, name: str) -> Norm:
        weight, bias = (
            projections.weights.tensor(TensorSlice(f"{name}.{part}", (self.shape.hidden_size,)))
            for part in ("weight", "bias")
        )
        return projections.operators.layer_norm(weight, bias, EPS)

    def _block(self, projections: Projections, layer: int) -> DecoderLayer:
        shard, at = projections.shard, f"{ROOT}.layers.{layer}"
        width = shard.heads.times(shard.shape.head_dim)
        qkv = {f"{at}.self_attn.{name}_proj": width for name in "qkv"}
        attention = AttentionBlock(
            layer=layer - shard.span.start,
            num_heads=len(shard.heads.run),
            num_kv_heads=len(shard.kv_heads.run),
            head_dim=shard.shape.head_dim,
            qkv=projections.from_hidden(qkv, has_bias=True),
            out=projections.to_hidden(f"{at}.self_attn.out_proj", width, has_bias=True),
        )
        return DecoderLayer(
            attention_norm=self._norm(projections, f"{at}.self_attn_layer_norm"),
            attention=attention,
            mlp_norm=self._norm(projections, f"{at}.final_layer_norm"),
            mlp=Mlp(
                up=projections.from_hidden({f"{at}.fc1": shard.inner}, has_bias=True),
                down=projections.to_hidden(f"{at}.fc2", shard.inner, has_bias=True),
                activation=projections.operators.activation(self._activation, is_gated=False),
            ),
        )
