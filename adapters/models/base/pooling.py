"""How a checkpoint pools, from sentence-transformers' `modules.json` and from config.json.

modules.json             task     pooled by
Pooling, Normalize       embed    1_Pooling/config.json
LogitScore               score    the logits of two tokens after the prompt (Qwen3-Reranker)
none                     score if config.json names a …ForSequenceClassification, embed for an
                         encoder, else generate; the setting `task` overrides it
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from adapters.models.base.fields import Fields
from adapters.models.checkpoint import read_json
from engine.errors import StartupError
from engine.worker.model.torch_operators import ACTIVATIONS as OF_LAYERS
from engine.worker.ports import (
    ModelShape,
    PoolingConfig,
    PoolingHead,
    PoolingMethod,
    TensorSlice,
    WeightSource,
)

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


METHODS = {
    "lasttoken": PoolingMethod.LAST,
    "cls": PoolingMethod.CLS,
    "cls_token": PoolingMethod.CLS,
    "mean": PoolingMethod.MEAN,
    "mean_tokens": PoolingMethod.MEAN,
}
ENCODERS = ("Bert", "Roberta", "XLMRoberta", "ModernBert")
GENERATORS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
# The prompt with which Qwen3-Reranker was trained (its model card).
RERANK_TEMPLATE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n<Instruct>: Given a web search query, retrieve relevant passages that "
    "answer the query\n<Query>: {query}\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n"
    "<think>\n\n</think>\n\n"
)


def read_pooling(
    directory: Path, config: Mapping[str, object], architecture: str, task: str
) -> PoolingConfig | None:
    """How the checkpoint pools for `task` ("auto": what it is meant for); None if it generates.

    Raises `StartupError` for a task that it cannot do, and for modules that are not supported.
    """
    modules = _modules(directory)
    if task == "auto":
        task = _task_of(modules, architecture)
    if task == "generate":
        if not architecture.endswith(GENERATORS):
            raise StartupError(f"--task generate: {architecture} does not generate text")
        return None
    if task == "score":
        return _score(directory, config, architecture, modules)
    if architecture.endswith(CLASSIFIER):
        raise StartupError(f"--task embed: {architecture} scores pairs of texts")
    pooling = _embed(directory, modules, architecture)
    return replace(pooling, dimensions=_dimensions(Fields(config), architecture, modules))


def _modules(directory: Path) -> dict[str, Path]:
    """The folder of each module by the last part of its type; empty without modules.json."""
    path = directory / "modules.json"
    if not path.is_file():
        return {}
    try:
        listed = json.loads(path.read_text(encoding="utf-8"))
        return {str(row["type"]).rpartition(".")[2]: directory / str(row["path"]) for row in listed}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise StartupError(f"{path} is not a list of modules: {error!r}") from error


def _task_of(modules: Mapping[str, Path], architecture: str) -> str:
    if architecture.endswith(CLASSIFIER) or "LogitScore" in modules:
        return "score"
    is_generator = architecture.endswith(GENERATORS)
    return "generate" if is_generator and not modules else "embed"


def _embed(directory: Path, modules: Mapping[str, Path], architecture: str) -> PoolingConfig:
    """sentence-transformers' pooling; without modules.json a decoder's last token or an encoder's
    first, normalized."""
    known = ("Transformer", "Pooling", "Normalize")
    for name in modules:
        if name not in known:
            raise StartupError(
                f"{directory / 'modules.json'}: module {name} is not supported; known: "
                + ", ".join(known)
            )
    max_tokens = _max_tokens(directory, modules)
    if "Pooling" not in modules:
        method = _usual_method(architecture)
        return PoolingConfig("embed", method, is_normalized=True, max_tokens=max_tokens)
    method = _method(modules["Pooling"] / "config.json")
    return PoolingConfig(
        "embed", method, is_normalized="Normalize" in modules, max_tokens=max_tokens
    )


def _dimensions(
    fields: Fields, architecture: str, modules: Mapping[str, Path]
) -> tuple[int, ...] | None:
    """The lengths that an embedding may be cut to, by the fields of config.json that vLLM reads;
    empty for any. Qwen3-Embedding is trained for it, and its config.json does not say so."""
    sizes = fields.get("matryoshka_dimensions")
    if isinstance(sizes, list) and all(isinstance(size, int) and size > 0 for size in sizes):
        return tuple(sizes)
    is_qwen3_embedding = architecture in ("Qwen3ForCausalLM", "Qwen3Model") and bool(modules)
    return () if fields.flag("is_matryoshka", is_qwen3_embedding) else None


def _usual_method(architecture: str) -> PoolingMethod:
    is_encoder = architecture.startswith(ENCODERS)
    return PoolingMethod.CLS if is_encoder else PoolingMethod.LAST


def _method(path: Path) -> PoolingMethod:
    """The pooling mode of `1_Pooling/config.json`, in the form of any version."""
    values = read_json(path)
    modes = values.get("pooling_mode")
    if modes is None:
        prefix = "pooling_mode_"
        chosen = [name for name, on in values.items() if name.startswith(prefix) and on is True]
        modes = [name.removeprefix(prefix) for name in chosen]
    modes = modes if isinstance(modes, list) else [modes]
    if len(modes) != 1 or modes[0] not in METHODS:
        known = "one of lasttoken, cls, mean"
        raise StartupError(f"{path}: pooling mode {modes} is not supported, only {known}")
    return METHODS[str(modes[0])]


def _max_tokens(directory: Path, modules: Mapping[str, Path]) -> int | None:
    """`max_seq_length` of sentence_bert_config.json; None if it sets no limit."""
    folder = modules.get("Transformer", directory)
    fields = Fields(read_json(folder / "sentence_bert_config.json"), "sentence_bert_config.json")
    return None if fields.get("max_seq_length") is None else fields.integer("max_seq_length")


def _score(
    directory: Path, config: Mapping[str, object], architecture: str, modules: Mapping[str, Path]
) -> PoolingConfig:
    if architecture.endswith(CLASSIFIER):
        classifier = sequence_classifier(config, architecture)
        method = _usual_method(architecture)
        if config.get("classifier_pooling") == "mean":
            method = PoolingMethod.MEAN
        max_tokens = _max_tokens(directory, modules)
        return PoolingConfig("score", method, head=classifier, max_tokens=max_tokens)
    if not architecture.endswith("ForCausalLM"):
        raise StartupError(f"--task score: {architecture} has no head that scores")
    tokens = _score_tokens(directory, modules)
    tied = bool(config.get("tie_word_embeddings", False))
    head = LogitDifference(tokens, "model.embed_tokens.weight" if tied else "lm_head.weight")
    return PoolingConfig("score", PoolingMethod.LAST, head=head, pair_template=RERANK_TEMPLATE)


def _score_tokens(directory: Path, modules: Mapping[str, Path]) -> TokenIds:
    """The ids that LogitScore's config names, else those of "yes" and "no" in tokenizer.json."""
    if "LogitScore" in modules:
        fields = Fields(read_json(modules["LogitScore"] / "config.json"), "LogitScore config.json")
        return TokenIds(fields.integer("true_token_id"), fields.integer("false_token_id"))
    vocab = Fields(read_json(directory / "tokenizer.json"), "tokenizer.json").child("model")
    ids = vocab.get("vocab") if vocab is not None else None
    if not isinstance(ids, dict) or "yes" not in ids or "no" not in ids:
        raise StartupError(f"--task score: the vocabulary of {directory} lacks the token yes or no")
    return TokenIds(int(ids["yes"]), int(ids["no"]))
