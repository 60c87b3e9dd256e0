from dataclasses import replace
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


def nucleus(probs: Doubles, top_p: float) -> Doubles:
    """Largest first, lowest id first, until what came before reaches top_p."""
    out, mass = np.zeros_like(probs), 0.0
    for i in sorted(range(len(probs)), key=lambda i: (-probs[i], i)):
        if mass >= top_p and mass > 0:
            break
        out[i] = probs[i]
        mass += probs[i]
    out /= out.sum()
    return out


def normal(weights: Doubles | Floats) -> Doubles:
    out: Doubles = weights.astype(np.float64) / weights.sum(dtype=np.float64)
    return out


def test_logit_bias_is_added() -> None:
    spec = SampleSpec(SamplingParams(logit_bias=((3, 2.5), (5, -100.0))))
    expected = noise(8)
    expected[3] += 2.5
    expected[5] -= 100
    np.testing.assert_allclose(processed(noise(8), spec), expected)


def test_banned_ids_are_not_sampled_even_with_a_high_bias() -> None:
    spec = SampleSpec(SamplingParams(logit_bias=((3, 100.0),)), banned=(3, 1))
    found = processed(noise(8), spec)
    assert found[3] == found[1] == -np.inf
    assert np.isfinite(np.delete(found, [1, 3])).all()


def test_repetition_penalty_reduces_logits_of_prompt_and_output() -> None:
    logits = np.array([2.0, -2.0, 1.0, 4.0], dtype=np.float32)
    spec = SampleSpec(SamplingParams(repetition_penalty=2.0), prompt=(0, 0), output=(1,))
    assert processed(logits, spec).tolist() == [1.0, -4.0, 1.0, 4.0]


def test_presence_and_frequency_count_the_output_only() -> None:
    logits = np.zeros(4, dtype=np.float32)
    spec = SampleSpec(
        SamplingParams(presence_penalty=0.5, frequency_penalty=0.25),
        prompt=(0,),
        output=(1, 2, 1, 1),
    )
    assert processed(logits, spec).tolist() == [0.0, -1.25, -0.75, 0.0]


def test_bias_comes_before_repetition_and_repetition_before_presence() -> None:
    logits = np.array([-1.0, 0.0], dtype=np.float32)
    sampling = SamplingParams(logit_bias=((0, 3.0),), repetition_penalty=2.0, presence_penalty=0.5)
    assert processed(logits, SampleSpec(sampling, output=(0,))).tolist() == [0.5, 0.0]


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


@pytest.mark.parametrize("temperature", [0.1, 0.7, 1.0, 2.0])
def test_temperature_divides_the_logits(temperature: float) -> None:
    found = normal(probabilities(noise(300), SamplingParams(temperature=temperature)))
    np.testing.assert_allclose(found, softmax(noise(300), temperature), rtol=1e-4, atol=1e-12)


def test_min_p_is_relative_to_the_largest_probability() -> None:
    expected = softmax(noise(300))
    expected[expected < 0.1 * expected.max()] = 0
    found = normal(probabilities(noise(300), SamplingParams(min_p=0.1)))
    np.testing.assert_allclose(found, normal(expected), rtol=1e-5)


@pytest.mark.parametrize("top_k", [1, 2, 17, 299, 300, 5000])
def test_top_k_keeps_the_k_largest(top_k: int) -> None:
    found = probabilities(noise(300), SamplingParams(top_k=top_k))
    kept = set(np.flatnonzero(found).tolist())
    assert kept == set(np.argsort(-noise(300))[:top_k].tolist())


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


def test_each_filter_applies_to_what_the_previous_one_kept() -> None:
    sampling = SamplingParams(temperature=0.8, min_p=0.01, top_k=20, top_p=0.7)
    probs = softmax(noise(300), 0.8)
    probs[probs < 0.01 * probs.max()] = 0
    probs[np.argsort(-probs)[20:]] = 0
    expected = nucleus(normal(probs), 0.7)
    np.testing.assert_allclose(
        normal(probabilities(noise(300), sampling)), expected, rtol=1e-4, atol=1e-12
    )


def test_top_p_near_zero_is_greedy() -> None:
    for top_p in (0.0, 1e-9):
        found = probabilities(noise(300), SamplingParams(top_p=top_p))
        assert np.flatnonzero(found).tolist() == [int(noise(300).argmax())]


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


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(),
        SamplingParams(temperature=0.6, top_p=0.8),
        SamplingParams(temperature=1.5, top_k=12, min_p=0.02),
    ],
)
def test_samples_follow_the_filtered_distribution(
    operators: SamplingOperators, sampling: SamplingParams
) -> None:
    logits, count = noise(40), 4000
    probs = normal(probabilities(logits, sampling))
    rows = torch.from_numpy(logits).repeat(count, 1)
    specs = [SampleSpec(replace(sampling, seed=seed)) for seed in range(count)]
    tokens = Sampler(40, operators).sample(rows, specs, [5] * count).tokens
    counts = np.bincount(tokens, minlength=40)
    assert counts[probs == 0].sum() == 0
    frequent = probs * count >= 5
    bins = np.append(counts[frequent], counts[~frequent].sum())
    shares = np.append(probs[frequent], probs[~frequent].sum())
    bins, shares = bins[shares > 0], shares[shares > 0]
    freedom = len(bins) - 1
    assert chi_square(bins, shares) < freedom + 4 * (2 * freedom) ** 0.5


def test_other_rows_and_batch_order_change_no_token(operators: SamplingOperators) -> None:
    vocab, rng = 700, Random(3)
    rows = [noise(vocab, seed) for seed in range(12)]
    specs = [
        SampleSpec(
            SamplingParams(
                temperature=rng.choice([0.0, 0.5, 1.0]),
                top_p=rng.choice([0.5, 1.0]),
                top_k=rng.choice([0, 30]),
                min_p=rng.choice([0.0, 0.01]),
                presence_penalty=rng.choice([0.0, 1.0]),
                seed=seed,
            ),
            output=(1, 2, seed),
        )
        for seed in range(12)
    ]
    positions = [rng.randrange(100) for _ in range(12)]
    sampler = Sampler(vocab, operators)
    alone = [
        sampler.sample(torch.from_numpy(rows[i].copy())[None], [specs[i]], [positions[i]]).tokens[0]
        for i in range(12)
    ]
    order = list(range(12))
    rng.shuffle(order)
    together, _, faults = sampler.sample(
        torch.from_numpy(np.stack([rows[i] for i in order])),
        [specs[i] for i in order],
        [positions[i] for i in order],
    )
    assert not faults
    assert list(together) == [alone[i] for i in order]


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


def test_greedy_sampling_applies_bans_bias_and_penalties(operators: SamplingOperators) -> None:
    logits = torch.tensor([[5.0, 4.0, 3.0, 2.0]]).repeat(4, 1)
    specs = [
        SampleSpec(GREEDY, banned=(0,)),
        SampleSpec(SamplingParams(temperature=0.0, logit_bias=((3, 10.0),))),
        SampleSpec(SamplingParams(temperature=0.0, presence_penalty=1.5), output=(0, 0)),
        SampleSpec(SamplingParams(temperature=1e-6)),
    ]
    assert Sampler(4, operators).sample(logits, specs, [0] * 4).tokens == (1, 3, 1, 0)


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
