"""Heads behind pooling, which score a pair of texts: the logits of two tokens (Qwen3-Reranker), and
sequence classifiers with one label."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from adapters.models.base.fields import Fields
from engine.errors import StartupError
from engine.worker.model.torch_operators import ACTIVATIONS as OF_LAYERS
from engine.worker.ports import ModelShape, PoolingHead, TensorSlice, WeightSource

Function = Callable[[Tensor], Tensor]
ACTIVATIONS: Mapping[str, Function] = {"identity": lambda x: x, "sigmoid": torch.sigmoid}
CLASSIFIER = "ForSequenceClassification"


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

    def build(self, weights: WeightSource, shape: ModelShape) -> Function:
        yes, no = (self._row(weights, shape, token_id) for token_id in self.tokens)
        return lambda states: torch.sigmoid(F.linear(states, yes) - F.linear(states, no))

    def _row(self, weights: WeightSource, shape: ModelShape, token_id: int) -> Tensor:
        sizes = (shape.vocab_size, shape.hidden_size)
        if token_id >= shape.vocab_size:
            raise StartupError(f"token {token_id}, which scores, is not in the vocabulary")
        rows = range(token_id, token_id + 1)
        return weights.tensor(TensorSlice(self.matrix, sizes, rows=rows)).float()


class _Dense(NamedTuple):
    """The name of a linear; `rows` None: as wide as the hidden states."""

    name: str
    has_bias: bool = True
    rows: int | None = None

    def build(self, weights: WeightSource, shape: ModelShape) -> Function:
        rows, hidden = self.rows or shape.hidden_size, shape.hidden_size
        matrix = weights.tensor(TensorSlice(f"{self.name}.weight", (rows, hidden))).float()
        bias = None
        if self.has_bias:
            bias = weights.tensor(TensorSlice(f"{self.name}.bias", (rows,))).float()
        return lambda states: F.linear(states, matrix, bias)


@dataclass(frozen=True, slots=True)
class Classifier:
    """Perhaps a dense layer with its activation and norm, then the label's weights, then the
    activation of the score."""

    label: _Dense
    activation: str
    dense: _Dense | None = None
    dense_activation: str = "tanh"
    norm: str = ""  # the name of its weight, which has no bias
    eps: float = 1e-5

    @property
    def size(self) -> int:
        return 1

    def build(self, weights: WeightSource, shape: ModelShape) -> Function:
        steps: list[Function] = []
        if self.dense is not None:
            is_tanh = self.dense_activation == "tanh"
            steps.append(self.dense.build(weights, shape))
            steps.append(torch.tanh if is_tanh else OF_LAYERS[self.dense_activation])
        if self.norm:
            weight, eps = (
                weights.tensor(TensorSlice(self.norm, (shape.hidden_size,))).float(),
                self.eps,
            )
            steps.append(lambda x: F.layer_norm(x, weight.shape, weight, None, eps))
        steps += [self.label.build(weights, shape), ACTIVATIONS[self.activation]]

        def score(states: Tensor) -> Tensor:
            for step in steps:
                states = step(states)
            return states

        return score


def sequence_classifier(config: Mapping[str, object], architecture: str) -> PoolingHead:
    """The head of a `…ForSequenceClassification`; raises `StartupError` unless it has one label."""
    fields = Fields(config)
    labels = fields.child("id2label")
    count = len(labels.values) if labels is not None else fields.integer("num_labels", 2)
    if count != 1:
        raise StartupError(
            f"config.json: {architecture} has {count} labels; only classifiers with 1 are "
            "supported, which score pairs of texts"
        )
    activation = activation_of(config)
    base = architecture.removesuffix(CLASSIFIER)
    if base == "Bert":
        label, dense = _Dense("classifier", rows=1), _Dense("bert.pooler.dense")
        return Classifier(label, activation, dense)
    if base in ("Roberta", "XLMRoberta"):
        label, dense = _Dense("classifier.out_proj", rows=1), _Dense("classifier.dense")
        return Classifier(label, activation, dense)
    if base == "ModernBert":
        return Classifier(
            _Dense("classifier", rows=1),
            activation,
            _Dense("head.dense", has_bias=fields.flag("classifier_bias", False)),
            fields.activation("classifier_activation", "gelu"),
            "head.norm.weight",
            fields.number("norm_eps", 1e-5),
        )
    return Classifier(_Dense("score", has_bias=False, rows=1), activation)


def activation_of(config: Mapping[str, object]) -> str:
    """The activation that sentence-transformers' config names; a sigmoid by default."""
    own = Fields(config).child("sentence_transformers")
    path = own.get("activation_fn") if own is not None else None
    path = path or config.get("sbert_ce_default_activation_function")
    if path is None:
        return "sigmoid"
    name = str(path).rpartition(".")[2].lower()
    if name not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise StartupError(f"config.json: activation {path!r} is not supported; known: {known}")
    return name
