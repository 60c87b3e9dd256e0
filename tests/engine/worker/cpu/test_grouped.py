import pytest
import torch
from torch import Tensor

from engine.worker.cpu.kernels.linears.int8_linear import MAX_8_BITS, MAX_14_BITS
from engine.worker.cpu.kernels.linears.tile_formats import HAS_VNNI
from engine.worker.cpu.linears.grouped import grouped_linears
from engine.worker.cpu.linears.packed_store import PackedStore
from engine.worker.cpu.operators import NativeOperators
from engine.worker.cpu.thread_pool import NativeThreadPool
from engine.worker.ports import Weight
from engine.worker.weights.formats import LAYOUTS
from engine.worker.weights.formats.grouped import GroupedWeight, GroupLayout, Groups

MOST = {8: MAX_8_BITS, 14: MAX_14_BITS}
FASTEST = 8 if HAS_VNNI else 14
# Together these have every part of a layout, and with "q5_1", whose steps have a plane of one bit,
# in both widths; the others are compiled in that of this CPU.
SOME = {"q4_k", "q6_k", "uint4_128", "q8_0", "iq4_xs"}
CASES = [
    pytest.param(
        name,
        bits,
        marks=[] if (name in SOME and bits == FASTEST) or name == "int4" else pytest.mark.process,
        id=f"{name}-{bits}_bits",
    )
    for name in LAYOUTS
    for bits in MOST
    if name in {*SOME, "int4", "q5_1"} or bits == FASTEST
]


def random_weight(layout: GroupLayout, outputs: int, inputs: int) -> GroupedWeight:
    """A weight of random steps, scales and minimums."""
    random = torch.Generator().manual_seed(outputs)
    blocks = -(-inputs // layout.block)

    def integers(low: int, high: int, columns: int, dtype: torch.dtype = torch.int8) -> Tensor:
        return torch.randint(low, high, (outputs, columns), generator=random, dtype=dtype)

    groups = blocks * layout.groups
    tensors = {
        "steps": integers(0, 1 << layout.bits, blocks * layout.block, torch.uint8),
        "scales": torch.rand((outputs, blocks), generator=random).add(0.1).half(),
    }
    if layout.has_factors:
        tensors["factors"] = integers(0 if layout.has_minimums else -128, 64, groups)
    if layout.has_minimums:
        tensors["minimums"] = torch.randn((outputs, blocks), generator=random).half()
    if layout.has_minimums and layout.has_factors:
        tensors["minimum_factors"] = integers(0, 64, groups)
    if layout.has_zeros:
        tensors["zeros"] = integers(0, 16, groups)
    return GroupedWeight(layout, tensors, inputs, lambda tensors: Groups(**tensors))


def quantized(x: Tensor, most: int) -> Tensor:
    """The inputs as the kernel rounds them, in float64."""
    largest = x.abs().amax(dim=1, keepdim=True)
    whole = x * (torch.full_like(largest, most) / largest)
    return (whole + torch.where(x >= 0, 0.5, -0.5)).to(torch.int64) * largest.double() / most


@pytest.mark.parametrize(("name", "bits"), CASES)
def test_a_layout_gives_the_product_of_the_dequantized_weights(name: str, bits: int) -> None:
    layout = LAYOUTS[name]
    linears = grouped_linears(layout, bits)
    operators = NativeOperators(NativeThreadPool(2), PackedStore({name: linears}))
    for inputs, outputs in ((1200, 70), (layout.block, 33), (2 * layout.block + 5, 5)):
        weight, bias = random_weight(layout, outputs, inputs), torch.arange(float(outputs))
        x = torch.randn((150, inputs), generator=torch.Generator().manual_seed(1))
        exact = quantized(x, MOST[bits]) @ weight.dequantize().double().T
        linear = operators.linear([weight.rows(slice(2)), weight.rows(slice(2, None))], bias)
        found = linear(x)
        assert (found - bias - exact).abs().max() < 1e-4 * exact.std()
        for first, count in ((0, 1), (1, 2), (3, 3), (6, 31), (37, 113)):
            assert torch.equal(linear(x[first : first + count]), found[first : first + count])
        start = torch.ones(150, outputs)
        assert (linear(x, start) - found - 1).abs().max() < 1e-5 * exact.std()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_with_nan_or_infinity_gives_no_finite_number(value: float) -> None:
    """Also of weights with minimums, for which sums of inputs are stored as floats."""
    layout = LAYOUTS["q4_k"]
    operators = NativeOperators(
        NativeThreadPool(2), PackedStore({layout.name: grouped_linears(layout, FASTEST)})
    )
    x = torch.randn((4, 256), generator=torch.Generator().manual_seed(1))
    x[2, 10] = value
    found = operators.linear([random_weight(layout, 8, 256)], None)(x)
    assert not found[2].isfinite().any()
    assert found[[0, 1, 3]].isfinite().all()


def test_weights_of_several_formats_make_one_linear() -> None:
    formats = {name: grouped_linears(LAYOUTS[name], FASTEST) for name in ("q4_k", "q6_k")}
    operators = NativeOperators(NativeThreadPool(2), PackedStore(dict(formats)))
    parts: list[Weight] = [
        random_weight(LAYOUTS["q4_k"], 40, 512),
        random_weight(LAYOUTS["q4_k"], 3, 512),
        random_weight(LAYOUTS["q6_k"], 50, 512),
        torch.randn((7, 512), generator=torch.Generator().manual_seed(2)),
    ]
    x, bias = torch.randn((9, 512), generator=torch.Generator().manual_seed(1)), torch.randn(100)
    found = operators.linear(parts, bias)(x)
    alone = [operators.linear([part], None)(x) for part in parts]
    torch.testing.assert_close(found, torch.cat(alone, dim=1) + bias)
    torch.testing.assert_close(operators.linear(parts, bias)(x, found.clone()), 2 * found)
