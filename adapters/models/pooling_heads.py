"""Heads behind pooling: logits of two tokens (Qwen3-Reranker), and sequence classifiers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from adapters.models.fields import Fields
from engine.errors import StartupError
from engine.worker.ports import ModelShape, TensorSlice, WeightSource

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "sigmoid": torch.sigmoid,
    "softmax": lambda x: torch.softmax(x, dim=-1),
}


class TokenIds(NamedTuple):
    """The token of a relevant document, and of one that is not."""

    yes: int
    no: int


@dataclass(frozen=True, slots=True)
class LogitDifference:
    """The probability of "yes" against "no": the sigmoid of the difference of their logits.

    `matrix` is the tensor of the output head, `[vocab, hidden]`.
    """

    tokens: TokenIds
    matrix: str

    @property
    def size(self) -> int:
        return 1

    def build(self, weights: WeightSource, shape: ModelShape) -> Callable[[Tensor], Tensor]:
        yes, no = (self._row(weights, shape, token_id) for token_id in self.tokens)

        def score(states: Tensor) -> Tensor:
            return torch.sigmoid(F.linear(states, yes) - F.linear(states, no))

        return score

    def _row(self, weights: WeightSource, shape: ModelShape, token_id: int) -> Tensor:
        sizes = (shape.vocab_size, shape.hidden_size)
        if token_id >= shape.vocab_size:
            raise StartupError(f"token {token_id}, which scores, is not in the vocabulary")
        rows = range(token_id, token_id + 1)
        return weights.tensor(TensorSlice(self.matrix, sizes, rows=rows)).float()


@dataclass(frozen=True, slots=True)
class DecoderClassifier:
    """`score.weight`, without a bias, behind a decoder's last hidden state."""

    size: int
    activation: str

    def build(self, weights: WeightSource, shape: ModelShape) -> Callable[[Tensor], Tensor]:
        matrix = weights.tensor(TensorSlice("score.weight", (self.size, shape.hidden_size))).float()
        activation = ACTIVATIONS[self.activation]
        return lambda states: activation(F.linear(states, matrix))


def sequence_classifier(config: Mapping[str, object], architecture: str) -> DecoderClassifier:
    """The head of a `…ForSequenceClassification`; raises `StartupError`."""
    size = num_labels(config)
    return DecoderClassifier(size, activation_of(config, size))


def num_labels(config: Mapping[str, object]) -> int:
    """Labels of a classifier: `id2label` has one entry for each; 2 by default."""
    labels = Fields(config).child("id2label")
    return len(labels.values) if labels is not None else Fields(config).integer("num_labels", 2)


def activation_of(config: Mapping[str, object], size: int) -> str:
    """The activation that sentence-transformers' config names; by default a sigmoid for one label,
    a softmax for several."""
    own = Fields(config).child("sentence_transformers")
    path = own.get("activation_fn") if own is not None else None
    path = path or config.get("sbert_ce_default_activation_function")
    if path is None:
        return "sigmoid" if size == 1 else "softmax"
    name = str(path).rpartition(".")[2].lower()
    if name not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise StartupError(f"config.json: activation {path!r} is not supported; known: {known}")
    return name
