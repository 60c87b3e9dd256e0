"""Sizes of a model and of the largest step it has to run."""

from dataclasses import dataclass, replace

from engine.worker.ports.recurrent import RecurrentShape


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """Each layer's MLP is a mixture of experts, of which each token uses `top_k`."""

    num_experts: int
    top_k: int
    parameters: int  # matrix elements of one expert


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """How the attention of one layer differs from causal attention to all earlier tokens.

    `window` is the sliding window in tokens, counting the token itself; None means all. If the
    layer is not causal, tokens attend in both directions, each at most a window away. Scores are
    `q · k * scale` (None: head_dim ** -0.5); with `soft_cap` they become
    `soft_cap * tanh(score / soft_cap)` (Gemma 2). With `has_sinks` each head has a learned score
    that joins the denominator of the softmax and has no value (gpt-oss). With `sees_images` the
    tokens of an image attend to all tokens of it (Gemma 3). `head_dim` and `num_kv_heads` None are
    the model's. With `kv_layer` the layer has no keys and values of its own and reads those of that
    earlier layer, whose options are otherwise the same (Gemma 4).
    """

    window: int | None = None
    scale: float | None = None
    soft_cap: float | None = None
    has_sinks: bool = False
    is_causal: bool = True
    sees_images: bool = False
    head_dim: int | None = None
    num_kv_heads: int | None = None
    kv_layer: int | None = None


FULL_ATTENTION = AttentionOptions()


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a checkpoint that a worker needs before it reads any weight.

    `inner_size` is the width of the MLP, or of one expert; `layer_parameters` is the number of
    matrix elements in one layer, with all experts. `attention` has the options of each layer; empty
    means `FULL_ATTENTION` in all. `recurrent` has the shape of each layer with a recurrent state
    instead of attention, None for the others; empty means none has. If it `mixes_both`, all have
    both, and their results are added (Falcon-H1). With LongRoPE,
    `original_positions` is the context length beyond which other frequencies are used. Workers
    lower `max_positions` to the served context length. Where layers differ in their heads, the KV
    of `num_kv_heads` heads of `head_dim` is as wide as the widest layer's.
    With `layer_input_width` each layer has an input of its own, which stages send on with the
    hidden states (Gemma 4). With `values_from` the values of all layers are the dimensions of their
    keys from there on, and only keys are cached (MLA); `expanded_dim` is the head size of the same
    attention with keys and values of each head.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    inner_size: int
    layer_parameters: int
    vocab_size: int
    max_positions: int
    attention: tuple[AttentionOptions, ...] = ()
    original_positions: int | None = None
    experts: ExpertShape | None = None
    layer_input_width: int = 0
    recurrent: tuple[RecurrentShape | None, ...] = ()
    mixes_both: bool = False
    values_from: int | None = None
    expanded_dim: int = 0

    def expanded(self) -> "ModelShape":
        """The shape for attention that cannot take values from keys."""
        if self.values_from is None:
            return self
        return replace(
            self, num_kv_heads=self.num_heads, head_dim=self.expanded_dim, values_from=None
        )

    @property
    def recurrent_layers(self) -> tuple[RecurrentShape, ...]:
        """The layers that are recurrent, in order."""
        return tuple(shape for shape in self.recurrent if shape is not None)

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The numbers of the layers with attention: all that are not recurrent, or all."""
        layers = range(self.num_layers)
        if self.mixes_both or not self.recurrent:
            return tuple(layers)
        return tuple(n for n in layers if self.recurrent[n] is None)

    @property
    def layer_attention(self) -> tuple[AttentionOptions, ...]:
        """The attention options of every layer, `num_layers` of them."""
        return self.attention or (FULL_ATTENTION,) * self.num_layers

    @property
    def is_causal(self) -> bool:
        """Whether no token attends to later ones; an encoder, which is not causal, keeps no KV."""
        return all(options.is_causal for options in self.layer_attention)

    @property
    def idle_parameters(self) -> int:
        """Matrix elements of the experts that one token does not use, in all layers."""
        if self.experts is None:
            return 0
        idle = self.experts.num_experts - self.experts.top_k
        return self.num_layers * idle * self.experts.parameters


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The largest step that a worker has to run; buffers allocated once are sized for it."""

    max_requests: int
    max_tokens: int
    max_model_len: int
