"""The sampling kernel under Triton's interpreter against the definition of the filters."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.step import SampleSpec, SamplingParams
from engine.worker.cuda.sampling.sampling_kernels import DeviceSampling, SamplingTensors
from engine.worker.model.torch_operators import TorchSampling
from engine.worker.sampling import filters
from engine.worker.sampling.filters import Floats
from engine.worker.sampling.sampler import Sampler
from tests.engine.worker.cuda.kernels.interpreted import interpreted
from tests.engine.worker.sampling.draws import draws_of

sampling = interpreted("sampling")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

tl: Any = sampling.tl


@sampling.triton.jit  # type: ignore[untyped-decorator]
def threshold_kernel(
    weights: Any, floor: Any, wanted: Any, found: Any, BY_MASS: tl.constexpr
) -> None:
    """The bits of a threshold, and the passes that it took."""
    bits, passes = sampling._largest_threshold(
        weights, 128_256, tl.load(floor), tl.load(wanted), BY_MASS, 2048
    )
    tl.store(found, bits)
    tl.store(found + 1, passes)


@sampling.triton.jit  # type: ignore[untyped-decorator]
def cut_kernel(logits: Any, weights: Any, limit: Any, share: Any, found: Any) -> None:
    """The cut of a row and how many weights are copied."""
    masses, counts = sampling._store_weights(logits, weights, 1.0, 0.0, 128_256, True, 2048)
    top_k = tl.load(limit)
    cut, count = sampling._cut(top_k < 128_256, top_k, tl.load(share), masses, counts)
    tl.store(found, cut)
    tl.store(found + 1, count)


samplings = st.builds(
    SamplingParams,
    temperature=st.floats(0.05, 5),
    min_p=st.just(0.0) | st.floats(0, 1),
    top_k=st.just(0) | st.integers(1, 3000),
    top_p=st.just(1.0) | st.floats(0, 1),
)


def sample(logits: Floats, some: Sequence[SamplingParams], points: Sequence[float]) -> list[int]:
    vocab = logits.shape[1]
    params = SamplingTensors.of(draws_of(some, points), vocab, torch.from_numpy)
    ids: list[int] = sampling.sample(
        torch.from_numpy(logits),
        params.temperatures,
        params.min_ps,
        params.top_ks if params.has_top_k else None,
        params.top_ps if params.has_top_p else None,
        params.points,
    ).tolist()
    return ids


def logits_of(seed: int, rows: int, vocab: int, *, ties: bool) -> Floats:
    noise = 3 * np.random.default_rng(seed).standard_normal((rows, vocab))
    return (noise.round() if ties else noise).astype(np.float32)


def is_decided(logits: Floats, one: SamplingParams, point: float) -> bool:
    """Whether no rounding decides which ids are kept, or which one is sampled."""
    left = filters.probabilities(logits, replace(one, top_p=1.0)).astype(np.float64)
    if 0 < one.top_p < 1:
        sums = np.cumsum(np.sort(left)[::-1])
        if np.abs(sums / sums[-1] - one.top_p).min() < 1e-6:
            return False
    cumulative = np.cumsum(filters.probabilities(logits, one).astype(np.float64))
    return bool(np.abs(cumulative / cumulative[-1] - point).min() > 1e-6)


@settings(deadline=None, max_examples=10)
@given(
    max_large=st.sampled_from([4, 8192]),
    asked=st.lists(samplings, min_size=1, max_size=2),
    vocab=st.integers(1, 3000),
    seed=st.integers(0, 9999),
    ties=st.booleans(),
    data=st.data(),
)
def test_the_id_at_a_point_is_that_of_the_definition(
    max_large: int,
    asked: list[SamplingParams],
    vocab: int,
    seed: int,
    ties: bool,
    data: st.DataObject,
) -> None:
    """Whether the large weights of a row are copied or too many."""
    logits = logits_of(seed, len(asked), vocab, ties=ties)
    points = data.draw(
        st.lists(st.floats(0, 1, exclude_max=True), min_size=len(asked), max_size=len(asked))
    )
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sampling, "MAX_LARGE", max_large)
        found = sample(logits, asked, points)
    for row, (one, point) in enumerate(zip(asked, points, strict=True)):
        weights = filters.probabilities(logits[row], one)
        assert 0 <= found[row] < vocab
        if is_decided(logits[row], one, point):
            assert found[row] == filters.pick(weights, point)


def test_the_sampler_of_a_gpu_samples_the_same_ids_with_the_kernel_and_without() -> None:
    vocab, seeds = 300, range(6)
    logits = torch.from_numpy(logits_of(5, len(seeds), vocab, ties=False))
    some = (SamplingParams(temperature=0.0), SamplingParams(top_p=0.8), SamplingParams(top_k=9))
    specs = [SampleSpec(replace(some[seed % 3], seed=seed)) for seed in seeds]
    found = [
        Sampler(vocab, operators).sample(logits.clone(), specs, list(seeds))
        for operators in (TorchSampling(), DeviceSampling(torch.from_numpy, sampling.sample))
    ]
    assert found[0] == found[1]


def test_rows_that_are_not_finite_yield_an_id_and_change_no_other_row() -> None:
    logits = logits_of(4, 5, 200, ties=False)
    asked = [SamplingParams(top_p=0.9, top_k=7, min_p=0.01)] * 5
    finite = logits[::4].copy()
    logits[1:4] = np.array([[np.nan], [np.inf], [-np.inf]])
    found = sample(logits, asked, [0.3] * 5)
    assert found[::4] == sample(finite, asked[:2], [0.3] * 2)
    assert all(0 <= each < 200 for each in found)


@pytest.mark.parametrize(
    ("by_mass", "wanted", "allowed"),
    [(True, 0.9, 13), (True, 0.5, 10), (False, 50, 9), (False, 1, 5)],
)
def test_a_threshold_is_found_when_one_weight_is_left(
    by_mass: bool, wanted: float, allowed: int
) -> None:
    """In fewer than 15 passes."""
    logits = torch.from_numpy(logits_of(5, 1, 128_256, ties=False)[0])
    weights = (logits - logits.max()).exp()
    floor, found = torch.zeros(1, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    mass = wanted * float(weights.double().sum()) if by_mass else wanted
    kind = torch.float64 if by_mass else torch.int32
    threshold_kernel[(1,)](weights, floor, torch.tensor([mass], dtype=kind), found, by_mass)
    bits, passes = found.tolist()
    ordered = weights.sort(descending=True).values
    count = int(wanted) if not by_mass else 1 + int((ordered.double().cumsum(0) < mass).sum())
    assert bits == int(ordered[count - 1 : count].view(torch.int32))
    assert passes <= allowed


def test_equal_weights_take_one_pass() -> None:
    weights = torch.full((128_256,), 1.0)
    floor, found = torch.zeros(1, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    threshold_kernel[(1,)](weights, floor, torch.tensor([7], dtype=torch.int32), found, False)
    assert found.tolist() == [0x3F800000, 1]


HARMONIC = (
    -torch.arange(1, 128_257).float().log()
)  # 0.38 of the mass from 1/64 on, 0.72 from 1/4096
ONE = torch.full((128_256,), -20.0).index_fill_(0, torch.tensor([70_000]), 0.0)


@pytest.mark.parametrize(
    ("logits", "top_k", "top_p", "cut", "count"),
    [
        (HARMONIC, 20, 1.0, 2.0**-6, 64),
        (HARMONIC, 500, 1.0, 2.0**-12, 4096),
        (HARMONIC, 128_256, 0.3, 2.0**-6, 64),
        (HARMONIC, 128_256, 0.7, 2.0**-12, 4096),
        (HARMONIC, 128_256, 0.9, 2.0**-20, 128_256),
        (ONE, 128_256, 0.99, 2.0**-6, 1),
        (ONE, 128_256, 0.9999, 2.0, 1),
        (ONE, 2, 0.9, 2.0, 1),
    ],
)
def test_the_highest_cut_that_suffices_is_chosen(
    logits: torch.Tensor, top_k: int, top_p: float, cut: float, count: int
) -> None:
    found, limit = torch.zeros(2), torch.tensor([top_k], dtype=torch.int32)
    share = torch.tensor([top_p], dtype=torch.float64)
    cut_kernel[(1,)](logits, torch.empty_like(logits), limit, share, found)
    assert found.tolist() == [cut, pytest.approx(count, abs=1)]
