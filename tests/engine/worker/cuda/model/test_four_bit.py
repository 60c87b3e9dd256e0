"""Linears and experts with weights in 4 bits, in torch, and with the kernel in its interpreter."""

from functools import partial

import pytest
import torch
from torch import Tensor

from engine.worker.cuda.kernels import reference
from engine.worker.cuda.kernels.reference import FourBitWeight
from engine.worker.cuda.model import four_bit
from engine.worker.cuda.model.experts import GroupedExperts, MaskedExperts
from engine.worker.cuda.model.four_bit import (
    FORMATS_IN_4_BITS,
    FourBitLinear,
    are_in_4_bits,
    four_bit_linear,
    packed,
)
from engine.worker.cuda.model.linears import (
    EightBitLinear,
    FastProducts,
    FloatLinear,
    JoinedLinear,
)
from engine.worker.cuda.model.operators import STORED, CudaOperators
from engine.worker.model.torch_operators import TorchOperators
from engine.worker.ports import ExpertWeights, Routing, Weight, dequantize
from engine.worker.weights.formats import LAYOUTS
from engine.worker.weights.formats.int4 import INT4
from tests.engine.worker.cuda.kernels.interpreted import interpreted
from tests.engine.worker.cuda.stored_weights import SMALL, stored
from tests.noise import noise

CPU = torch.device("cpu")
PLAIN = TorchOperators()
SILU = PLAIN.activation("silu", is_gated=True)


def unpacked(weight: FourBitWeight) -> Tensor:
    return reference.unpack(weight, slice(0, weight.outputs), torch.float32)


def test_all_layouts_of_4_bits_are_taken() -> None:
    known = {"int4", "int4_64", "int4_128", "uint4_32", "uint4_64", "uint4_128"}
    assert known | {"q4_1", "q4_k", "mxfp4"} == FORMATS_IN_4_BITS


@pytest.mark.parametrize("name", sorted(FORMATS_IN_4_BITS))
def test_a_weight_of_a_file_keeps_its_numbers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exactly those of one scale; what is rounded to float16 is off by 2**-11 at most. With few
    elements at once it is packed in slices."""
    monkeypatch.setattr(four_bit, "ELEMENTS_AT_ONCE", 8 * SMALL)
    weight = stored(name, 20)
    found, wanted = unpacked(packed([weight])), weight.dequantize()
    if LAYOUTS[name].has_offsets:
        most = float(wanted.abs().amax())
        torch.testing.assert_close(found, wanted, rtol=0, atol=most * 2**-10)
    else:
        assert torch.equal(found, wanted)


def test_weights_with_groups_of_several_sizes_are_one_linear() -> None:
    parts = [stored(name, 16) for name in ("int4_128", "uint4_64", "q4_k", "int4")]
    assert are_in_4_bits(parts)
    weight = packed(parts)
    assert (weight.group, weight.outputs, weight.inputs) == (32, 64, SMALL)
    wanted = torch.cat([part.dequantize() for part in parts])
    atol = float(wanted.abs().amax()) * 2**-10
    torch.testing.assert_close(unpacked(weight), wanted, rtol=0, atol=atol)
    assert not are_in_4_bits([stored("int4", 16), stored("mxfp4", 16)])
    assert not are_in_4_bits([stored("int4", 16), noise(16, SMALL)])
    assert not are_in_4_bits([stored("q6_k", 16)])


def test_floats_are_quantized_as_on_a_cpu() -> None:
    weights: list[Weight] = [noise(24, 200), noise(8, 200, seed=1)]
    wanted = torch.cat([dequantize(INT4.convert(weight)) for weight in weights])
    assert torch.equal(unpacked(packed(weights)), wanted)


@pytest.mark.parametrize("name", sorted(FORMATS_IN_4_BITS))
def test_packing_stays_on_the_device_of_the_weight(name: str) -> None:
    """The meta device has no values: tensors of the CPU do not mix with it."""
    nowhere = stored(name, 20).map(lambda tensor: tensor.to("meta"))
    weight = packed([nowhere])
    assert {each.device.type for each in weight[:3] if each is not None} == {"meta"}
    assert nowhere.dequantize().device.type == "meta"
    if name == "int4":
        assert packed([noise(20, SMALL).to("meta")]).words.device.type == "meta"


def fast_kernels(*, is_batch_invariant: bool = False) -> FastProducts:
    return FastProducts(
        four_bit=interpreted("four_bit"), gemm=interpreted("gemm"),
        is_batch_invariant=is_batch_invariant,
    )  # fmt: skip


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("rows", [1, 70, 260])
@pytest.mark.parametrize("way", ["torch", "kernels", "batch-invariant"])
def test_a_linear_multiplies_the_numbers_of_its_weights(
    way: str, rows: int, with_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More rows than 256 are multiplied with a few unpacked outputs at a time."""
    monkeypatch.setattr(four_bit, "MAX_UNPACKED_BYTES", 50 * SMALL * 2)
    dtype = torch.float32 if way == "torch" else torch.float16
    fast = FastProducts() if way == "torch" else fast_kernels(
        is_batch_invariant=way == "batch-invariant"
    )  # fmt: skip
    weights = [stored("int4_64", 48), stored("uint4_128", 32)]
    bias = noise(80, seed=3, dtype=dtype) if with_bias else None
    linear = four_bit_linear(weights, bias, dtype, fast)
    x, start = noise(rows, SMALL, dtype=dtype), noise(rows, 80, seed=5, dtype=dtype)
    wanted = x.double() @ torch.cat([each.dequantize() for each in weights]).double().T
    if bias is not None:
        wanted += bias.double()
    close = partial(torch.testing.assert_close, rtol=5e-3, atol=5e-3 * float(wanted.std()))
    found = linear(x)
    assert (found.dtype, found.shape) == (dtype, (rows, 80))
    close(found.double(), wanted)
    into = start.clone()
    assert linear(x, into).data_ptr() == into.data_ptr()
    close(into.double(), wanted + start.double())


NUM_EXPERTS, HIDDEN, INNER = 5, 96, 64


def experts_in(name: str, *, has_bias: bool) -> list[ExpertWeights]:
    """Experts with weights of this format."""
    gate, up = (
        stored(name, NUM_EXPERTS * INNER, HIDDEN),
        stored(name, NUM_EXPERTS * INNER + 1, HIDDEN),
    )
    down = stored(name, NUM_EXPERTS * HIDDEN, INNER)
    found = []
    for each in range(NUM_EXPERTS):
        inner, hidden = (slice(each * size, (each + 1) * size) for size in (INNER, HIDDEN))
        up_bias, down_bias = noise(2 * INNER, seed=each).half(), noise(HIDDEN, seed=each).half()
        biases = (up_bias, down_bias) if has_bias else ()
        found.append(ExpertWeights(gate.rows(inner), up.rows(inner), down.rows(hidden), *biases))
    return found


def in_floats(one: ExpertWeights) -> ExpertWeights:
    floats = [dequantize(each) for each in one[:3]]
    biases = [None if each is None else each.float() for each in one[3:]]
    return ExpertWeights(*floats, *biases)


@pytest.mark.parametrize(("name", "has_bias"), [("mxfp4", True), ("uint4_32", False)])
@pytest.mark.parametrize("rows", [1, 3, 90])
def test_experts_give_the_sum_of_plain_torch(rows: int, name: str, has_bias: bool) -> None:
    """As two products over rows sorted by expert: of blocks of 16 rows, and of 64 for many."""
    experts, routing = experts_in(name, has_bias=has_bias), Routing(2, renormalizes=True)
    operators = CudaOperators(CPU, torch.float16, STORED, fast_kernels())
    made = operators.experts(experts, routing, SILU)
    assert isinstance(made, GroupedExperts)
    x, logits = noise(rows, HIDDEN, seed=7), noise(rows, NUM_EXPERTS, seed=8)
    x = (x / 16).half()
    plain = PLAIN.experts([in_floats(each) for each in experts], routing, SILU)
    wanted = plain(x.float(), logits)
    found = made(x, logits.half())
    assert float((found - wanted).norm() / wanted.norm()) < 5e-3
    start = noise(rows, HIDDEN, seed=9).half()
    added = made(x, logits.half(), start.clone())
    torch.testing.assert_close(added, start + found, rtol=5e-3, atol=5e-2)


def test_all_rows_may_choose_the_same_expert() -> None:
    """The number of blocks does not depend on the choice, so that steps can be captured."""
    experts, routing = experts_in("int4", has_bias=False), Routing(1, renormalizes=True)
    made = CudaOperators(CPU, torch.float16, STORED, fast_kernels()).experts(experts, routing, SILU)
    x, logits = (noise(40, HIDDEN) / 16).half(), torch.zeros(40, NUM_EXPERTS)
    for chosen in (0, 4):
        logits[:] = 0
        logits[:, chosen] = 9
        wanted = PLAIN.experts([in_floats(each) for each in experts], routing, SILU)(
            x.float(), logits
        )
        found = made(x, logits)
        assert float((found - wanted).norm() / wanted.norm()) < 5e-3


def test_without_the_kernel_each_expert_computes_all_rows_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    experts, routing = experts_in("mxfp4", has_bias=True), Routing(2, renormalizes=True)
    floats = [each._replace(up_bias=None, down_bias=None) for each in experts]
    made = CudaOperators(CPU, torch.float32, STORED).experts(floats, routing, SILU)
    assert isinstance(made, MaskedExperts)
    assert isinstance(made.linears[0][0], FourBitLinear)
    assert "the Triton kernel for 4-bit weights is not used" in caplog.text
    x, logits = noise(3, HIDDEN), noise(3, NUM_EXPERTS, seed=1)
    wanted = PLAIN.experts([in_floats(each) for each in floats], routing, SILU)(x, logits)
    torch.testing.assert_close(made(x, logits), wanted, rtol=1e-4, atol=1e-4 * float(wanted.std()))


def test_each_linear_of_a_mixed_file_is_computed_in_its_own_format() -> None:
    """As in files that llama-quantize calls Q4_K_M, of stacked ones too."""
    operators = CudaOperators(CPU, torch.bfloat16, STORED, others="int8")
    q4, q6, floats = stored("q4_k", 16), stored("q6_k", 16), noise(16, SMALL).bfloat16()
    assert isinstance(operators.linear([q4, stored("int4", 8)], None), FourBitLinear)
    assert isinstance(operators.linear([q6], None), EightBitLinear)
    assert isinstance(operators.linear([floats], None), FloatLinear)
    bias, x = noise(64, seed=1).bfloat16(), noise(3, SMALL).bfloat16()
    joined = operators.linear([q4, q4, q6, floats], bias)
    assert isinstance(joined, JoinedLinear)
    kinds = [type(linear) for linear in joined.linears]
    assert (kinds, joined.sizes) == ([FourBitLinear, EightBitLinear, FloatLinear], [32, 16, 16])
    parts: list[Weight] = [q4, q4, q6, floats]
    shares = bias.view(4, 16)
    alone = [operators.linear([part], own)(x) for part, own in zip(parts, shares, strict=True)]
    wanted = torch.cat(alone, dim=1)
    torch.testing.assert_close(joined(x), wanted, rtol=1e-2, atol=1e-2)
    start = noise(3, 64, seed=2).bfloat16()
    into = start.clone()
    assert joined(x, into) is into
    torch.testing.assert_close(into, start + wanted, rtol=2e-2, atol=2e-1)
    without = CudaOperators(CPU, torch.bfloat16, STORED)
    assert isinstance(without.linear([q6], None), FloatLinear)
