"""Encoders (BERT, ModernBERT): attention in both directions, hidden states instead of logits."""

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from engine.worker.model.layers import AttentionBlock, Decoder, FeedForward
from engine.worker.ports import Norm, StepContext


@dataclass(frozen=True, slots=True)
class PostNormLayer:
    """Attention and MLP, each added to the hidden states, which are normalized after it (BERT)."""

    attention: AttentionBlock
    attention_norm: Norm
    mlp: FeedForward
    mlp_norm: Norm

    def __call__(self, hidden: Tensor, context: StepContext) -> Tensor:
        """Hidden states of `context.rows`; in `hidden` itself if all rows are needed."""
        heads, rows = self.attention(hidden, context), context.rows
        if rows is not None:
            hidden, heads = hidden.index_select(0, rows), heads.index_select(0, rows)
        self.attention.out(heads, hidden)
        self.attention_norm.apply_(hidden[:, None])
        self.mlp(hidden, hidden)
        self.mlp_norm.apply_(hidden[:, None])
        return hidden


@dataclass(frozen=True, slots=True)
class Encoder(Decoder):
    """An encoder or one stage of it; `token_types` `[types, hidden]` and `embedding_norm` are None
    except on the first stage, and in models without them. `norm` is None with `PostNormLayer`s."""

    token_types: Tensor | None = None
    embedding_norm: Norm | None = None

    def embed(self, ids: Tensor, positions: Tensor, types: Tensor | None = None) -> Tensor:
        hidden = Decoder.embed(self, ids, positions)
        if self.token_types is not None:
            hidden += self.token_types[0] if types is None else F.embedding(types, self.token_types)
        if self.embedding_norm is not None:
            self.embedding_norm.apply_(hidden[:, None])
        return hidden

    def features(self, hidden: Tensor) -> Tensor:
        return (hidden if self.norm is None else self.norm(hidden)).float()
