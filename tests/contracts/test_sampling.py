"""Every sampler samples what the parameters mean: the definition is written here once, in float64.

A new device's sampler is added to `SAMPLERS`. Tokens are compared one by one: the definition gives
the distribution, and the row's uniform number picks the token. Where float32 may decide otherwise,
because the number lies within `CLOSE` of a boundary, both neighbours are accepted.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray

from engine.step import SampleSpec, SamplingParams
from engine.worker.cpu.sampling import NativeSampling
from engine.worker.cpu.thread_pool import NativeThreadPool
from engine.worker.model.torch_operators import TorchSampling
from engine.worker.sampling.sampler import NO_MASKS, Sampler, uniform

VOCAB = 211
ROWS = 300  # each with another seed
CLOSE = 1e-4

SAMPLERS: dict[str, Callable[[], Sampler]] = {
    "numpy": lambda: Sampler(VOCAB, TorchSampling()),
    "native": lambda: Sampler(VOCAB, NativeSampling(NativeThreadPool(1))),
}
PLAIN = SamplingParams()
SPECS = {
    "plain": SampleSpec(PLAIN),
    "greedy": SampleSpec(replace(PLAIN, temperature=0.0)),
    "temperature": SampleSpec(replace(PLAIN, temperature=1.7)),
    "top-k": SampleSpec(replace(PLAIN, top_k=7)),
    "top-k of 1": SampleSpec(replace(PLAIN, top_k=1)),
    "top-k beyond the vocabulary": SampleSpec(replace(PLAIN, top_k=9 * VOCAB)),
    "top-p": SampleSpec(replace(PLAIN, top_p=0.6)),
    "top-p of 0": SampleSpec(replace(PLAIN, top_p=0.0)),
    "min-p": SampleSpec(replace(PLAIN, min_p=0.05)),
    "min-p of 1": SampleSpec(replace(PLAIN, min_p=1.0)),
    "all filters": SampleSpec(
        replace(PLAIN, temperature=0.8, top_k=40, top_p=0.8, min_p=0.01),
    ),
    "bias": SampleSpec(replace(PLAIN, logit_bias=((3, 6.0), (9, -100.0), (3, 1.0)))),
    "cold": SampleSpec(replace(PLAIN, temperature=1e-6)),
    "bans": SampleSpec(PLAIN, banned=tuple(range(0, VOCAB, 2))),
    "presence": SampleSpec(replace(PLAIN, presence_penalty=1.5), output=(1, 1, 4, 9)),
    "frequency": SampleSpec(replace(PLAIN, frequency_penalty=0.7), output=(1, 1, 4, 9)),
    "repetition": SampleSpec(
        replace(PLAIN, repetition_penalty=1.8), prompt=(2, 2, 5), output=(1, 1, 4)
    ),
    "all": SampleSpec(
        SamplingParams(0.9, 0.9, 50, 0.002, 1.3, 0.4, -0.2, ((7, 2.0),)),
        banned=(5, 6),
        prompt=(2, 8, 8),
        output=(7, 7, 10),
    ),
    "greedy of what is left": SampleSpec(
        SamplingParams(0.0, 1.0, 0, 0.0, 1.3, 0.4, -0.2, ((7, 2.0),)),
        banned=tuple(range(1, VOCAB, 2)),
        prompt=(2, 8, 8),
        output=(7, 10, 10, 12),
    ),
}


def processed(logits: NDArray[np.float64], spec: SampleSpec) -> NDArray[np.float64]:
    """Bias is added, bans are minus infinity, then repetition, then presence and frequency."""
    sampling, found = spec.sampling, logits.copy()
    for token, amount in sampling.logit_bias:
        found[token] += amount
    found[list(spec.banned)] = -np.inf
    for token in {*spec.prompt, *spec.output}:
        factor = sampling.repetition_penalty
        found[token] = found[token] / factor if found[token] > 0 else found[token] * factor
    for token in set(spec.output):
        found[token] -= sampling.presence_penalty
        found[token] -= sampling.frequency_penalty * spec.output.count(token)
    return found


def probabilities(logits: NDArray[np.float64], sampling: SamplingParams) -> NDArray[np.float64]:
    """Temperature, min-p relative to the largest, the `top_k` largest, then the fewest that reach
    `top_p` of what is left: the largest first, of equals the lowest id first."""
    weights = np.exp((logits - logits.max()) / sampling.temperature)
    weights[weights < sampling.min_p] = 0
    if 0 < sampling.top_k < len(weights):
        weights[weights < np.sort(weights)[-sampling.top_k]] = 0
    weights /= weights.sum()
    before = 0.0
    for place, token in enumerate(sorted(range(len(weights)), key=lambda i: (-weights[i], i))):
        mass = weights[token]
        if sampling.top_p < 1 and place and before >= sampling.top_p:
            weights[token] = 0
        before += mass
    found: NDArray[np.float64] = weights / weights.sum()
    return found


def accepted(logits: NDArray[np.float64], spec: SampleSpec, position: int) -> set[int]:
    """The tokens that a sampler may return for this row: one, or two at a boundary."""
    left = processed(logits, spec)
    if spec.sampling.temperature == 0:
        return {int(left.argmax())}
    weights = probabilities(left, spec.sampling)
    ends = np.cumsum(weights)
    point = uniform(spec.sampling.seed, position)
    low, high = np.searchsorted(ends, [point - CLOSE, point + CLOSE], side="right")
    near = range(int(low), min(int(high), len(weights) - 1) + 1)
    return {token for token in near if weights[token] > 0}


def rows_of(spec: SampleSpec) -> list[SampleSpec]:
    return [spec._replace(sampling=replace(spec.sampling, seed=seed)) for seed in range(ROWS)]


def mismatches(sampler: Sampler, specs: Sequence[SampleSpec]) -> dict[int, tuple[int, set[int]]]:
    """Rows whose token is not accepted, with what is."""
    noise = 2 * np.random.default_rng(5).standard_normal((len(specs), VOCAB))
    logits = noise.astype(np.float32)
    positions = [11 * row for row in range(len(specs))]
    sampled = sampler.sample(torch.from_numpy(logits.copy()), specs, positions)
    assert not sampled.faults
    allowed = [
        accepted(row.astype(np.float64), spec, position)
        for row, spec, position in zip(logits, specs, positions, strict=True)
    ]
    pairs = enumerate(zip(sampled.tokens, allowed, strict=True))
    return {row: (token, ids) for row, (token, ids) in pairs if token not in ids}


Temperature = transformers.TemperatureLogitsWarper
TopP, TopK = transformers.TopPLogitsWarper, transformers.TopKLogitsWarper
MinP, Repetition = transformers.MinPLogitsWarper, transformers.RepetitionPenaltyLogitsProcessor


@pytest.mark.parametrize(
    ("sampling", "processors"),
    [
        (PLAIN, ()),
        (SamplingParams(temperature=1.8), (Temperature(1.8),)),
        (SamplingParams(top_p=0.8), (TopP(0.8),)),
        (SamplingParams(top_k=7), (TopK(7),)),
        (SamplingParams(min_p=0.05), (MinP(0.05),)),
        (SamplingParams(repetition_penalty=1.7), (Repetition(1.7),)),
        (SamplingParams(1.4, 0.9, 30), (Temperature(1.4), TopK(30), TopP(0.9))),
        (
            SamplingParams(0.9, min_p=0.01, repetition_penalty=0.7),
            (Repetition(0.7), Temperature(0.9), MinP(0.01)),
        ),
    ],
    ids=[
        "plain",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition",
        "top_k and top_p",
        "penalty and min_p",
    ],
)
def test_the_definition_is_that_of_transformers(
    sampling: SamplingParams, processors: Sequence[Callable[..., torch.Tensor]]
) -> None:
    """Presence and frequency penalties, which transformers lacks, are OpenAI's formula."""
    prompt = (5, 17, 17, 60, 3)
    for logits in 2 * np.random.default_rng(7).standard_normal((20, VOCAB)):
        scores = torch.from_numpy(logits)[None]
        for processor in processors:
            scores = processor(torch.tensor([prompt]), scores)
        found = probabilities(processed(logits, SampleSpec(sampling, prompt=prompt)), sampling)
        np.testing.assert_allclose(found, scores.softmax(-1)[0].numpy(), rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_sampler_follows_the_definition(sampler: str, name: str) -> None:
    assert mismatches(SAMPLERS[sampler](), rows_of(SPECS[name])) == {}


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_rows_of_a_mixed_batch_follow_the_definition_each(sampler: str) -> None:
    specs = [rows_of(spec)[row] for row in range(10) for spec in SPECS.values()]
    assert mismatches(SAMPLERS[sampler](), specs) == {}


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("change", ["top_k", "top_p", "min_p", "presence_penalty"])
def test_the_suite_notices_a_sampler_that_ignores_a_parameter(sampler: str, change: str) -> None:
    values = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "presence_penalty": 0.0}
    spec = SampleSpec(
        replace(PLAIN, top_k=7, top_p=0.6, min_p=0.05, presence_penalty=2.5),
        output=tuple(range(60)),
    )
    if change != "presence_penalty":  # alone, since the filters overlap
        only = {change: getattr(spec.sampling, change)}
        spec = SampleSpec(replace(PLAIN, **only))

    class Ignoring(Sampler):
        def sample(self, logits, specs, positions, masks=NO_MASKS):  # type: ignore[no-untyped-def]
            changed = {change: values[change]}
            other = [s._replace(sampling=replace(s.sampling, **changed)) for s in specs]
            return SAMPLERS[sampler]().sample(logits, other, positions)

    assert mismatches(Ignoring(VOCAB, TorchSampling()), rows_of(spec))
