"""How a checkpoint pools, from sentence-transformers' `modules.json` and from config.json.

modules.json             task     pooled by
Pooling, Normalize       embed    1_Pooling/config.json
LogitScore               score    the logits of two tokens after the prompt (Qwen3-Reranker)
none                     score if config.json names a …ForSequenceClassification, embed for an
                         encoder, else generate; the setting `task` overrides it
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from adapters.models.base.fields import Fields
from adapters.models.base.pooling_heads import (
    CLASSIFIER,
    LogitDifference,
    TokenIds,
    sequence_classifier,
)
from adapters.models.checkpoint import read_json
from engine.errors import StartupError
from engine.worker.ports import PoolingConfig, PoolingMethod

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
