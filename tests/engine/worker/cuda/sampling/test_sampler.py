from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from engine.grammar import Mask
from engine.step import SampleSpec, SamplingParams
from engine.worker.cpu.sampling import NativeSampling
from engine.worker.cpu.thread_pool import NativeThreadPool
from engine.worker.cuda.sampling.sampling_kernels import DeviceSampling
from engine.worker.model.torch_operators import TorchSampling
from engine.worker.sampling.sampler import Masks, RowFault, SampledBatch, Sampler

VOCAB = 37
NOWHERE = torch.device("meta")

ids = st.integers(0, VOCAB - 1)
some_ids = st.lists(ids, max_size=6).map(tuple)
samplings = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.3]),
    top_p=st.sampled_from([1.0, 0.8]),
    top_k=st.sampled_from([0, 3]),
    min_p=st.sampled_from([0.0, 0.05]),
    repetition_penalty=st.sampled_from([1.0, 1.4, 0.8]),
    presence_penalty=st.sampled_from([0.0, 0.6]),
    frequency_penalty=st.sampled_from([0.0, -0.4]),
    logit_bias=st.lists(st.tuples(ids, st.floats(-8, 8, width=32)), max_size=3).map(tuple),
    seed=st.integers(0, 99),
)
specs = st.builds(
    SampleSpec,
    sampling=samplings,
    banned=some_ids,
    prompt=some_ids,
    output=some_ids,
    logprobs=st.none() | st.integers(0, 5),
    end_ids=st.lists(ids, max_size=2).map(tuple),
)
masks = st.none() | st.builds(
    Mask,
    bits=st.lists(st.booleans(), min_size=40, max_size=40).map(
        lambda bits: np.packbits(np.array(bits), bitorder="little").tobytes()
    ),
    accepts=st.booleans(),
)


def on_device() -> Sampler:
    return Sampler(VOCAB, TorchSampling())


def logits_of(rows: int, seed: int) -> Tensor:
    noise = 2 * np.random.default_rng(seed).standard_normal((rows, VOCAB))
    return torch.from_numpy(noise.astype(np.float32))


def both(
    logits: Tensor, asked: list[SampleSpec], given_masks: Masks
) -> tuple[SampledBatch, SampledBatch]:
    """What the CPU specs, and what the device does."""
    places = [17 * row for row in range(len(asked))]
    plain = Sampler(VOCAB, NativeSampling(NativeThreadPool(1)))
    device = on_device()
    return (
        plain.sample(logits.clone(), asked, places, given_masks),
        device.sample(logits.clone(), asked, places, given_masks),
    )


def told(sampled: SampledBatch) -> dict[int, tuple[str, bool]]:
    return {row: (str(fault), fault.is_caller_error) for row, fault in sampled.faults}


@settings(deadline=None, max_examples=40)
@given(
    asked=st.lists(st.tuples(specs, masks), min_size=1, max_size=7),
    seed=st.integers(0, 999),
    late=st.sets(st.integers(0, 6), max_size=1),
    broken=st.sets(st.integers(0, 6), max_size=2),
)
def test_both_samplers_say_the_same(
    asked: list[tuple[SampleSpec, Mask | None]], seed: int, late: set[int], broken: set[int]
) -> None:
    count = len(asked)
    logits = logits_of(count, seed)
    for row in broken:
        if row < count:
            logits[row, seed % VOCAB] = torch.nan
    allowed = {row: mask for row, (_, mask) in enumerate(asked) if mask is not None}
    given_masks = Masks(allowed, {}, frozenset(row for row in late if row < count))
    exact, found = both(logits, [spec for spec, _ in asked], given_masks)
    assert told(found) == told(exact)
    means_nothing = {*given_masks.late, *told(exact)}
    for row in range(count):
        if row in means_nothing:
            assert 0 <= found.tokens[row] < VOCAB
        else:
            assert found.tokens[row] == exact.tokens[row]
    assert len(found.logprobs) == len(exact.logprobs)
    for row, (one, other) in enumerate(zip(found.logprobs, exact.logprobs, strict=True)):
        if row in means_nothing:
            continue
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert one.logprob == pytest.approx(other.logprob, abs=1e-5)
            assert (one.rank, len(one.top)) == (other.rank, len(other.top))


def test_the_first_half_reads_nothing_from_the_device() -> None:
    """On the meta device there are no values: code that reads one fails."""
    sampling = SamplingParams(top_p=0.9, logit_bias=((1, 1.0),), repetition_penalty=1.2)
    all_bits = np.full(5, 255, dtype=np.uint8).tobytes()
    asked = [
        SampleSpec(sampling, banned=(2,), prompt=(3,), output=(4, 4), logprobs=3, end_ids=(5,)),
        SampleSpec(SamplingParams(temperature=0.0)),
        SampleSpec(SamplingParams(), logprobs=1),
        SampleSpec(SamplingParams(top_k=7, min_p=0.1)),
    ]

    def put(array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(NOWHERE)

    def kernel(logits: Tensor, *_: Tensor | None) -> Tensor:
        return torch.empty(len(logits), dtype=torch.int64, device=logits.device)

    sampler = Sampler(VOCAB, DeviceSampling(put, kernel), put)
    pending = sampler.begin(
        torch.empty(4, VOCAB, device=NOWHERE), asked, [1, 2, 3, 4], Masks({0: Mask(all_bits, True)})
    )
    assert (pending.ids.shape, pending.ids.dtype) == ((4,), torch.int64)
    assert all(source.device == NOWHERE for source in pending.sources)


def test_a_fault_that_is_known_beforehand_draws_nothing() -> None:
    faults: Mapping[int, RowFault] = {0: RowFault("no such grammar")}
    exact, found = both(logits_of(2, 1), [SampleSpec(SamplingParams())] * 2, Masks({}, faults))
    assert told(found) == told(exact) == {0: ("no such grammar", False)}
    assert found.tokens[1] == exact.tokens[1]
