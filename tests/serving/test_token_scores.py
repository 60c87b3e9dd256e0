"""Log-probabilities of given tokens after a prompt are transformers', through the whole engine: for
prompts that share a prefix, whether layers keep all of it, a window or a state."""

from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from engine.pooling import PoolSpec
from engine.request import Caching, FinishReason, RequestSpec
from engine.step import SamplingParams
from engine.worker.process.worker import Worker
from tests.engine.worker.process.driving import load_worker
from tests.inline import RequestOutcome, play
from tests.models.checkpoints import make_checkpoint, make_model

TOLERANCE = 1e-4
GREEDY = SamplingParams(temperature=0.0)
VARIANTS = ("llama", "gemma3", "qwen3_5")
SHARED_LEN = 41  # ten blocks of four, and a token


@pytest.fixture(scope="module", params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def worker(variant: str, tmp_path_factory: pytest.TempPathFactory) -> Worker:
    directory = make_checkpoint(tmp_path_factory.mktemp(variant), variant)
    return load_worker(directory, attention="cpu")


def prefill(prompt: tuple[int, ...]) -> RequestSpec:
    return RequestSpec(
        prompt, 0, GREEDY, pooling=PoolSpec(), caching=Caching(checkpoints=(len(prompt),))
    )


def questions(prompt: tuple[int, ...], count: int) -> list[RequestSpec]:
    rng = Random(count)
    specs = []
    for index in range(count):
        tail = tuple(rng.randrange(97) for _ in range(1 + index % 7))
        token_ids = tuple(rng.sample(range(97), 1 + 3 * index % 11))
        specs.append(RequestSpec(prompt + tail, 0, GREEDY, pooling=PoolSpec(token_ids=token_ids)))
    return specs


def prompt_of(seed: int, length: int = SHARED_LEN) -> tuple[int, ...]:
    rng = Random(seed)
    return tuple(rng.randrange(97) for _ in range(length))


def assert_scores(variant: str, specs: list[RequestSpec], outcomes: list[RequestOutcome]) -> None:
    model = make_model(variant)
    for spec, outcome in zip(specs, outcomes, strict=True):
        assert (outcome.finish, outcome.tokens) == (FinishReason.STOP, [])
        assert spec.pooling is not None
        with torch.inference_mode():
            logits = model(torch.tensor([spec.prompt])).logits[0, -1]
        expected = logits.float().log_softmax(-1)[list(spec.pooling.token_ids)]
        found = np.frombuffer(outcome.request.vector, "<f4")
        assert np.allclose(found, expected.numpy(), atol=TOLERANCE), spec


def test_questions_start_behind_the_prompt_that_they_share(variant: str, worker: Worker) -> None:
    prompt = prompt_of(1)
    tails = questions(prompt, 20)
    first, *others = play(worker, [prefill(prompt), *tails], max_batch_size=1)
    assert first.request.vector == b""
    assert_scores(variant, tails, others)
    assert {one.request.num_cached // worker.report.block_size for one in others} <= {10, 11}


def test_a_prompt_that_ends_with_a_block_is_shared_to_its_end(worker: Worker) -> None:
    prompt = prompt_of(2, 40)
    _, *others = play(worker, [prefill(prompt), *questions(prompt, 8)], max_batch_size=1)
    assert min(one.request.num_cached for one in others) == len(prompt)


@pytest.mark.parametrize("bounds", [{}, {"max_batch_tokens": 7, "max_batch_size": 3}], ids=str)
def test_questions_share_iterations_with_generated_text(
    variant: str, worker: Worker, bounds: dict[str, Any]
) -> None:
    prompt = prompt_of(3)
    tails = questions(prompt, 12)
    text = RequestSpec(prompt, 9, GREEDY, logprobs=2, prompt_logprobs=1)
    *outcomes, generated = play(worker, [*tails, text], **bounds)
    assert_scores(variant, tails, outcomes)
    assert (len(generated.tokens), len(generated.prompt_logprobs)) == (9, SHARED_LEN - 1)


def test_scores_are_the_same_bits_after_preemption_and_a_worker_death(worker: Worker) -> None:
    prompt = prompt_of(4)
    tails = questions(prompt, 9)
    texts = [RequestSpec(prompt_of(9 + n, 20), 24, GREEDY) for n in range(3)]
    calm = play(worker, tails, max_batch_size=1)
    rough = play(worker, [*texts, *tails], dies_in=(4, 9), max_batch_tokens=16, max_batch_size=4)
    for one, other in zip(calm, rough[len(texts) :], strict=True):
        assert one.request.vector == other.request.vector


def test_a_sliced_vocabulary_has_the_scores_of_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = load_worker(make_checkpoint(tmp_path), attention="cpu")
    tails = questions(prompt_of(5), 7)
    monkeypatch.setattr("engine.worker.sampling.logits_output.SLICE_BYTES", 4 * 97 * 3)
    assert_scores("llama", tails, play(worker, tails))


def test_a_token_outside_of_the_vocabulary_is_rejected(tmp_path: Path) -> None:
    worker = load_worker(make_checkpoint(tmp_path), attention="cpu")
    spec = RequestSpec((5, 6), 0, GREEDY, pooling=PoolSpec(token_ids=(3, 97)))
    (outcome,) = play(worker, [spec])
    assert "token ids to score out of range" in str(outcome.error)
