"""Log-probabilities of prompt and output are transformers', through the whole engine.

They do not depend on how a prompt is split, on other requests of the batch, or on recomputation;
each position is reported once.
"""

from random import Random
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from engine.request import RequestSpec
from engine.step import SamplingParams, TokenLogprobs
from engine.worker.process.worker import Worker
from tests.engine.worker.process.driving import load_worker
from tests.inline import RequestOutcome, play
from tests.models.checkpoints import make_checkpoint, make_model

TOLERANCE = 1e-4
GREEDY = SamplingParams(temperature=0.0)
HOT = SamplingParams(
    temperature=1.3, top_p=0.9, logit_bias=((5, 3.0),), presence_penalty=1.0, seed=3
)


class Pair(NamedTuple):
    """The same weights in transformers and in a worker."""

    model: Any
    worker: Worker

    def expected(self, tokens: list[int]) -> Tensor:
        """Log-probabilities of every id after each of the tokens."""
        with torch.inference_mode():
            logits: Tensor = self.model(torch.tensor([tokens])).logits[0]
        return logits.float().log_softmax(-1)


@pytest.fixture(scope="module", params=["llama", "qwen3", "gpt2"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    variant = str(request.param)
    directory = make_checkpoint(tmp_path_factory.mktemp(variant), variant)
    return Pair(make_model(variant), load_worker(directory, attention="cpu"))


def spec_for(
    length: int, seed: int, sampling: SamplingParams = GREEDY, max_tokens: int = 8
) -> RequestSpec:
    rng = Random(seed)
    prompt = tuple(rng.randrange(97) for _ in range(length))
    return RequestSpec(prompt, max_tokens, sampling, logprobs=seed % 6, prompt_logprobs=seed % 4)


def assert_logprobs(
    pair: Pair, spec: RequestSpec, outcome: RequestOutcome, tolerance: float = TOLERANCE
) -> None:
    assert len(outcome.tokens) == spec.max_tokens
    expected = pair.expected([*spec.prompt, *outcome.tokens])
    after_first = [*spec.prompt[1:], *outcome.tokens]
    reported = [*outcome.prompt_logprobs, *outcome.logprobs]
    for at, (token, found) in enumerate(zip(after_first, reported, strict=True)):
        is_output = at + 1 >= len(spec.prompt)
        top = spec.logprobs if is_output else spec.prompt_logprobs
        assert top is not None
        assert_one(expected[at], token, found, top, tolerance)


def assert_one(
    expected: Tensor, token: int, found: TokenLogprobs, top: int, tolerance: float
) -> None:
    assert abs(found.logprob - expected[token].item()) < tolerance
    assert len(found.top) == top
    for (_, value), best in zip(found.top, expected.topk(top).values.tolist(), strict=True):
        assert abs(value - best) < tolerance
    for other, value in found.top:
        assert abs(value - expected[other].item()) < tolerance
    least = int((expected > expected[token] + tolerance).sum())
    most = int((expected > expected[token] - tolerance).sum())
    assert least < found.rank <= most


@pytest.mark.parametrize("chunk", [1, 5, 512])
@pytest.mark.parametrize("sampling", [GREEDY, HOT], ids=["greedy", "hot"])
def test_one_request_in_one_prefill_or_in_chunks(
    pair: Pair, chunk: int, sampling: SamplingParams
) -> None:
    spec = spec_for(23, 3, sampling)
    (outcomes,) = play(pair.worker, [spec], max_batch_tokens=chunk, max_batch_size=1)
    assert_logprobs(pair, spec, outcomes)


def test_requests_that_share_batches_and_prefixes(pair: Pair) -> None:
    specs = [spec_for(1 + 7 * seed, seed, HOT if seed % 2 else GREEDY) for seed in range(8)]
    specs += specs[5:]  # whose prefixes are cached by then, in part
    outcomes = play(pair.worker, specs, max_batch_tokens=16, max_batch_size=4)
    for spec, outcome in zip(specs, outcomes, strict=True):
        assert_logprobs(pair, spec, outcome)


def test_a_cached_prefix_has_its_log_probabilities(pair: Pair) -> None:
    spec = spec_for(40, 3)
    specs = [RequestSpec(spec.prompt, 1, GREEDY), spec, spec]
    outcomes = play(pair.worker, specs, max_batch_size=1)
    for one in outcomes[1:]:
        assert one.request.num_cached == 0
        assert_logprobs(pair, spec, one)


@pytest.mark.parametrize(
    "setbacks",
    [
        {"num_blocks": 20},
        {"num_blocks": 20, "lookahead": 1, "dies_in": (9,)},
        {"dies_in": (2,)},
        {"dies_in": (3, 6)},
        {"dies_in": (5, 9)},
    ],
    ids=str,
)
def test_no_setback_repeats_a_log_probability(pair: Pair, setbacks: dict[str, Any]) -> None:
    specs = [spec_for(20, seed, HOT, max_tokens=24) for seed in range(4)]
    outcomes = play(pair.worker, specs, max_batch_tokens=8, max_batch_size=4, **setbacks)
    num_preemptions = sum(one.request.setbacks.num_preemptions for one in outcomes)
    assert (num_preemptions > 0) == ("num_blocks" in setbacks)
    for spec, one in zip(specs, outcomes, strict=True):
        assert_logprobs(pair, spec, one)


def test_other_requests_get_no_log_probabilities(pair: Pair) -> None:
    asking = spec_for(20, 1)
    plain = RequestSpec(asking.prompt, 8, GREEDY)
    reported, outcomes = play(pair.worker, [asking, plain])
    assert outcomes.tokens == reported.tokens
    assert outcomes.logprobs == outcomes.prompt_logprobs == []


def test_a_sliced_vocabulary_has_the_log_probabilities_of_the_whole(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_for(50, 3)
    monkeypatch.setattr("engine.worker.sampling.logits_output.SLICE_BYTES", 4 * 97 * 7)
    (outcome,) = play(pair.worker, [spec])
    assert_logprobs(pair, spec, outcome)
