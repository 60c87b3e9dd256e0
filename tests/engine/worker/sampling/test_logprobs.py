import numpy as np
import pytest
import torch

from engine.step import SampleSpec, SamplingParams
from engine.worker.cpu.sampling import NativeSampling
from engine.worker.cpu.thread_pool import NativeThreadPool
from engine.worker.model.torch_operators import TorchSampling
from engine.worker.ports import SamplingOperators
from engine.worker.sampling.filters import Floats
from engine.worker.sampling.sampler import Sampler

GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module", params=["torch", "native"])
def operators(request: pytest.FixtureRequest) -> SamplingOperators:
    return TorchSampling() if request.param == "torch" else NativeSampling(NativeThreadPool(2))


def noise(vocab: int, seed: int = 0) -> Floats:
    return (3 * np.random.default_rng(seed).standard_normal(vocab)).astype(np.float32)


def test_log_probabilities_are_those_of_the_raw_logits(operators: SamplingOperators) -> None:
    logits = torch.from_numpy(np.stack([noise(300, seed) for seed in range(4)]))
    expected = logits.log_softmax(-1)
    samplings = [
        GREEDY,
        SamplingParams(temperature=2.0, top_p=0.5),
        SamplingParams(logit_bias=((7, 99.0),)),
        SamplingParams(temperature=0.0, presence_penalty=2.0, repetition_penalty=5.0),
    ]
    specs = [
        SampleSpec(
            sampling, banned=(int(logits[0].argmax()),), prompt=(1, 2), output=(3,), logprobs=row
        )
        for row, sampling in enumerate(samplings)
    ]
    tokens, logprobs, _ = Sampler(300, operators).sample(logits, specs, [0] * 4)
    assert tokens[2] == 7
    for row, (token, told) in enumerate(zip(tokens, logprobs, strict=True)):
        assert told is not None
        assert told.logprob == pytest.approx(expected[row, token].item(), abs=1e-5)
        assert told.rank == 1 + int((expected[row] > expected[row, token]).sum())
        best = expected[row].topk(row)
        assert [id for id, _ in told.top] == best.indices.tolist()
        assert [value for _, value in told.top] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_only_rows_that_request_log_probabilities_get_them(operators: SamplingOperators) -> None:
    sampler, logits = Sampler(9, operators), torch.rand(3, 9)
    assert sampler.sample(logits, [SampleSpec(GREEDY)] * 3, [0] * 3).logprobs == ()
    specs = [SampleSpec(GREEDY), SampleSpec(GREEDY, logprobs=0), SampleSpec(GREEDY, logprobs=50)]
    first, second, third = sampler.sample(logits, specs, [0] * 3).logprobs
    assert first is None
    assert second is not None
    assert second.top == ()
    assert third is not None
    assert sorted(token for token, _ in third.top) == list(range(9))
