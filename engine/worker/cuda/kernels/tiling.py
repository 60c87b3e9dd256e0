"""How a product is divided among thread blocks, and which products are our Triton kernel's.

A decode step is as fast as its weights are read. Up to 64 rows our kernel reads weights of 8 bits
fastest, whose scales it applies as well: measured on an H200 for the shapes in
examples/benchmarks/results/gpu/h200/gemm.json. Products with float weights were measured there
between other kernels of ours, each launched while the one before still runs (`dependent`), for
Llama-3.1-8B. Most smaller weights are torch's, as in the first measurement, and so are more than 64
rows, for which our kernel was up to 25 % slower. The tilings of 4-bit weights follow from their
compiled kernels, and are not measured: wide tiles take the fewest instructions per weight, and
splits give each multiprocessor several blocks.
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
WIDE = Tiling(16, 64, 128, 1, 4, 4)
MIDDLE = Tiling(16, 64, 128, 2, 4, 4)  # float weights
NARROW = Tiling(16, 32, 128, 4, 4, 5)
MORE_ROWS_WIDE = Tiling(64, 128, 64, 1, 4, 4)
MORE_ROWS_LONG = Tiling(64, 64, 64, 4, 4, 5)
GATED = Tiling(16, 64, 128, 1, 4, 3)  # outputs of each factor
MORE_ROWS_GATED = Tiling(64, 64, 64, 1, 4, 4)
NARROW_8_BIT = Tiling(16, 64, 128, 4, 4, 4)
MANY_ROWS_8_BIT = Tiling(64, 64, 128, 2, 4, 4)
FIXED_4_BIT = Tiling(64, 64, 128, 1, 4, 3)  # every product's in batch-invariant mode; experts'
FEW_ROWS_4_BIT = Tiling(16, 128, 128, 1, 4, 4)  # experts'
WIDE_4_BIT = Tiling(16, 128, 128, 2, 4, 4)
NARROW_4_BIT = Tiling(16, 128, 128, 8, 4, 4)
MAX_BLOCKS_4_BIT = 4  # blocks of rows; to decode for more takes longer than to unpack once
FIXED_FP8 = Tiling(64, 64, 64, 1, 4, 4)  # FIXED for weights that are widened in registers
MORE_ROWS_FP8 = Tiling(128, 64, 64, 1, 8, 4)
MAX_ROWS_FP8 = 256  # torch multiplies more rows with weights that it has widened
MIN_WIDE = 16384  # outputs from which on there are enough blocks without splits
MIN_MIDDLE = 6144  # outputs from which on two splits give enough of them
MIN_NARROW, MIN_INPUTS = 4096, 3072  # the least outputs and inputs of float weights that are ours
MIN_LONG = 8192  # inputs that are worth splitting with more than 16 rows


def tiling_of(rows: int, weight: Tensor) -> Tiling | None:
    """The tiling of a product of so many rows with a weight `[outputs, width]`; None: torch."""
    outputs, width = weight.shape
    if weight.itemsize > 1:
        return _float_tiling(rows, outputs, width)
    if rows <= WIDE.block_m:
        return WIDE if outputs >= MIN_WIDE else NARROW_8_BIT
    return MANY_ROWS_8_BIT if rows <= MANY_ROWS_8_BIT.block_m else None


def _float_tiling(rows: int, outputs: int, width: int) -> Tiling | None:
    """That of a float weight."""
    is_wide, is_few = outputs >= MIN_WIDE, rows <= WIDE.block_m
    if is_few and is_wide:
        return WIDE
    if outputs < MIN_NARROW or width < MIN_INPUTS or rows > MORE_ROWS_WIDE.block_m:
        return None
    if is_few:
        return MIDDLE if outputs >= MIN_MIDDLE else NARROW
    return MORE_ROWS_WIDE if is_wide else MORE_ROWS_LONG if width >= MIN_LONG else None


def gated_tiling(rows: int, outputs: int) -> Tiling | None:
    """The tiling of a gated product of so many rows with a float weight, whose outputs are those of
    both factors; None: a product and a gate."""
    if outputs < MIN_WIDE or rows > MORE_ROWS_GATED.block_m:
        return None
    return GATED if rows <= GATED.block_m else MORE_ROWS_GATED


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
    measured: up to 64 rows it is that of 8-bit rows."""
    if rows <= WIDE.block_m:
        return WIDE if outputs >= MIN_WIDE else NARROW_8_BIT
    if rows <= MANY_ROWS_8_BIT.block_m:
        return MANY_ROWS_8_BIT
    return MORE_ROWS_FP8 if rows <= MAX_ROWS_FP8 else None
