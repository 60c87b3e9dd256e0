"""How a product is divided among thread blocks, and which products are our Triton kernel's.

A decode step is as fast as its weights are read. Up to 64 rows our kernel reads the weights of a
Llama of 8B fastest in float and in 8 bits, whose scales it applies as well, and computes gates for
up to 128: measured on an H200, examples/benchmarks/results/gpu/h200/products.json. Wide tiles of
outputs matter because every tile reads all rows of x from the L2 cache. Smaller float weights are
torch's, and so are more rows. The tilings of 4-bit weights follow from their compiled kernels, and
are not measured: wide tiles take the fewest instructions per weight, and splits give each
multiprocessor several blocks.
"""

from dataclasses import astuple, dataclass, replace

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Tiling:
    """Rows, outputs and inner elements of a tile, and how its program is compiled.

    The inner dimension is divided among `splits` programs. The order of sums, and so the result,
    depends on `block_k` and `splits` only.
    """

    block_m: int
    block_n: int
    block_k: int
    splits: int
    num_warps: int
    num_stages: int

    def __str__(self) -> str:
        return "x".join(map(str, astuple(self)))


FIXED = Tiling(64, 128, 64, 1, 4, 4)  # every product's in batch-invariant mode
WIDE = Tiling(16, 64, 128, 1, 4, 4)  # float weights
MIDDLE = Tiling(16, 64, 128, 2, 4, 4)
NARROW = Tiling(16, 128, 128, 4, 4, 4)
LONG = Tiling(16, 64, 128, 4, 4, 5)
MORE_ROWS_WIDE = Tiling(64, 128, 64, 1, 4, 4)
MORE_ROWS_MIDDLE = Tiling(64, 64, 128, 1, 4, 4)
MORE_ROWS_NARROW = Tiling(64, 64, 128, 2, 4, 4)
MORE_ROWS_LONG = Tiling(64, 128, 128, 4, 4, 4)
GATED = Tiling(16, 128, 128, 1, 8, 3)  # outputs of each factor
MORE_ROWS_GATED = Tiling(64, 64, 64, 1, 4, 4)
MANY_ROWS_GATED = Tiling(128, 128, 64, 1, 8, 4)
EIGHT_BIT = Tiling(16, 64, 256, 1, 4, 3)  # with more splits for fewer outputs
MORE_ROWS_8_BIT = Tiling(64, 64, 128, 1, 4, 5)
FIXED_4_BIT = Tiling(64, 64, 128, 1, 4, 3)  # every product's in batch-invariant mode; experts'
FEW_ROWS_4_BIT = Tiling(16, 128, 128, 1, 4, 4)  # experts'
WIDE_4_BIT = Tiling(16, 128, 128, 2, 4, 4)
NARROW_4_BIT = Tiling(16, 128, 128, 8, 4, 4)
MAX_BLOCKS_4_BIT = 4  # blocks of rows; to decode for more takes longer than to unpack once
FIXED_FP8 = Tiling(64, 64, 64, 1, 4, 4)  # FIXED for weights that are widened in registers
NARROW_FP8 = Tiling(16, 64, 128, 4, 4, 4)
MIDDLE_FP8 = Tiling(64, 64, 128, 2, 4, 4)
MORE_ROWS_FP8 = Tiling(128, 64, 64, 1, 8, 4)
MAX_ROWS_FP8 = 256  # torch multiplies more rows with weights that it has widened
MIN_WIDE = 16384  # outputs from which on there are enough blocks without splits
MIN_MIDDLE = 6144  # outputs from which on two splits give enough of them
MIN_NARROW, MIN_INPUTS = 4096, 3072  # the least outputs and inputs of float weights that are ours
MIN_LONG = 8192  # inputs from which on more splits pay


def has_room(capability: tuple[int, int]) -> bool:
    """Whether a GPU takes all tilings, and loads tiles by itself: Hopper, and Blackwell for data
    centers. Others have less shared memory, and older ones would wait for each tile."""
    return capability[0] in (9, 10)


def tiling_of(rows: int, weight: Tensor) -> Tiling | None:
    """The tiling of a product of so many rows with a weight `[outputs, width]`; None: torch."""
    outputs, width = weight.shape
    is_wide, is_long = outputs >= MIN_WIDE, width >= MIN_LONG
    if rows > MORE_ROWS_WIDE.block_m:
        return None
    if weight.itemsize > 1:
        return _float_tiling(rows, outputs, width)
    tiling = EIGHT_BIT if rows <= EIGHT_BIT.block_m else MORE_ROWS_8_BIT
    return replace(tiling, splits=1 if is_wide else 4 if is_long else 2)


def _float_tiling(rows: int, outputs: int, width: int) -> Tiling | None:
    """That of a float weight."""
    is_wide, is_few = outputs >= MIN_WIDE, rows <= WIDE.block_m
    if is_few and is_wide:
        return WIDE
    if outputs < MIN_NARROW or width < MIN_INPUTS:
        return None
    if is_wide:
        return MORE_ROWS_WIDE
    if outputs >= MIN_MIDDLE:
        return MIDDLE if is_few else MORE_ROWS_MIDDLE
    if width >= MIN_LONG:
        return LONG if is_few else MORE_ROWS_LONG
    return NARROW if is_few else MORE_ROWS_NARROW


def gated_tiling(rows: int, outputs: int) -> Tiling | None:
    """The tiling of a gated product of so many rows with a float weight, whose outputs are those of
    both factors; None: a product and a gate."""
    if outputs < MIN_WIDE:
        return None
    tilings = GATED, MORE_ROWS_GATED, MANY_ROWS_GATED
    return next((each for each in tilings if rows <= each.block_m), None)


def four_bit_tiling(rows: int, outputs: int) -> Tiling | None:
    """The tiling of a product of so many rows with a 4-bit weight; None: it is unpacked."""
    is_wide, blocks = outputs >= MIN_WIDE, -(-rows // FIXED_4_BIT.block_m)
    if rows <= WIDE_4_BIT.block_m:
        return WIDE_4_BIT if is_wide else NARROW_4_BIT
    if blocks > MAX_BLOCKS_4_BIT:
        return None
    return replace(FIXED_4_BIT, splits=1 if is_wide else MAX_BLOCKS_4_BIT // blocks)


def expert_tiling(rows: int, experts: int) -> Tiling:
    """The tiling of products of so many rows with 4-bit weights of experts that share them."""
    return FEW_ROWS_4_BIT if rows <= FEW_ROWS_4_BIT.block_m * experts else FIXED_4_BIT


def fp8_weight_tiling(rows: int, outputs: int) -> Tiling | None:
    """The tiling of a product of so many 16-bit rows with an fp8 weight; None: torch. It was not
    measured."""
    if rows <= WIDE.block_m:
        return WIDE if outputs >= MIN_WIDE else NARROW_FP8
    if rows <= MIDDLE_FP8.block_m:
        return MIDDLE_FP8
    return MORE_ROWS_FP8 if rows <= MAX_ROWS_FP8 else None
