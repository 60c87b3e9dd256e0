"""Padded batches of examples with similar lengths, prepared in a background process."""

import multiprocessing
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.queues import Queue
from random import Random

import torch
from tokenizers import Tokenizer
from torch import Tensor

from examples.builtin_model.corpus.example import Example
from examples.builtin_model.corpus.mixture import draw
from examples.builtin_model.training.chat_template import segments

Encoded = tuple[list[int], list[float]]


POOL = 1500  # examples drawn at a time


@dataclass(frozen=True, slots=True)
class Plan:
    """What to sample; `early` batches are short, with much copying and arithmetic."""

    seed: int
    early: bool
    batch_tokens: int
    longest: int


@dataclass(frozen=True, slots=True)
class Batch:
    tokens: Tensor  # [rows, length]
    weights: Tensor  # [rows, length]


def encode(tokenizer: Tokenizer, example: Example) -> Encoded:
    ids: list[int] = []
    weights: list[float] = []
    for text, own in segments(example.messages, example.tools):
        piece = tokenizer.encode(text, add_special_tokens=False).ids
        ids += piece
        weights += [1.0 if own else 0.0] * len(piece)
    return ids, weights


def pad(rows: list[Encoded], filler: int) -> Batch:
    longest = max(len(ids) for ids, _ in rows)
    tokens = torch.full((len(rows), longest), filler)
    weights = torch.zeros(len(rows), longest)
    for row, (ids, own) in enumerate(rows):
        tokens[row, : len(ids)] = torch.tensor(ids)
        weights[row, : len(ids)] = torch.tensor(own)
    return Batch(tokens, weights)


def rounds(tokenizer: Tokenizer, plan: Plan) -> Iterator[list[Encoded]]:
    """Samples a pool, sorts it by length, divides it into batches and shuffles them."""
    random = Random(plan.seed)
    while True:
        pool = [encode(tokenizer, draw(random, plan.early)) for _ in range(POOL)]
        pool = [row for row in pool if len(row[0]) <= plan.longest]
        pool.sort(key=lambda row: len(row[0]))
        batches: list[list[Encoded]] = [[]]
        for row in pool:
            if batches[-1] and len(row[0]) * (len(batches[-1]) + 1) > plan.batch_tokens:
                batches.append([])
            batches[-1].append(row)
        random.shuffle(batches)
        yield from batches


def _fill(queue: "Queue[list[Encoded]]", text: str, plan: Plan) -> None:
    for rows in rounds(Tokenizer.from_str(text), plan):
        queue.put(rows)


def batches(tokenizer: Tokenizer, plan: Plan) -> Iterator[Batch]:
    context = multiprocessing.get_context("spawn")
    queue: Queue[list[Encoded]] = context.Queue(maxsize=64)
    worker = context.Process(target=_fill, args=(queue, tokenizer.to_str(), plan), daemon=True)
    worker.start()
    filler = tokenizer.token_to_id("<|endoftext|>")
    assert filler is not None, "the tokenizer has its special tokens"
    try:
        while True:
            yield pad(queue.get(), filler)
    finally:
        worker.terminate()
        worker.join()
