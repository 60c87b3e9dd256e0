"""Log-probabilities of prompt and output are transformers', through the whole engine.

However a prompt is cut, whoever shares the batch, whatever is computed twice: each position is
told once.
"""

from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from engine.request import RequestSpec
from engine.step import SamplingParams, TokenLogprobs
from engine.worker.process.worker import Worker
from engine.worker.sampling.logits_output import SLICE_BYTES
from tests.checkpoints import make_checkpoint, make_model
from tests.engine.worker.process.driving import load_worker
from tests.inline import Heard, play

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


def an_ask(
    length: int, seed: int, sampling: SamplingParams = GREEDY, max_tokens: int = 8
) -> RequestSpec:
    rng = Random(seed)
    prompt = tuple(rng.randrange(97) for _ in range(length))
    return RequestSpec(prompt, max_tokens, sampling, logprobs=seed % 6, prompt_logprobs=seed % 4)


def assert_told(pair: Pair, ask: RequestSpec, heard: Heard) -> None:
    assert len(heard.tokens) == ask.max_tokens
    expected = pair.expected([*ask.prompt, *heard.tokens])
    after_first = [*ask.prompt[1:], *heard.tokens]
    told = [*heard.prompt_logprobs, *heard.logprobs]
    for at, (token, found) in enumerate(zip(after_first, told, strict=True)):
        is_output = at + 1 >= len(ask.prompt)
        top = ask.logprobs if is_output else ask.prompt_logprobs
        assert top is not None
        assert_one(expected[at], token, found, top)


def assert_one(expected: Tensor, token: int, found: TokenLogprobs, top: int) -> None:
    assert abs(found.logprob - expected[token].item()) < TOLERANCE
    assert len(found.top) == top
    for (_, value), best in zip(found.top, expected.topk(top).values.tolist(), strict=True):
        assert abs(value - best) < TOLERANCE
    for other, value in found.top:
        assert abs(value - expected[other].item()) < TOLERANCE
    least = int((expected > expected[token] + TOLERANCE).sum())
    most = int((expected > expected[token] - TOLERANCE).sum())
    assert least < found.rank <= most


@pytest.mark.parametrize("chunk", [1, 5, 512])
@pytest.mark.parametrize("sampling", [GREEDY, HOT], ids=["greedy", "hot"])
def test_one_request_whole_or_in_chunks(pair: Pair, chunk: int, sampling: SamplingParams) -> None:
    ask = an_ask(23, 3, sampling)
    (heard,) = play(pair.worker, [ask], max_batch_tokens=chunk, max_batch_size=1)
    assert_told(pair, ask, heard)


def test_requests_that_share_batches_and_prefixes(pair: Pair) -> None:
    asks = [an_ask(1 + 7 * seed, seed, HOT if seed % 2 else GREEDY) for seed in range(8)]
    asks += asks[5:]  # whose prefixes are cached by then, in part
    for ask, heard in zip(asks, play(pair.worker, asks, max_batch_tokens=16, max_batch_size=4),
                          strict=True):  # fmt: skip
        assert_told(pair, ask, heard)


def test_a_prefix_that_is_cached_is_told_all_the_same(pair: Pair) -> None:
    ask = an_ask(40, 3)
    asks = [RequestSpec(ask.prompt, 1, GREEDY), ask, ask]
    heard = play(pair.worker, asks, max_batch_size=1)
    for one in heard[1:]:
        assert one.request is not None
        assert one.request.num_cached == 0
        assert_told(pair, ask, one)


def test_preemption_tells_nothing_twice(pair: Pair) -> None:
    asks = [an_ask(20, seed, HOT, max_tokens=24) for seed in range(4)]
    heard = play(pair.worker, asks, num_blocks=20, max_batch_tokens=8, max_batch_size=4)
    requests = [one.request for one in heard if one.request is not None]
    assert sum(request.num_preemptions for request in requests) > 0
    for ask, one in zip(asks, heard, strict=True):
        assert_told(pair, ask, one)


@pytest.mark.parametrize("dies_in", [(2,), (3, 6), (5, 9)])
def test_the_death_of_a_worker_tells_nothing_twice(pair: Pair, dies_in: tuple[int, ...]) -> None:
    asks = [an_ask(20, seed) for seed in range(3)]
    heard = play(pair.worker, asks, dies_in=dies_in, max_batch_tokens=8, max_batch_size=4)
    for ask, one in zip(asks, heard, strict=True):
        assert_told(pair, ask, one)


def test_looking_ahead_tells_nothing_twice(pair: Pair) -> None:
    asks = [an_ask(20, seed, HOT, max_tokens=24) for seed in range(4)]
    heard = play(pair.worker, asks, num_blocks=20, lookahead=1, max_batch_tokens=8,
                 max_batch_size=4, dies_in=(9,))  # fmt: skip
    for ask, one in zip(asks, heard, strict=True):
        assert_told(pair, ask, one)


def test_nobody_else_pays_or_is_told(pair: Pair) -> None:
    asking = an_ask(20, 1)
    plain = RequestSpec(asking.prompt, 8, GREEDY)
    told, heard = play(pair.worker, [asking, plain])
    assert heard.tokens == told.tokens
    assert heard.logprobs == heard.prompt_logprobs == []


def test_slices_of_a_large_vocabulary_are_told_like_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = load_worker(make_checkpoint(tmp_path), attention="cpu")
    ask = an_ask(50, 3)
    (whole,) = play(worker, [ask])
    assert SLICE_BYTES > 4 * 97 * 50
    monkeypatch.setattr("engine.worker.sampling.logits_output.SLICE_BYTES", 4 * 97 * 7)
    (sliced,) = play(worker, [ask])
    assert [one.rank for one in sliced.prompt_logprobs] == [
        one.rank for one in whole.prompt_logprobs
    ]
    for a, b in zip(sliced.prompt_logprobs, whole.prompt_logprobs, strict=True):
        assert a.logprob == pytest.approx(b.logprob, abs=1e-5)
