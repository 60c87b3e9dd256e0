from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from engine.step import SampleSpec, SamplingParams
from engine.worker.cpu.sampling import NativeSampling
from engine.worker.cpu.thread_pool import NativeThreadPool
from engine.worker.model.torch_operators import TorchSampling
from engine.worker.ports import Draw, SamplingOperators
from engine.worker.sampling.filters import Floats, pick, probabilities
from engine.worker.sampling.logits_processors import process
from engine.worker.sampling.sampler import Sampler, uniform
from tests.engine.worker.sampling.draws import draws_of

Doubles = NDArray[np.float64]

GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module", params=["torch", "native"])
def operators(request: pytest.FixtureRequest) -> SamplingOperators:
    return TorchSampling() if request.param == "torch" else NativeSampling(NativeThreadPool(2))


def noise(vocab: int, seed: int = 0) -> Floats:
    return (3 * np.random.default_rng(seed).standard_normal(vocab)).astype(np.float32)


def processed(logits: Floats, spec: SampleSpec) -> Floats:
    out = logits.copy()
    process(torch.from_numpy(out[None]), [0], [spec], torch.from_numpy)
    return out


def softmax(logits: Floats, temperature: float = 1.0) -> Doubles:
    scaled = logits.astype(np.float64) / temperature
    weights = np.exp(scaled - scaled.max())
    out: Doubles = weights / weights.sum()
    return out


def normal(weights: Doubles | Floats) -> Doubles:
    out: Doubles = weights.astype(np.float64) / weights.sum(dtype=np.float64)
    return out


def test_rows_are_processed_together_as_each_alone() -> None:
    rng, vocab = Random(2), 60
    rows = [noise(vocab, seed) for seed in range(40)]
    specs = [
        SampleSpec(
            SamplingParams(
                logit_bias=tuple((rng.randrange(vocab), rng.uniform(-9, 9)) for _ in range(bias)),
                repetition_penalty=rng.choice([1.0, 1.0, 0.6, 1.7]),
                presence_penalty=rng.choice([0.0, 0.0, 1.2]),
                frequency_penalty=rng.choice([0.0, 0.0, -0.3]),
            ),
            banned=tuple(rng.sample(range(vocab), rng.randrange(3))),
            prompt=tuple(rng.randrange(vocab) for _ in range(rng.randrange(30))),
            output=tuple(rng.randrange(vocab) for _ in range(rng.randrange(30))),
        )
        for bias in [0, 0, 1, 5] * 10
    ]
    together = np.stack(rows)
    places = [row for row in range(40) if row % 7]
    process(torch.from_numpy(together), places, [specs[row] for row in places], torch.from_numpy)
    for row in range(40):
        alone = processed(rows[row], specs[row]) if row % 7 else rows[row]
        np.testing.assert_array_equal(together[row], alone)


@given(
    logits=hnp.arrays(np.float32, st.integers(1, 400), elements=st.integers(-30, 30)),
    top_p=st.floats(0.0, 0.999),
    divisor=st.sampled_from([1.0, 3.7]),
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(
    logits: Floats, top_p: float, divisor: float
) -> None:
    scaled = logits / np.float32(divisor)
    found = probabilities(scaled, SamplingParams(top_p=top_p))
    exact = softmax(scaled)
    order = np.lexsort((np.arange(len(exact)), -exact))
    before = np.cumsum(exact[order]) - exact[order]
    for i, mass in zip(order[1:], before[1:], strict=True):
        if abs(mass - top_p) > 1e-5:  # rounding may decide nearer than this
            assert (found[i] > 0) == (mass < top_p)
    assert found[order[0]] > 0


def test_uniforms_are_uniform_over_positions_and_over_seeds() -> None:
    for points in (
        [uniform(7, position) for position in range(20000)],
        [uniform(seed, 3) for seed in range(20000)],
        [uniform(-(2**70) + seed, seed) for seed in range(20000)],
    ):
        counts, _ = np.histogram(points, bins=100, range=(0, 1))
        assert chi_square(counts, np.full(100, 0.01)) < 149  # p = 0.001 at 99 degrees


def test_neighbouring_seeds_and_positions_are_unrelated() -> None:
    points = np.array([[uniform(s, p) for p in range(200)] for s in range(200)])
    for a, b in ((points[:-1], points[1:]), (points[:, :-1], points[:, 1:])):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.02
    assert len(np.unique(points)) == points.size


def chi_square(counts: Doubles, probs: Doubles) -> float:
    expected = probs * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


def test_pick_walks_the_cumulative_distribution() -> None:
    weights = np.array([0, 1, 0, 2, 1, 0], dtype=np.float32)
    points = (0.0, 0.2499, 0.25, 0.7499, 0.75, 1 - 2**-53)
    assert [pick(weights, point) for point in points] == [1, 1, 3, 3, 4, 4]


@given(st.integers(1, 5000), st.floats(0, 1, exclude_max=True), st.integers(0, 50))
def test_pick_is_exact_over_many_runs(vocab: int, point: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    weights = (rng.integers(0, 4, vocab) + (np.arange(vocab) == 0)).astype(np.float32)
    exact = int(np.searchsorted(np.cumsum(weights, dtype=np.float64),
                                point * weights.sum(dtype=np.float64), side="right"))  # fmt: skip
    assert pick(weights, point) == exact


GRID = 500


@settings(deadline=None, max_examples=12)
@given(
    logits=hnp.arrays(np.float32, st.integers(1, 900), elements=st.integers(-40, 40)),
    divisor=st.sampled_from([1.0, 3.7, 11.3]),
    sampling=st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.3, 1.0, 1.7]),
        top_k=st.sampled_from([0, 1, 3, 40]),
        top_p=st.sampled_from([1.0, 0.0, 0.5, 0.93]),
        min_p=st.sampled_from([0.0, 0.07]),
    ),
)
def test_a_grid_of_points_hits_each_id_in_proportion_to_its_probability(
    operators: SamplingOperators, logits: Floats, divisor: float, sampling: SamplingParams
) -> None:
    scaled = logits / np.float32(divisor)
    draws = [Draw(0, sampling, (i + 0.5) / GRID) for i in range(GRID)]
    found = operators.sample(torch.from_numpy(scaled)[None], draws)
    counts = np.bincount(found, minlength=len(logits))
    expected = GRID * normal(probabilities(scaled, sampling))
    assert np.abs(np.cumsum(counts) - np.cumsum(expected)).max() < 1.01
    assert counts[expected == 0].sum() == 0


def test_all_sample_the_same_from_a_large_vocabulary(operators: SamplingOperators) -> None:
    rows = torch.from_numpy(np.stack([noise(50257, seed) for seed in range(8)]))
    samplings = [
        SamplingParams(),
        SamplingParams(temperature=0.8, top_p=0.95),
        SamplingParams(top_k=50, top_p=0.9),
        SamplingParams(temperature=1.3, min_p=0.03),
    ] * 2
    points = [uniform(seed, 0) for seed in range(8)]
    expected = [pick(probabilities(rows[i].numpy(), samplings[i]), points[i]) for i in range(8)]
    assert operators.sample(rows, draws_of(samplings, points)).tolist() == expected
    assert operators.argmax(rows).ids.tolist() == rows.argmax(-1).tolist()


def test_a_row_without_allowed_ids_is_the_only_one_to_fail(operators: SamplingOperators) -> None:
    specs = [
        SampleSpec(GREEDY),
        SampleSpec(GREEDY, banned=(0, 1, 2)),
        SampleSpec(SamplingParams(), banned=(0, 1, 2)),
    ]
    sampled = Sampler(3, operators).sample(torch.eye(3), specs, [0, 0, 0])
    assert sampled.tokens[0] == 0
    assert [(row, fault.is_caller_error) for row, fault in sampled.faults] == [(1, True), (2, True)]
    assert "banned" in str(sampled.faults[0][1])


def test_greedy_takes_the_lowest_id_of_equals(operators: SamplingOperators) -> None:
    logits = torch.zeros(2, 5000)
    logits[0, [77, 4100]] = 9.0
    assert Sampler(5000, operators).sample(logits, [SampleSpec(GREEDY)] * 2, [0, 0]).tokens == (
        77,
        0,
    )


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "sampling", [GREEDY, SamplingParams(), SamplingParams(presence_penalty=1.0)]
)
def test_nan_logits_fail_their_row_only(
    operators: SamplingOperators, bad: float, sampling: SamplingParams
) -> None:
    logits = torch.from_numpy(np.stack([noise(50, seed) for seed in range(3)]))
    specs = [SampleSpec(sampling, output=(1,), logprobs=2)] * 3
    whole = Sampler(50, operators).sample(logits.clone(), specs, [0] * 3)
    logits[1, 20] = bad
    sampled = Sampler(50, operators).sample(logits, specs, [0] * 3)
    ((row, fault),) = sampled.faults
    assert (row, fault.is_caller_error) == (1, False)
    assert "NaN or infinite" in str(fault)
    assert (sampled.tokens[::2], sampled.logprobs[::2]) == (whole.tokens[::2], whole.logprobs[::2])


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        (SampleSpec(GREEDY, banned=(50,)), "banned"),
        (SampleSpec(SamplingParams(logit_bias=((-1, 1.0),))), "logit_bias"),
        (SampleSpec(SamplingParams(repetition_penalty=1.1), prompt=(50,)), "prompt"),
        (SampleSpec(SamplingParams(presence_penalty=1.1), output=(50,)), "output"),
    ],
)
def test_ids_outside_the_vocabulary_fail_their_row_only(spec: SampleSpec, named: str) -> None:
    logits = torch.zeros(2, 50)
    logits[1, 7] = 1.0
    sampled = Sampler(50, TorchSampling()).sample(logits, [spec, SampleSpec(GREEDY)], [0, 0])
    ((row, fault),) = sampled.faults
    assert (row, fault.is_caller_error, sampled.tokens[1]) == (0, True, 7)
    assert named in str(fault)
