"""The gated delta rule: runs of tokens in chunks equal the same tokens one by one."""

import pytest
import torch

from engine.step import NO_STATE, Snapshot, StateSlots
from engine.worker.model.delta_net import DeltaInputs, delta_run
from engine.worker.model.kv.recurrent_states import RecurrentStates, bytes_per_state, runs_of
from engine.worker.ports import RecurrentShape, StateRun

HEADS, KEYS, VALUES = 3, 16, 24


def inputs(count: int) -> DeltaInputs:
    generator = torch.Generator().manual_seed(count)

    def noise(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator)

    q, k = (noise(HEADS, count, KEYS) for _ in range(2))
    k = k / k.norm(dim=2, keepdim=True)
    log_decay = -noise(HEADS, count).exp() / 4
    rate = noise(HEADS, count).sigmoid()
    return DeltaInputs(q, k, noise(HEADS, count, VALUES), log_decay, rate)


def one_by_one(given: DeltaInputs, state: torch.Tensor) -> torch.Tensor:
    """The recurrence as it is defined, in float64."""
    q, k, v = (each.double() for each in (given.q, given.k, given.v))
    outputs = []
    for at in range(q.shape[1]):
        state *= given.log_decay[:, at].double().exp()[:, None, None]
        predicted = torch.einsum("hk,hkv->hv", k[:, at], state)
        update = (v[:, at] - predicted) * given.rate[:, at, None]
        state += k[:, at, :, None] * update[:, None]
        outputs.append(torch.einsum("hk,hkv->hv", q[:, at], state))
    return torch.stack(outputs, dim=1)


@pytest.mark.parametrize("count", [1, 2, 63, 64, 65, 200])
def test_chunks_equal_tokens_one_by_one(count: int) -> None:
    given, state = inputs(count), torch.randn(HEADS, KEYS, VALUES)
    expected_state = state.double()
    expected = one_by_one(given, expected_state)
    torch.testing.assert_close(delta_run(given, state).double(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(state.double(), expected_state, rtol=1e-4, atol=1e-4)


def test_a_snapshot_ends_a_run_and_the_next_one_continues_from_it() -> None:
    slots = StateSlots(7, NO_STATE, (Snapshot(4, 2), Snapshot(10, 3)))
    assert runs_of(slots, 100, 110) == [
        StateRun(100, 104, NO_STATE, 2),
        StateRun(104, 110, 2, 3),
        StateRun(110, 110, 3, 7),  # copies the state
    ]


def test_the_bytes_of_a_state_are_those_of_its_tensors() -> None:
    shapes = (RecurrentShape(2, 4, 8, 12, 4), RecurrentShape(1, 1, 4, 4, 3))
    states = RecurrentStates(shapes, 3)
    assert sum(tensor.nbytes for tensor in states.tensors()) == 3 * bytes_per_state(shapes)
