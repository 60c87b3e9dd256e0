"""From a scoring or reranking request to its plan, and from vectors to scores.

A model that scores reads both texts of a pair at once. With a model that embeds, the score of a
pair is the cosine similarity of its two embeddings.

The labels under which a model answers a question, and the tree of their token ids.

A label of several tokens is scored as a continuation: its log-probability is the sum over its
tokens, each after those before it. So a question needs a row of logits for each node of the tree
that has children: one if every label is a single token.
"""

import struct
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from math import exp
from string import ascii_uppercase
from typing import NamedTuple

import orjson

from engine.errors import InvalidRequest
from engine.pooling import PoolingReport
from gateway.access.callers import Caller
from gateway.generation.prompt import Prompt
from gateway.pooling.plan import PairInput, PooledInputs, PoolingInput, PoolingPlan, TemplatedInput
from gateway.schema.decisions.question import Answer, Kind, Question
from gateway.schema.decoding import decode_checked
from gateway.schema.openai.pooling import PoolingRequest, RerankRequest, ScoreRequest, TextPair
from gateway.service import Service

PAIRS = ["".join(pair) for pair in product(ascii_uppercase, repeat=2)]
Encode = Callable[[str], Prompt]


def labels_of(question: Question, encode: Encode) -> list[str]:
    """The labels of a question's options: yes and no, levels from 0 on, or letters. More than 26
    options have two letters each, of which pairs that are a single token come first."""
    count = len(question.options)
    if question.kind is Kind.PREDICATE:
        return ["Yes", "No"]
    if question.kind is Kind.SCORE:
        return [str(level) for level in range(count)]
    if count <= len(ascii_uppercase):
        return [*ascii_uppercase[:count]]
    return sorted(PAIRS, key=lambda pair: len(encode(pair)))[:count]


class Node(NamedTuple):
    """The first tokens of labels, after which the log-probabilities of `children` are needed."""

    path: Prompt
    children: Prompt


def tree_of(ids: Sequence[Prompt], field: str) -> list[Node]:
    """The nodes for labels with these token ids, the root first. Raises `InvalidRequest`, which
    names `field`, if a label has no tokens or is the beginning of another one."""
    if not all(ids) or len({*ids}) < len(ids):
        raise InvalidRequest(
            f"'{field}' cannot be answered by this model: its tokenizer does not tell the labels "
            "of the options apart.",
            field,
        )
    children: dict[Prompt, dict[int, None]] = {}
    for label in ids:
        for place, token in enumerate(label):
            children.setdefault(label[:place], {})[token] = None
    if any(label in children for label in ids):
        raise InvalidRequest(
            f"'{field}' cannot be answered by this model: one label begins with another.", field
        )
    return [Node(path, tuple(tokens)) for path, tokens in children.items()]


def answer_of(
    ids: Sequence[Prompt], nodes: Sequence[Node], scores: Sequence[Sequence[float]]
) -> Answer:
    """The answer, from the log-probabilities of each node's children."""
    logprobs = {
        (*node.path, token): score
        for node, row in zip(nodes, scores, strict=True)
        for token, score in zip(node.children, row, strict=True)
    }
    totals = [sum(logprobs[label[: end + 1]] for end in range(len(label))) for label in ids]
    most = max(totals)
    weights = [exp(total - most) for total in totals]
    whole = sum(weights)
    return Answer(tuple(weight / whole for weight in weights), min(1.0, exp(most) * whole))


class Scoring(NamedTuple):
    """What is pooled to score pairs, the request field of each input, and how to get the scores."""

    inputs: Sequence[PoolingInput]
    fields: Sequence[str]
    scores: Callable[[Sequence[bytes]], list[float]]


def plan_score(body: bytes, caller: Caller, service: Service) -> PoolingPlan:
    """The plan of a `/score` request; raises `InvalidRequest`, or `UnsupportedByModel` if the model
    generates text."""
    request = decode_checked(ScoreRequest, body, caller.unknown_fields)
    scoring = _scoring(request.pairs, service.check_pools(request.model))
    header = {
        "id": service.new_id("score-"),
        "object": "list",
        "created": service.unix_now(),
        "model": request.model,
    }
    return _plan(request, scoring, partial(_render_scores, header, scoring), caller, service)


def plan_rerank(body: bytes, caller: Caller, service: Service) -> PoolingPlan:
    """The plan of a `/rerank` request; raises as `plan_score` does."""
    request = decode_checked(RerankRequest, body, caller.unknown_fields)
    scoring = _scoring(request.pairs, service.check_pools(request.model))
    render = partial(_render_ranking, service.new_id("rerank-"), request, scoring)
    return _plan(request, scoring, render, caller, service)


def _plan(
    request: PoolingRequest,
    scoring: Scoring,
    render: Callable[[PooledInputs], bytes],
    caller: Caller,
    service: Service,
) -> PoolingPlan:
    return PoolingPlan(
        caller=caller,
        inputs=scoring.inputs,
        render=render,
        input_field="documents" if isinstance(request, RerankRequest) else "text_2",
        scheduling=request.scheduling_params,
        truncate_prompt_tokens=request.truncate_prompt_tokens,
        fields=scoring.fields,
        lora=service.lora_of(request.model),
    )


def _scoring(pairs: Sequence[TextPair], report: PoolingReport) -> Scoring:
    fields = [pair.field for pair in pairs]
    if report.task == "embed":
        queries = list(dict.fromkeys(pair.query for pair in pairs))
        place_of = {query: place for place, query in enumerate(queries)}
        places = [place_of[pair.query] for pair in pairs]
        inputs = [*queries, *(pair.document for pair in pairs)]
        return Scoring(inputs, [*("query" for _ in queries), *fields], partial(_cosines, places))
    if report.pair_template:
        templated = [TemplatedInput.of(report.pair_template, *pair[:2]) for pair in pairs]
        return Scoring(templated, fields, _only_numbers)
    return Scoring([PairInput(*pair[:2]) for pair in pairs], fields, _only_numbers)


def _only_numbers(vectors: Sequence[bytes]) -> list[float]:
    """The numbers of vectors of length 1."""
    return [struct.unpack_from("<f", vector)[0] for vector in vectors]


def _cosines(places: Sequence[int], vectors: Sequence[bytes]) -> list[float]:
    """Cosine similarities; `places` has the index of each pair's query among the vectors, of which
    the last ones are those of the documents."""
    import numpy as np  # only servers of models that pool have imported it

    embeddings = [np.frombuffer(vector, "<f4") for vector in vectors]
    units = [each / max(float(np.linalg.norm(each)), 1e-12) for each in embeddings]
    documents = units[len(units) - len(places) :]
    return [float(units[at] @ each) for at, each in zip(places, documents, strict=True)]


def _render_scores(header: dict[str, object], scoring: Scoring, pooled: PooledInputs) -> bytes:
    """vLLM's response body."""
    data = [
        {"index": index, "object": "score", "score": score}
        for index, score in enumerate(scoring.scores(pooled.vectors))
    ]
    return orjson.dumps({**header, "data": data, "usage": pooled.usage})


def _render_ranking(
    response_id: str, request: RerankRequest, scoring: Scoring, pooled: PooledInputs
) -> bytes:
    """The response body of Jina's API, as vLLM has it: the most relevant document first."""
    scores = scoring.scores(pooled.vectors)
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[: request.top_n]
    has_documents = request.return_documents is not False
    texts = request.texts
    results = [
        {"index": index}
        | ({"document": {"text": texts[index]}} if has_documents else {})
        | {"relevance_score": scores[index]}
        for index in order
    ]
    body = {"id": response_id, "model": request.model, "usage": pooled.usage, "results": results}
    return orjson.dumps(body)
