"""The labels under which a model answers a question, and the tree of their token ids.

A label of several tokens is scored as a continuation: its log-probability is the sum over its
tokens, each after those before it. So a question needs a row of logits for each node of the tree
that has children: one if every label is a single token.
"""

from collections.abc import Callable, Sequence
from itertools import product
from math import exp
from string import ascii_uppercase
from typing import NamedTuple

from engine.errors import InvalidRequest
from gateway.generation.prompt import Prompt
from gateway.schema.decisions.question import Answer, Kind, Question

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
