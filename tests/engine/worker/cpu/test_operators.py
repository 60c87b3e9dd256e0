from itertools import pairwise

import pytest
import torch

from engine.worker.cpu.kernels.linears.linear import LinearOperands, first_column
from engine.worker.cpu.kernels.linears.packed_tiles import WIDTH
from engine.worker.cpu.linears import linears_of
from engine.worker.cpu.linears.packed import columns_of_chunks
from engine.worker.cpu.linears.packed_store import PackedStore
from engine.worker.cpu.operators import NativeOperators
from engine.worker.cpu.thread_pool import NativeThreadPool
from engine.worker.model.torch_operators import TorchOperators
from engine.worker.ports import Weight
from engine.worker.weights.formats.int8 import quantize
from tests.noise import noise

PLAIN = TorchOperators()


@pytest.fixture(scope="module")
def native() -> NativeOperators:
    return NativeOperators(NativeThreadPool(2))


SIZES = [(16, 4), (32, 97), (37, 9), (5, 1), (48, 32), (1500, 70), (2100, 33)]


@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 64, 65, 200])
def test_linear(native: NativeOperators, rows: int, inputs: int, outputs: int) -> None:
    x, weight, bias = noise(rows, inputs), noise(outputs, inputs, seed=1), noise(outputs, seed=2)
    for shift in (None, bias):
        fast, plain = native.linear([weight], shift), PLAIN.linear([weight], shift)
        torch.testing.assert_close(fast(x), plain(x), rtol=1e-4, atol=1e-3)
        start = noise(rows, outputs, seed=3)
        added = fast(x, start.clone())
        torch.testing.assert_close(added, plain(x, start.clone()), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
@pytest.mark.parametrize("outputs", [5, 32, 97, 1152])
def test_the_chunks_of_a_linear_have_each_column_once_and_neighbours_go_to_one_thread(
    threads: int, outputs: int
) -> None:
    operands = LinearOperands(outputs=outputs, columns=32, threads=threads)
    chunks = range(-(-outputs // 32))
    first = [first_column.py_func(operands, chunk) for chunk in chunks]
    assert sorted(first) == list(range(0, outputs, 32))
    for thread in range(threads):
        own = first[thread::threads]
        assert all(after == before + 32 for before, after in pairwise(own))


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("panels", [28, 36, 304])
def test_no_thread_of_a_linear_has_more_than_its_share_of_columns_by_2_percent(
    threads: int, panels: int
) -> None:
    columns_of = columns_of_chunks(panels * WIDTH, threads)
    for columns in (columns_of(8), columns_of(128)):
        chunks = -(-panels * WIDTH // columns)
        assert columns % WIDTH == 0
        assert -(-chunks // threads) * columns <= 1.02 * panels * WIDTH / threads


@pytest.mark.parametrize("name", ["float32", "bfloat16", "int8"])
def test_a_column_has_the_same_bits_in_a_whole_panel_and_in_a_part_of_one(name: str) -> None:
    native = NativeOperators(NativeThreadPool(1), PackedStore(linears_of(name)))
    weight = noise(WIDTH, 600, seed=1).to(torch.bfloat16 if name == "bfloat16" else torch.float32)
    whole_weight: Weight = quantize(weight) if name == "int8" else weight
    part_weight: Weight = quantize(weight[:-1]) if name == "int8" else weight[:-1]
    x, bias, start = noise(20, 600), noise(WIDTH, seed=2), noise(20, WIDTH, seed=3)
    whole, part = native.linear([whole_weight], bias), native.linear([part_weight], bias[:-1])
    assert torch.equal(whole(x)[:, :-1], part(x))
    added = part(x, start[:, :-1].clone())
    assert torch.equal(whole(x, start.clone())[:, :-1], added)


@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
def test_a_row_of_a_linear_has_the_same_bits_beside_any_rows(
    native: NativeOperators, inputs: int, outputs: int
) -> None:
    linear = native.linear([noise(outputs, inputs, seed=1)], noise(outputs, seed=2))
    x = noise(150, inputs)
    together = linear(x)
    for first, count in ((0, 1), (1, 2), (3, 3), (6, 31), (37, 100)):
        assert torch.equal(linear(x[first : first + count]), together[first : first + count])


def test_a_linear_reads_strided_rows(native: NativeOperators) -> None:
    whole, weight = noise(9, 100), noise(12, 32, seed=1)
    torch.testing.assert_close(
        native.linear([weight], None)(whole[:, 20:52]),
        PLAIN.linear([weight], None)(whole[:, 20:52]),
        rtol=1e-4,
        atol=1e-4,
    )


@pytest.mark.parametrize("rows", [1, 5, 100])
def test_rms_norm(native: NativeOperators, rows: int) -> None:
    weight, x = noise(40), noise(rows, 40, seed=1)
    fast, plain = native.rms_norm(weight, 1e-5), PLAIN.rms_norm(weight, 1e-5)
    torch.testing.assert_close(fast(x), plain(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 2, 33])
@pytest.mark.parametrize("dim", [1, 20, 257])
def test_layer_norm(native: NativeOperators, rows: int, dim: int) -> None:
    weight, bias, x = noise(dim), noise(dim, seed=1), 3 * noise(rows, dim, seed=2) + 2
    fast, plain = (each.layer_norm(weight, bias, 1e-5) for each in (native, PLAIN))
    torch.testing.assert_close(fast(x), plain(x), rtol=1e-5, atol=1e-5)
    x[-1, 0] = torch.inf
    assert fast(x).isfinite().all(dim=1).tolist() == [True] * (rows - 1) + [False]


def test_rms_norm_in_place_changes_only_the_given_heads(native: NativeOperators) -> None:
    weight, fused = noise(20), noise(7, 6, 20, seed=1)
    expected = fused.clone()
    native.rms_norm(weight, 1e-5).apply_(fused[:, 1:4])
    PLAIN.rms_norm(weight, 1e-5).apply_(expected[:, 1:4])
    torch.testing.assert_close(fused, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["silu", "gelu_new", "gelu_pytorch_tanh", "gelu", "relu"])
@pytest.mark.parametrize("is_gated", [True, False])
def test_activation(native: NativeOperators, name: str, is_gated: bool) -> None:
    x = torch.cat([noise(30, 74) * 10, torch.linspace(-200, 200, 74)[None]])
    torch.testing.assert_close(
        native.activation(name, is_gated=is_gated)(x),
        PLAIN.activation(name, is_gated=is_gated)(x.double()).float(),
        rtol=3e-6,
        atol=2e-6,
    )


def test_clamped_swiglu(native: NativeOperators) -> None:
    x = torch.cat([noise(30, 74) * 10, torch.linspace(-200, 200, 74)[None]])
    expected = PLAIN.clamped_swiglu(1.702, 7.0)(x.double()).float()
    found = native.clamped_swiglu(1.702, 7.0)(x)
    torch.testing.assert_close(found, expected, rtol=3e-6, atol=2e-6)
    gate, up = x[:, :37].clamp(max=7.0), x[:, 37:].clamp(-7.0, 7.0)
    by_hand = (up + 1) * gate * torch.sigmoid(1.702 * gate)
    torch.testing.assert_close(found, by_hand, rtol=1e-5, atol=1e-5)


def test_rows_are_multiplied_by_the_sigmoid_of_their_scores(native: NativeOperators) -> None:
    x, scores = noise(20, 37), 5 * noise(20, 1, seed=1)
    expected = x * scores.sigmoid()
    for operators in (native, PLAIN):
        found = x.clone()
        operators.gate_rows_(found, scores)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_heads_are_multiplied_by_the_sigmoids_of_the_gates_behind_them(
    native: NativeOperators,
) -> None:
    y, mixed = noise(20, 2 * 3 + 4, 7), noise(20, 3 * 7, seed=1)
    expected = (mixed.view(20, 3, 7) * y[:, [1, 3, 5]].sigmoid()).view(20, 21)
    for operators in (native, PLAIN):
        assert torch.equal(operators.without_gates(y, 3), y[:, [0, 2, 4, 6, 7, 8, 9]])
        found = mixed.clone()
        operators.gate_heads_(found, y)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rows", [1, 33])
def test_rope(native: NativeOperators, rows: int) -> None:
    fused, cos, sin = noise(rows, 5, 24), noise(rows, 12, seed=1), noise(rows, 12, seed=2)
    expected = fused.clone()
    native.apply_rope_(fused[:, :3], cos, sin)
    PLAIN.apply_rope_(expected[:, :3], cos, sin)
    torch.testing.assert_close(fused, expected, rtol=1e-5, atol=1e-5)


def test_nan_in_a_row_gives_nan_in_that_row_only(native: NativeOperators) -> None:
    x = noise(4, 64)
    x[2, 10] = float("nan")
    one = torch.ones(64)
    for result in (
        native.linear([noise(8, 64)], None)(x),
        native.rms_norm(one, 1e-5)(x),
        native.activation("silu", is_gated=False)(x),
        native.activation("silu", is_gated=True)(x),
    ):
        assert result[2].isnan().any()
        assert result[[0, 1, 3]].isfinite().all()
    assert native.sampling.argmax(x).values.isfinite().tolist() == [True, True, False, True]


def test_weights_over_one_input_are_stacked_along_the_outputs(native: NativeOperators) -> None:
    x, parts = noise(6, 32), [noise(rows, 32, seed=rows) for rows in (8, 3, 20)]
    expected = torch.cat([x @ part.T for part in parts], dim=1)
    for operators in (native, PLAIN):
        torch.testing.assert_close(operators.linear(parts, None)(x), expected, rtol=1e-4, atol=1e-4)


def test_a_linear_keeps_its_weights_when_others_are_made(native: NativeOperators) -> None:
    x, many = noise(2, 700), [noise(500, 700, seed=seed) for seed in range(60)]
    linears = [native.linear([weight.T.contiguous().T], None) for weight in many]
    for linear, weight in zip(linears, many, strict=True):
        torch.testing.assert_close(linear(x), x @ weight.T, rtol=1e-4, atol=1e-3)
