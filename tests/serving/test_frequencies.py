"""Tokens are sampled with the probabilities of transformers' own sampling.

The same prompt, thousands of seeds, through the whole engine; a chi-square test against the
distribution that transformers' logits processors leave of transformers' logits.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray

from engine.request import RequestSpec
from engine.step import SamplingParams
from engine.worker.process.worker import Worker
from tests.engine.worker.process.driving import load_worker
from tests.inline import play
from tests.models.checkpoints import make_checkpoint, make_model

VOCAB = 97
COUNT = 2000
PROMPT = (5, 17, 17, 60, 3, 44, 5, 5)

Doubles = NDArray[np.float64]


class Pair(NamedTuple):
    """The same weights in transformers and in a worker."""

    model: Any
    worker: Worker


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    directory = make_checkpoint(tmp_path_factory.mktemp("llama"), "llama")
    return Pair(make_model("llama"), load_worker(directory, attention="cpu", kv_slots=4096))


def expected(pair: Pair, tokens: tuple[int, ...], *processors: Any) -> Doubles:
    """Probabilities of the next token, as `generate` would sample it."""
    ids = torch.tensor([tokens])
    with torch.inference_mode():
        scores = pair.model(ids).logits[:, -1].float()
    for processor in processors:
        scores = processor(ids, scores)
    found: Doubles = scores.double().softmax(-1)[0].numpy()
    return found


def assert_sampled_from(counts: Doubles, probs: Doubles) -> None:
    """Chi-square at p = 0.0005, over ids expected at least five times and all others as one."""
    assert counts[probs == 0].sum() == 0
    frequent = probs * counts.sum() >= 5
    bins = np.append(counts[frequent], counts[~frequent].sum())
    shares = np.append(probs[frequent], probs[~frequent].sum()) * counts.sum()
    bins, shares = bins[shares > 0], shares[shares > 0]
    statistic = float(((bins - shares) ** 2 / shares).sum())
    freedom = len(bins) - 1
    # Wilson and Hilferty: the cube root of chi-square / freedom is nearly normal.
    spread = 2 / (9 * freedom) if freedom else 0.0
    assert freedom == 0 or (statistic / freedom) ** (1 / 3) < 1 - spread + 3.29 * spread**0.5


Temperature = transformers.TemperatureLogitsWarper
TopP, TopK = transformers.TopPLogitsWarper, transformers.TopKLogitsWarper
MinP = transformers.MinPLogitsWarper
Repetition = transformers.RepetitionPenaltyLogitsProcessor


@pytest.mark.parametrize(
    ("sampling", "processors"),
    [
        (SamplingParams(), ()),
        (SamplingParams(temperature=0.6), (Temperature(0.6),)),
        (SamplingParams(temperature=1.8), (Temperature(1.8),)),
        (SamplingParams(top_p=0.8), (TopP(0.8),)),
        (SamplingParams(top_k=7), (TopK(7),)),
        (SamplingParams(min_p=0.05), (MinP(0.05),)),
        (SamplingParams(repetition_penalty=1.7), (Repetition(1.7),)),
        (
            SamplingParams(temperature=1.4, top_k=30, top_p=0.9),
            (Temperature(1.4), TopK(30), TopP(0.9)),
        ),
        (
            SamplingParams(temperature=0.9, min_p=0.01, repetition_penalty=0.7),
            (Repetition(0.7), Temperature(0.9), MinP(0.01)),
        ),
    ],
    ids=lambda value: "" if isinstance(value, tuple) else None,
)
def test_frequencies_are_those_of_transformers(
    pair: Pair, sampling: SamplingParams, processors: tuple[Any, ...]
) -> None:
    counts = np.zeros(VOCAB)
    for token in sampled(pair, PROMPT, sampling, 1):
        counts[token[0]] += 1
    assert_sampled_from(counts, expected(pair, PROMPT, *processors))


def test_presence_and_frequency_penalties_change_the_second_token(pair: Pair) -> None:
    """OpenAI's formula on transformers' logits (transformers has no such processor)."""
    presence, frequency = 1.5, 0.8
    sampling = SamplingParams(
        presence_penalty=presence, frequency_penalty=frequency, logit_bias=((9, 100.0),)
    )
    second = np.zeros(VOCAB)
    for tokens in sampled(pair, PROMPT, sampling, 2):
        assert tokens[0] == 9
        second[tokens[1]] += 1

    def penalise(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        scores[0, 9] += 100.0 - presence - frequency
        return scores

    assert_sampled_from(second, expected(pair, (*PROMPT, 9), penalise))


def sampled(
    pair: Pair, prompt: tuple[int, ...], sampling: SamplingParams, max_tokens: int
) -> list[list[int]]:
    """The tokens of `COUNT` requests that differ in their seeds."""
    specs = [RequestSpec(prompt, max_tokens, replace(sampling, seed=seed)) for seed in range(COUNT)]
    outcomes = play(pair.worker, specs, max_batch_size=256, max_queue_requests=COUNT)
    assert all(len(one.tokens) == max_tokens for one in outcomes)
    return [one.tokens for one in outcomes]


@pytest.mark.parametrize("seed", range(3))
def test_a_wrong_temperature_is_detected(pair: Pair, seed: int) -> None:
    probs = expected(pair, PROMPT, Temperature(0.8))
    counts = np.random.default_rng(seed).multinomial(COUNT, probs).astype(np.float64)
    assert_sampled_from(counts, probs)
    with pytest.raises(AssertionError):
        assert_sampled_from(counts, expected(pair, PROMPT))
