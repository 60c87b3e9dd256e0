"""Linear layers with int4 weights, for both widths of inputs, and the format itself."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.worker.cpu.kernels.int8_linear import MAX_8_BITS, MAX_14_BITS
from engine.worker.cpu.kernels.tile_formats import HAS_VNNI
from engine.worker.cpu.linears.grouped import GroupedLinears, grouped_linears
from engine.worker.cpu.operators import NativeOperators
from engine.worker.cpu.packed_store import PackedStore
from engine.worker.cpu.thread_pool import NativeThreadPool
from engine.worker.ports import dequantize
from engine.worker.weights.formats.int4 import GROUP, SCALES, SYMMETRIC, quantize
from tests.checkpoints import make_checkpoint
from tests.engine.worker.process.driving import Driver, load_worker

STEPS = {"14-bit activations": MAX_14_BITS, "8-bit activations, VNNI": MAX_8_BITS}
SIZES = [(16, 4), (32, 97), (37, 9), (5, 1), (64, 32), (1500, 70), (2100, 33)]
VNNI = pytest.mark.skipif(not HAS_VNNI, reason="8-bit activations need a CPU with VNNI")
TOKENS = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38]


@pytest.fixture(scope="module", params=[14, 8], ids=["14_bits", "8_bits"])
def linears(request: pytest.FixtureRequest) -> GroupedLinears:
    """Both run on every CPU; the widths without an instruction run in plain vectors."""
    return grouped_linears(SYMMETRIC[GROUP], request.param)


@pytest.fixture(scope="module")
def operators(linears: GroupedLinears) -> NativeOperators:
    return NativeOperators(NativeThreadPool(2), PackedStore({"float32": linears, "int4": linears}))


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def quantized_rows(x: Tensor, steps: int) -> Tensor:
    """The inputs as the kernel rounds them, in float64."""
    largest = x.abs().amax(dim=1, keepdim=True)
    whole = x * (torch.full_like(largest, steps) / largest)
    whole = (whole + torch.where(x >= 0, 0.5, -0.5)).to(torch.int64)
    return whole * largest.double() / steps


@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
@pytest.mark.parametrize("rows", [1, 2, 3, 6, 7, 64, 65])
def test_a_linear_multiplies_quantized_inputs_by_quantized_weights(
    operators: NativeOperators, linears: GroupedLinears, rows: int, inputs: int, outputs: int
) -> None:
    x, weight, bias = noise(rows, inputs), noise(outputs, inputs, seed=1), noise(outputs, seed=2)
    start = noise(rows, outputs, seed=3)
    exact = quantized_rows(x, STEPS[linears.name]) @ dequantize(quantize(weight)).double().T
    linear = operators.linear([weight], bias)
    # Integer sums are exact; up to 70 groups are then added in float32.
    torch.testing.assert_close(linear(x).double(), exact + bias, rtol=1e-5, atol=1e-4)
    added = linear(x, start.clone()).double()
    torch.testing.assert_close(added, exact + bias + start, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
def test_a_row_has_the_same_bits_beside_any_rows(
    operators: NativeOperators, inputs: int, outputs: int
) -> None:
    linear = operators.linear([noise(outputs, inputs, seed=1)], noise(outputs, seed=2))
    x = noise(150, inputs)
    together = linear(x)
    for first, count in ((0, 1), (1, 2), (3, 3), (6, 31), (37, 100)):
        assert torch.equal(linear(x[first : first + count]), together[first : first + count])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_row_with_nan_or_infinity_gives_no_finite_number(
    operators: NativeOperators, value: float
) -> None:
    x = noise(4, 64)
    x[2, 10] = value
    found = operators.linear([noise(8, 64, seed=1)], None)(x)
    assert not found[2].isfinite().any()
    assert found[[0, 1, 3]].isfinite().all()


def test_weights_over_one_input_are_stacked_along_the_outputs(operators: NativeOperators) -> None:
    x, parts = noise(6, 64), [noise(rows, 64, seed=rows) for rows in (8, 3, 20)]
    alone = [operators.linear([part], None)(x) for part in parts]
    assert torch.equal(operators.linear(parts, None)(x), torch.cat(alone, dim=1))


def test_the_quantization_error_is_at_most_one_step() -> None:
    """Half a step, but for weights near the end of the range that has 7 steps only."""
    weight = noise(70, 100) * torch.logspace(-2, 2, 70)[:, None]
    found = quantize(weight)
    steps = found.tensors[SCALES].float().abs().repeat_interleave(GROUP, dim=1)[:, :100]
    error = (dequantize(found) - weight).abs()
    largest = weight.abs().amax(dim=1, keepdim=True)
    assert (error <= steps * 1.001 + 0.25 * largest).all()
    relative = (error.square().sum() / weight.square().sum()).sqrt()
    assert 0.05 < relative < 0.1  # of normally distributed weights


def test_quantizing_a_quantized_weight_changes_nothing_and_zeros_stay_zero() -> None:
    once = quantize(noise(7, 40))
    assert quantize(once) is once
    assert not dequantize(quantize(torch.zeros(2, 5))).any()


def test_some_rows_are_those_rows_of_the_whole() -> None:
    whole = quantize(noise(12, 40))
    part = whole.rows(slice(3, 9))
    assert part.shape == (6, 40)
    assert torch.equal(dequantize(part), dequantize(whole)[3:9])


@pytest.mark.parametrize(("bits", "bound"), [("14", 0.01), pytest.param("8", 0.4, marks=VNNI)])
@pytest.mark.parametrize("variant", ["llama", "qwen3"])
def test_logits_in_int4_are_those_of_the_dequantized_weights(
    tmp_path: Path, variant: str, bits: str, bound: float
) -> None:
    """What is left is the error of the inputs, in standard deviations of the logits."""
    path = make_checkpoint(tmp_path, variant) / "model.safetensors"
    worker = load_worker(tmp_path, attention="cpu", weights="int4", activation_bits=bits)
    found = Driver(worker).logits((0, TOKENS))[0]
    tensors = load_file(path)
    for name in tensors:
        if name.endswith("_proj.weight") or name == "lm_head.weight":
            tensors[name] = dequantize(quantize(tensors[name])).contiguous()
    save_file(tensors, path)
    exact = Driver(load_worker(tmp_path, attention="cpu")).logits((0, TOKENS))[0]
    assert worker.report.weights.startswith(f"int4 ({bits}-bit activations")
    assert (found - exact).abs().max() < bound * exact.std()
