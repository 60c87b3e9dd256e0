import pytest
import torch
from torch import Tensor

from engine.errors import StartupError
from engine.worker.cpu.kernels.linears.packed_tiles import WIDTH
from engine.worker.cpu.linears.grouped import grouped_linears
from engine.worker.cpu.linears.packed import PackedWeights
from engine.worker.cpu.linears.panels import in_items, pack
from engine.worker.cpu.pages import WeightPages
from engine.worker.cpu.thread_pool import NativeThreadPool
from engine.worker.weights.formats import LAYOUTS
from engine.worker.weights.formats.blocks import BlockFormat, plain_rows
from engine.worker.weights.formats.grouped import GroupedWeight, Groups
from engine.worker.weights.formats.llama_cpp import BLOCKS
from tests.engine.worker.cpu.packed_panels import packed_groups, panels_of
from tests.engine.worker.cpu.test_grouped import FASTEST, MOST, random_weight

POOL = NativeThreadPool(2)
# Together these have every part of a format, and every kind of plane with both widths of inputs.
SOME = {(name, FASTEST) for name in ("q2_k", "q3_k", "q4_k", "q5_1", "q6_k", "iq4_xs", "mxfp4")}
SOME.add(("int4", 8))
CASES = [
    pytest.param(
        name,
        bits,
        marks=[] if (name, bits) in SOME or (name, bits) == ("q6_k", 14) else pytest.mark.process,
        id=f"{name}-{bits}_bits",
    )
    for name in BLOCKS
    for bits in MOST
]


def random_blocks(format: BlockFormat, outputs: int, blocks: int) -> Tensor:
    """Rows of random bytes whose scales and minimums are finite."""
    random = torch.Generator().manual_seed(outputs)
    shape = outputs, blocks, format.num_bytes
    found = torch.randint(0, 256, shape, dtype=torch.uint8, generator=random)
    for half in range(1 + format.layout.has_minimums):
        found[:, :, format.scale + 2 * half + 1] &= 0xFB  # not all bits of the exponent
    if format.has_exponents:  # from the smallest scale of float16 to the largest
        exponents = torch.randint(104, 144, shape[:2], dtype=torch.uint8, generator=random)
        exponents[0, 0], exponents[-1, -1] = 104, 143
        found[:, :, format.scale] = exponents
    return found.flatten(1)


def packed_by(bits: int, weights: list[GroupedWeight]) -> PackedWeights:
    return grouped_linears(weights[0].layout, bits).pack(weights, WeightPages(), POOL)


def stacked(parts: list[Groups]) -> Groups:
    fields = zip(*parts, strict=True)
    return Groups(*(None if each[0] is None else torch.cat(each) for each in fields))  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "bits"), CASES)
def test_blocks_of_a_file_are_packed_to_the_same_bits_as_by_torch(name: str, bits: int) -> None:
    """Three weights that share panels, of which one is some columns of a wider one."""
    format = BLOCKS[name]
    wide = random_blocks(format, 2 * WIDTH + 3, 7)
    rows = wide[:, format.num_bytes : 5 * format.num_bytes], random_blocks(format, 5, 4)
    weights = [format.weight(each, 4 * format.layout.block) for each in (*rows, rows[0])]
    found = packed_by(bits, weights)
    groups = stacked([each.groups for each in weights])
    steps = grouped_linears(format.layout, bits).steps
    assert torch.equal(found.packed, packed_groups(groups, format.layout, steps))
    assert (found.outputs, found.inputs) == (4 * WIDTH + 11, 4 * format.layout.block)


@pytest.mark.parametrize("name", ["uint4_64", "q5_k"])
def test_groups_are_packed_to_the_same_bits_as_by_torch(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of checkpoints without blocks: some rows at a time, and inputs padded."""
    monkeypatch.setattr("engine.worker.cpu.linears.grouped.ELEMENTS_AT_ONCE", 10_000)
    layout = LAYOUTS[name]
    weight = random_weight(layout, 2 * WIDTH + 7, 5 * layout.block - 9)
    found = packed_by(FASTEST, [weight, weight])
    steps = grouped_linears(layout, FASTEST).steps
    groups = stacked([weight.groups, weight.groups])
    assert torch.equal(found.packed, packed_groups(groups, layout, steps))


@pytest.mark.parametrize("name", LAYOUTS)
def test_plain_blocks_have_the_groups_that_they_were_made_of(name: str) -> None:
    layout = LAYOUTS[name]
    groups = random_weight(layout, 3, 4 * layout.block).groups
    found = BlockFormat.plain(layout)({"": plain_rows(groups, layout)})
    for own, other in zip(found, groups, strict=True):
        assert (own is None) == (other is None)
        assert own is None or (other is not None and torch.equal(own, other))


@pytest.mark.parametrize("exponent", [103, 144])
def test_a_scale_of_mxfp4_that_float16_lacks_is_an_error(exponent: int) -> None:
    format = BLOCKS["mxfp4"]
    rows = random_blocks(format, 40, 3)
    rows[33, format.num_bytes] = exponent
    with pytest.raises(StartupError, match="which float16 lacks"):
        packed_by(FASTEST, [format.weight(rows, 96)])


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.float32])
def test_items_are_packed_to_the_same_bits_as_by_torch(dtype: torch.dtype) -> None:
    """Matrices that share panels, one of them transposed; items that they lack are zeros."""
    parts = [torch.randint(-99, 99, shape).to(dtype) for shape in ((WIDTH + 5, 37), (3, 37))]
    parts.append(torch.randint(-99, 99, (37, 2 * WIDTH)).to(dtype).t())
    found = pack(parts, 40, WeightPages(), POOL)
    whole = torch.nn.functional.pad(torch.cat(parts), (0, 3))
    assert torch.equal(found, panels_of(whole).squeeze(2))


def test_the_last_item_of_a_row_is_filled_with_zeros() -> None:
    values = torch.tensor([[1, 2, 3, 4, 5]], dtype=torch.int8)
    assert in_items(values, torch.int32).view(torch.int8).tolist() == [[1, 2, 3, 4, 5, 0, 0, 0]]
