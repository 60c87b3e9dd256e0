import pytest
import torch

from engine.step import NO_STATE, StateSlots
from engine.worker.cpu.operators import NativeOperators
from engine.worker.cpu.thread_pool import NativeThreadPool
from engine.worker.model.torch_operators import TorchOperators
from engine.worker.ports import Operators, RecurrentWeights
from tests.engine.worker.cpu import test_delta_net, test_mamba, test_short_conv
from tests.engine.worker.cpu.recurrences import inputs_of, run, states_of

FIRST, LATER = StateSlots(0, NO_STATE), StateSlots(0, 0)
DELTA = [test_delta_net.weights_of(shape) for shape in test_delta_net.SHAPES]
MAMBA = [test_mamba.weights_of(shape) for shape in test_mamba.SHAPES]
CONV = [test_short_conv.weights_of(shape) for shape in test_short_conv.SHAPES]

# TorchDeltaNet has other bits where torch computes several rows at once.
ALL = [("native", each) for each in [*DELTA, *MAMBA, *CONV]]
ALL += [("torch", each) for each in [*MAMBA, *CONV]]
of_each_kind = pytest.mark.parametrize(
    ("operators", "weights"),
    [
        *(("native", each) for each in (DELTA[1], DELTA[2], MAMBA[1], CONV[1])),
        *(("torch", each) for each in (MAMBA[1], CONV[1])),
    ],
    indirect=["operators"],
)


@pytest.fixture(scope="module")
def operators(request: pytest.FixtureRequest) -> Operators:
    is_native = request.param == "native"
    return NativeOperators(NativeThreadPool(2)) if is_native else TorchOperators()


@pytest.mark.parametrize(("operators", "weights"), ALL, indirect=["operators"])
def test_bits_do_not_depend_on_how_tokens_are_cut_into_steps(
    operators: Operators, weights: RecurrentWeights
) -> None:
    y = inputs_of(weights, 67)
    whole, state = run(operators, weights, y, [(67, FIRST)])
    for cut in ([1] * 67, [64, 3], [2, 31, 1, 33]):
        steps = [[(count, LATER if at else FIRST)] for at, count in enumerate(cut)]
        found, own = run(operators, weights, y, *steps)
        assert torch.equal(found, whole)
        for part, wanted in zip(own, state, strict=True):
            assert torch.equal(part[0], wanted[0])


@of_each_kind
def test_bits_do_not_depend_on_the_other_requests_of_a_step(
    operators: Operators, weights: RecurrentWeights
) -> None:
    y, own = inputs_of(weights, 12), StateSlots(3, 1)
    alone, state = run(operators, weights, y[7:], [(5, own)])
    beside = [(1, StateSlots(0, 0)), (6, StateSlots(2, NO_STATE)), (5, own)]
    found, among = run(operators, weights, y, beside)
    assert torch.equal(found[7:], alone)
    for part, wanted in zip(among, state, strict=True):
        assert torch.equal(part[3], wanted[3])


@of_each_kind
def test_the_rows_of_drafts_leave_the_state_after_each_of_them(
    operators: Operators, weights: RecurrentWeights
) -> None:
    """A verify step of three drafts: slot i has the state of decoding i + 1 tokens."""
    y = inputs_of(weights, 4)
    rows = [StateSlots(5, 0), StateSlots(6, 5), StateSlots(7, 6), StateSlots(0, 7)]
    found, state = run(operators, weights, y, [(1, slots) for slots in rows])
    for count in range(1, 5):
        expected, own = run(operators, weights, y[:count], *[[(1, LATER)]] * count)
        assert torch.equal(found[:count], expected)
        slot = rows[count - 1].slot
        for part, wanted in zip(state, own, strict=True):
            assert torch.equal(part[slot], wanted[0])


@of_each_kind
def test_a_request_without_a_state_reads_none_of_another_one(
    operators: Operators, weights: RecurrentWeights
) -> None:
    broken = tuple(part.fill_(torch.nan) for part in states_of(weights.shape))  # by an error
    found, state = run(operators, weights, inputs_of(weights, 4), [(4, FIRST)], state=broken)
    assert found.isfinite().all()
    assert all(part[0].isfinite().all() for part in state)
