from dataclasses import replace
from itertools import accumulate

import pytest
import torch

from engine.step import NO_STATE, Snapshot, StateSlots
from engine.worker.cpu.operators import NativeOperators
from engine.worker.cpu.thread_pool import NativeThreadPool
from engine.worker.model.kv.recurrent_states import state_runs
from engine.worker.model.mamba import TorchDeltaNet
from engine.worker.ports import DeltaShape, DeltaWeights
from tests.engine.worker.cpu.recurrences import inputs_of, run, states_of
from tests.noise import noise


@pytest.fixture(scope="module")
def operators() -> NativeOperators:
    return NativeOperators(NativeThreadPool(2))


def weights_of(shape: DeltaShape) -> DeltaWeights:
    heads = shape.num_value_heads
    return DeltaWeights(
        shape,
        conv=noise(shape.channels, shape.kernel),
        decay_rate=-noise(heads, seed=1).exp() / 4,
        decay_bias=noise(heads, seed=2),
        norm=1 + noise(shape.value_dim, seed=3) / 10,
        eps=1e-6,
    )


SHAPES = [
    DeltaShape(2, 2, 8, 8, 4),
    DeltaShape(2, 4, 8, 12, 3),
    DeltaShape(1, 2, 128, 128, 4),
    DeltaShape(2, 6, 16, 72, 2),
    DeltaShape(2, 6, 16, 72, 2, tiles_outputs=True),
]


DECODES = [
    (1, StateSlots(0, 0)),
    (1, StateSlots(1, NO_STATE, (Snapshot(1, 5),))),
    (1, StateSlots(7, 3)),
    (1, StateSlots(8, 4, (Snapshot(1, 9),))),
]
MIXED = [
    *DECODES[:2],
    (1, StateSlots(6, 2)),  # with the next entry: the rows of a decode with a draft
    (1, StateSlots(2, 6)),
    (70, StateSlots(3, 4, (Snapshot(2, 7), Snapshot(70, 8)))),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("entries", [DECODES, MIXED], ids=["decodes", "mixed"])
def test_a_step_computes_the_recurrence_as_it_is_defined(
    operators: NativeOperators, shape: DeltaShape, entries: list[tuple[int, StateSlots]]
) -> None:
    weights = weights_of(shape)
    indptr = [0, *accumulate(count for count, _ in entries)]
    y = inputs_of(weights, indptr[-1])
    found, state = run(operators, weights, y, entries)
    doubles = replace(
        weights,
        **{name: getattr(weights, name).double() for name in ("conv", "decay_rate", "decay_bias")},
        norm=weights.norm.double(),
    )
    expected_state = tuple(part.double() for part in states_of(shape))
    runs = state_runs([slots for _, slots in entries], indptr)
    expected = TorchDeltaNet(doubles)(y.double(), expected_state, runs)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)
    for part, wanted in zip(state, expected_state, strict=True):
        torch.testing.assert_close(part.double(), wanted, rtol=1e-4, atol=1e-4)
