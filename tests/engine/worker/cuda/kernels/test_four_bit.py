"""4-bit weights under Triton's interpreter against plain torch.

In float16: the interpreter neither computes with bfloat16 nor multiplies it. What differs there are
constants, which the last test checks; the kernels are compiled in `test_compiled` and run in
tests/gpu.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.worker.cuda.kernels import reference
from engine.worker.cuda.kernels.reference import CHUNK, E2M1, FourBitWeight, RowBlocks
from engine.worker.cuda.kernels.tiling import Tiling
from tests.engine.worker.cuda.kernels.interpreted import interpreted
from tests.noise import noise

four_bit = interpreted("four_bit")

SMALL = Tiling(16, 32, CHUNK, 1, 4, 3)
SPLIT = Tiling(16, 16, CHUNK, 3, 4, 3)
KINDS = ("integers", "offsets", "mxfp4")
POISON = 15  # a code of padding


def random_codes(outputs: int, inputs: int) -> Tensor:
    generator = torch.Generator().manual_seed(outputs * inputs)
    return torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8, generator=generator)


def weight_of(codes: Tensor, kind: str, group: int) -> FourBitWeight:
    """A weight with these codes and random scales; what lies in the padding is large."""
    outputs, inputs = codes.shape
    chunks = -(-inputs // CHUNK)
    padded = torch.full((outputs, chunks * CHUNK), POISON, dtype=torch.uint8)
    padded[:, :inputs] = codes
    shape = chunks * CHUNK // group, outputs
    scales, offsets = noise(*shape, seed=1).half(), None
    if kind == "mxfp4":
        scales = (noise(*shape, seed=1) * 3 + 127).to(torch.uint8)
    if kind == "offsets":
        offsets = noise(*shape, seed=2).half()
    words = reference.pack(padded).contiguous()
    return FourBitWeight(words, scales, offsets, group, inputs)


def by_hand(weight: FourBitWeight, codes: Tensor) -> Tensor:
    """The weight in float64, number by number."""
    groups = torch.arange(weight.inputs) // weight.group
    scales = weight.scales.t().double()[:, groups]
    if weight.is_e2m1:
        signed = torch.tensor([*E2M1, *(-each for each in E2M1)]).double()
        return signed[codes.long()] * 2 ** (scales - 127)
    found = (codes.double() - 8) * scales
    return found if weight.offsets is None else found + weight.offsets.t().double()[:, groups]


def poisoned(rows: int, width: int) -> Tensor:
    """Rows with NaN behind them and below them."""
    whole = torch.full((rows + 20, width + 70), torch.nan, dtype=torch.float16)
    whole[:rows, :width] = noise(rows, width, seed=3).half()
    return whole[:rows, :width]


@settings(deadline=None, max_examples=25)
@given(
    rows=st.integers(1, 20),
    outputs=st.integers(1, 50),
    inputs=st.integers(1, 300),
    kind=st.sampled_from(KINDS),
    group=st.sampled_from([32, 64, 128]),
    tiling=st.sampled_from([SMALL, SPLIT]),
)
def test_products_of_ragged_shapes_are_those_of_the_numbers(
    rows: int, outputs: int, inputs: int, kind: str, group: int, tiling: Tiling
) -> None:
    codes = random_codes(outputs, inputs)
    weight, x = weight_of(codes, kind, group), poisoned(rows, inputs)
    found = four_bit.product(x, weight, tiling, four_bit.Epilogue())
    wanted = x.double() @ by_hand(weight, codes).T
    torch.testing.assert_close(found.double(), wanted, rtol=2e-3, atol=2e-3 * inputs**0.5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group", [32, 64, 128])
def test_outputs_are_unpacked_as_the_reference_does(kind: str, group: int) -> None:
    codes = random_codes(150, 200)
    weight, here = weight_of(codes, kind, group), slice(5, 140)
    found = four_bit.unpack(weight, here, torch.float16)
    assert torch.equal(found, reference.unpack(weight, here, torch.float16))
    assert torch.equal(found, by_hand(weight, codes)[here].half())


@pytest.mark.parametrize("tiling", [SMALL, SPLIT])
@pytest.mark.parametrize("adds", [False, True])
def test_bias_and_residual_follow_in_the_same_launches(tiling: Tiling, adds: bool) -> None:
    weight, x = weight_of(random_codes(40, 256), "offsets", 64), poisoned(5, 256)
    bias, start = noise(40, seed=4).half(), noise(5, 48, seed=5).half()[:, :40]
    plain = reference.unpack(weight, slice(0, 40), torch.float32)
    adding = start.clone() if adds else None
    wanted = reference.product(x, plain, torch.float16, None, bias, adding)
    found = four_bit.product(x, weight, tiling, four_bit.Epilogue(bias=bias, add_to=adding))
    torch.testing.assert_close(found, wanted, rtol=1e-2, atol=3e-2)
    assert (found is adding) == adds


def test_each_block_of_rows_uses_the_outputs_of_its_expert() -> None:
    """Of four experts one has no rows, one more than a block; what no block has stays as it was."""
    weight, x = weight_of(random_codes(4 * 24, 160), "mxfp4", 32), poisoned(23, 160)
    bias = noise(4 * 24, seed=6).half()
    table = [[0, 0, 3], [2, 3, 21], [2, 19, 21], [3, 21, 23], [3, 23, 23]]
    blocks = RowBlocks(torch.tensor(table, dtype=torch.int32), 4)
    found = four_bit.product(x, weight, SMALL, four_bit.Epilogue(bias=bias), blocks)
    plain = reference.unpack(weight, slice(0, 96), torch.float32).view(4, 24, 160)
    for expert, rows in ((0, slice(0, 3)), (2, slice(3, 21)), (3, slice(21, 23))):
        own = bias.view(4, 24)[expert]
        wanted = reference.product(x[rows], plain[expert], torch.float16, None, own)
        torch.testing.assert_close(found[rows], wanted, rtol=1e-2, atol=1e-2)


def test_the_result_of_a_row_does_not_depend_on_the_other_rows() -> None:
    """With whole numbers, whose sums are exact; tests/gpu compares bits of any numbers."""
    weight = weight_of(random_codes(30, 256), "integers", 64)
    weight = weight._replace(scales=torch.ones_like(weight.scales))
    x = noise(20, 256).round().half()
    together = four_bit.product(x, weight, SPLIT, four_bit.Epilogue())
    for row in (0, 7, 19):
        alone = four_bit.product(x[row : row + 1], weight, SPLIT, four_bit.Epilogue())
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize(
    ("dtype", "power", "factor", "bits"),
    [
        (torch.bfloat16, "BFLOAT16_128", "BFLOAT16_FACTOR", 7),
        (torch.float16, "FLOAT16_1024", "FLOAT16_FACTOR", 10),
    ],
)
def test_the_constants_make_exact_numbers_of_codes_in_both_dtypes(
    dtype: torch.dtype, power: str, factor: str, bits: int
) -> None:
    """`bits` are those of a mantissa."""
    codes, pair = torch.arange(16, dtype=torch.int16), getattr(four_bit, power).value
    assert pair >> 16 == pair & 0xFFFF
    integers = (codes | (pair & 0xFFFF)).view(dtype)
    assert (integers - (2**bits + 8)).tolist() == list(range(-8, 8))
    numbers = ((codes[:8] << (bits - 1)).view(dtype) * getattr(four_bit, factor).value).tolist()
    assert numbers == list(E2M1)
