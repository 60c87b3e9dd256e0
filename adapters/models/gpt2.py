"""GPT-2: learned positions, LayerNorm, GELU, and weights stored as `[in, out]`."""

from collections.abc import Mapping

from torch import Tensor

from adapters.models.fields import Fields
from engine.worker.layers import AttentionBlock, Block, Decoder, Mlp
from engine.worker.ports import Linear, ModelShape, Norm, Operators, WeightSource


class Gpt2:
    """A `ModelFamily`. The oldest checkpoints leave out the `transformer.` of all names."""

    ignored_weights: tuple[str, ...] = ("*h.*.attn.bias", "*h.*.attn.masked_bias")

    def __init__(self, config: Mapping[str, object]) -> None:
        fields = Fields(config)
        hidden, heads = fields.integer("n_embd"), fields.integer("n_head")
        fields.refuse("scale_attn_weights", True)
        fields.refuse("scale_attn_by_inverse_layer_idx", False)
        fields.refuse("add_cross_attention", False)
        self.shape = ModelShape(
            num_layers=fields.integer("n_layer"),
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=hidden // heads,
            hidden_size=hidden,
            vocab_size=fields.integer("vocab_size"),
            max_positions=fields.integer("n_positions"),
        )
        self._inner = fields.integer("n_inner", 4 * hidden)
        self._eps = fields.number("layer_norm_epsilon", 1e-5)
        self._activation = fields.activation("activation_function", "gelu_new")
        self._tied = fields.flag("tie_word_embeddings", True)

    def build(self, weights: WeightSource, span: range, operators: Operators) -> Decoder:
        """See `ModelFamily`."""
        shape = self.shape
        root = "transformer." if weights.has("transformer.wte.weight") else ""
        is_first, is_last = span.start == 0, span.stop == shape.num_layers
        tokens = positions = norm = head = None
        if is_first or (is_last and self._tied):
            tokens = weights.take(f"{root}wte.weight", shape.vocab_size, shape.hidden_size)
        if is_first:
            positions = weights.take(f"{root}wpe.weight", shape.max_positions, shape.hidden_size)
        if is_last:
            norm = self._norm(weights, f"{root}ln_f", operators)
            head = operators.linear([self._head(weights, tokens)], None)
        return Decoder(
            blocks=tuple(self._block(weights, f"{root}h.{i}", i, span, operators) for i in span),
            tokens=tokens if is_first else None,
            learned_positions=positions,
            norm=norm,
            head=head,
        )

    def _head(self, weights: WeightSource, tokens: Tensor | None) -> Tensor:
        size = self.shape.vocab_size, self.shape.hidden_size
        is_stored = weights.has("lm_head.weight")
        if not self._tied or tokens is None:
            return weights.take("lm_head.weight", *size)
        if is_stored:
            weights.take("lm_head.weight", *size)
        return tokens

    def _norm(self, weights: WeightSource, name: str, operators: Operators) -> Norm:
        hidden = self.shape.hidden_size
        return operators.layer_norm(
            weights.take(f"{name}.weight", hidden), weights.take(f"{name}.bias", hidden), self._eps
        )

    def _block(
        self, weights: WeightSource, at: str, layer: int, span: range, operators: Operators
    ) -> Block:
        shape, hidden = self.shape, self.shape.hidden_size

        def project(name: str, inputs: int, outputs: int) -> Linear:
            weight = weights.take(f"{at}.{name}.weight", inputs, outputs)
            bias = weights.take(f"{at}.{name}.bias", outputs)
            return operators.linear([weight.t()], bias)

        return Block(
            attention_norm=self._norm(weights, f"{at}.ln_1", operators),
            attention=AttentionBlock(
                layer=layer - span.start,
                num_heads=shape.num_heads,
                num_kv_heads=shape.num_heads,
                head_dim=shape.head_dim,
                operators=operators,
                qkv=project("attn.c_attn", hidden, 3 * hidden),
                out=project("attn.c_proj", hidden, hidden),
            ),
            mlp_norm=self._norm(weights, f"{at}.ln_2", operators),
            mlp=Mlp(
                up=project("mlp.c_fc", hidden, self._inner),
                down=project("mlp.c_proj", self._inner, hidden),
                activation=operators.activation(self._activation, is_gated=False),
            ),
        )
