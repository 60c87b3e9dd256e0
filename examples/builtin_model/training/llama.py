"""A Llama in plain torch: RMSNorm, rotary positions, grouped queries, gated MLP, tied embeddings.

Parameter names are those of a Hugging Face Llama checkpoint, so export is a plain save.
"""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, slots=True)
class Shape:
    vocab_size: int = 2048
    hidden_size: int = 192
    num_layers: int = 4
    num_heads: int = 6
    num_kv_heads: int = 2
    intermediate_size: int = 512
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


def rotary(shape: Shape, length: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines, [length, head_dim]."""
    half = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    angles = torch.outer(torch.arange(length, dtype=torch.float32), shape.rope_theta**-half)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        width = shape.num_kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, shape.hidden_size, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, width, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, width, bias=False)
        self.o_proj = nn.Linear(shape.hidden_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rows, length, _ = x.shape
        group = self.shape.num_heads // self.shape.num_kv_heads

        def heads(y: Tensor) -> Tensor:  # [rows, heads, length, head_dim]
            return y.view(rows, length, -1, self.shape.head_dim).transpose(1, 2)

        q = rotate(heads(self.q_proj(x)), cos, sin)
        k = rotate(heads(self.k_proj(x)), cos, sin).repeat_interleave(group, 1)
        v = heads(self.v_proj(x)).repeat_interleave(group, 1)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return cast(Tensor, self.o_proj(seen.transpose(1, 2).reshape(rows, length, -1)))


class MLP(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)))


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.norm_eps)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, kept: Tensor | None) -> Tensor:
        """With `kept`, only these rows are returned: the loss of the last layer needs no others."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        if kept is not None:
            x = x[kept]  # [kept tokens, hidden]
        return cast(Tensor, x + self.mlp(self.post_attention_layernorm(x)))


class Backbone(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, eps=shape.norm_eps)


class LanguageModel(nn.Module):
    """A model that `train` can train."""

    def loss(self, tokens: Tensor, weights: Tensor) -> Tensor:
        """Of a batch, [rows, length] each; `weights` are zero for tokens without a loss."""
        raise NotImplementedError


class Llama(LanguageModel):
    """`loss(tokens, weights)`: weights are zero for tokens without a loss."""

    def __init__(self, shape: Shape, longest: int) -> None:
        super().__init__()
        self.model = Backbone(shape)
        self.cos, self.sin = rotary(shape, longest)
        for weight in self.parameters():
            if weight.ndim == 2:
                nn.init.normal_(weight, std=0.02)
        for name, weight in self.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.normal_(weight, std=0.02 / (2 * shape.num_layers) ** 0.5)

    def hidden(self, tokens: Tensor, kept: Tensor) -> Tensor:
        """Of the kept tokens only, [kept tokens, hidden]."""
        x = self.model.embed_tokens(tokens)
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        *layers, last = self.model.layers
        for layer in layers:
            x = layer(x, cos, sin, None)
        x = last(x, cos, sin, kept)
        return cast(Tensor, self.model.norm(x))

    def loss(self, tokens: Tensor, weights: Tensor) -> Tensor:
        """Mean cross-entropy of the weighted next tokens; only these need logits."""
        taught = weights[:, 1:] > 0
        x = self.hidden(tokens[:, :-1], taught)
        logits = F.linear(x, self.model.embed_tokens.weight)
        losses = F.cross_entropy(logits, tokens[:, 1:][taught], reduction="none")
        share = weights[:, 1:][taught]
        return (losses * share).sum() / share.sum()
