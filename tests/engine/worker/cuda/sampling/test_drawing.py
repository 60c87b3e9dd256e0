from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.step import SamplingParams
from engine.worker.cuda.sampling import sampling_kernels as sampling_kernels
from engine.worker.cuda.sampling.sampling_kernels import SamplingTensors
from engine.worker.sampling import filters
from engine.worker.sampling.filters import Floats
from tests.engine.worker.sampling.draws import draws_of

samplings = st.builds(
    SamplingParams,
    temperature=st.floats(0.05, 5),
    min_p=st.just(0.0) | st.floats(0, 1),
    top_k=st.just(0) | st.integers(1, 3000),
    top_p=st.just(1.0) | st.floats(0, 1),
)


def rows_of(seed: int, rows: int, vocab: int, *, ties: bool) -> Floats:
    noise = 3 * np.random.default_rng(seed).standard_normal((rows, vocab))
    return (noise.round() if ties else noise).astype(np.float32)


def params(some: Sequence[SamplingParams], points: Sequence[float], vocab: int) -> SamplingTensors:
    return SamplingTensors.of(draws_of(some, points), vocab, torch.from_numpy)


@settings(deadline=None, max_examples=75)
@given(
    asked=st.lists(samplings, min_size=1, max_size=6),
    vocab=st.integers(1, 2000),
    seed=st.integers(0, 9999),
    ties=st.booleans(),
)
def test_the_same_ids_are_kept_with_the_same_weights(
    asked: list[SamplingParams], vocab: int, seed: int, ties: bool
) -> None:
    logits = rows_of(seed, len(asked), vocab, ties=ties)
    found = sampling_kernels.probabilities(
        torch.from_numpy(logits), params(asked, [0.0] * len(asked), vocab)
    )
    assert found.shape[1] % sampling_kernels.RUN == 0
    assert not found[:, vocab:].any()
    for row, sampling in enumerate(asked):
        exact = filters.probabilities(logits[row], sampling)
        ours = found[row, :vocab].numpy()
        border = _distance(
            filters.probabilities(logits[row], replace(sampling, top_p=1.0)), sampling
        )
        if border > 1e-9:  # else a rounding decides who is the last
            np.testing.assert_array_equal(ours > 0, exact > 0)
            np.testing.assert_allclose(ours, exact, rtol=1e-5, atol=1e-38)


def _distance(weights: Floats, sampling: SamplingParams) -> float:
    """How near a sum of the largest weights comes to top-p, where roundings would decide."""
    if sampling.top_p in (0, 1):
        return 1.0
    sums = np.cumsum(np.sort(weights.astype(np.float64))[::-1])
    return float(np.abs(sums / sums[-1] - sampling.top_p).min())


@settings(deadline=None, max_examples=75)
@given(
    points=st.lists(
        st.floats(0, 1, exclude_max=True) | st.just(1 - 2.0**-53), min_size=1, max_size=8
    ),
    vocab=st.integers(1, 3000),
    seed=st.integers(0, 9999),
    share=st.floats(0.001, 1),
)
def test_the_same_point_is_the_same_id(
    points: list[float], vocab: int, seed: int, share: float
) -> None:
    rng = np.random.default_rng(seed)
    weights = rng.random((len(points), vocab), dtype=np.float32)
    weights *= rng.random(weights.shape) < share
    weights[:, rng.integers(vocab)] = 1
    wide = np.zeros((len(points), vocab + -vocab % sampling_kernels.RUN), dtype=np.float32)
    wide[:, :vocab] = weights
    found = sampling_kernels.pick(torch.from_numpy(wide), torch.tensor(points, dtype=torch.float64))
    for row, point in enumerate(points):
        cumulative = np.cumsum(weights[row], dtype=np.float64)
        token = int(found[row])
        assert weights[row, token] > 0
        if np.abs(cumulative / cumulative[-1] - point).min() > 1e-12:
            assert token == filters.pick(weights[row], point)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_nothing_yields_an_id_of_the_vocabulary_and_harms_nobody(
    value: float,
) -> None:
    logits = torch.from_numpy(rows_of(4, 3, 600, ties=False))
    asked = [SamplingParams(top_p=0.9, top_k=7, min_p=0.01)] * 3
    before = sampling_kernels.sample(logits, params(asked, [0.3] * 3, 600))
    logits[1] = value
    after = sampling_kernels.sample(logits, params(asked, [0.3] * 3, 600))
    assert after[[0, 2]].tolist() == before[[0, 2]].tolist()
    assert 0 <= int(after[1]) < 600
