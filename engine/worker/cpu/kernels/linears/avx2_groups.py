"""The register tile over unpacked groups for AVX2 without VNNI, a group of inputs in assembly.

The sums of 6 rows, 2 vectors of weights, an input and a product take all 16 registers. LLVM needs
more for a whole group without a loop, and with a loop the first products of a group are added to
zeros. Totals in float32 stay where the tile's results are written: at the end of a group there are
three instructions for each of them.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, import-untyped"
import llvmlite.binding
from llvmlite import ir
from numba.core import cgutils

from engine.worker.cpu.features import has
from engine.worker.cpu.intrinsics import int64
from engine.worker.cpu.kernels.linears.grouped_panels import (
    SUM_BYTES,
    VECTOR_BYTES,
    plus,
    prefetch_group,
)
from engine.worker.cpu.kernels.linears.packed_tiles import VECTORS
from engine.worker.cpu.kernels.linears.tile_formats import PAIR_SUMS
from engine.worker.cpu.kernels.vectors import FLOATS, INSTRUCTIONS, LANES, pointer

# Inputs whose code is not a loop. Of LLVM's time 64 rows took 0.98 with zero points and groups of
# 64, 1.01 without; with groups of 128 1.08, as their instructions no longer stay in the caches.
MAX_GROUP = 64
HAS_AVX2_GROUPS = INSTRUCTIONS == "AVX2" and PAIR_SUMS is None and has("fma")
if HAS_AVX2_GROUPS:
    llvmlite.binding.initialize_native_asmparser()

REGISTERS = [f"%ymm{number}" for number in range(16)]
*SUMS, FIRST, SECOND, X, PRODUCT = REGISTERS  # FIRST, SECOND: a panel's weights, then its scales


def suits_avx2(layout):
    """Whether this CPU's tile over unpacked groups of a layout is `build_avx2_rows`."""
    return HAS_AVX2_GROUPS and layout.group <= MAX_GROUP


def build_avx2_rows(builder, groups, tile, rows):
    """The tile of `grouped_tiles` over `UnpackedGroups` with int16 inputs, for a number of rows."""
    panel, lines = groups.panel, [plus(builder, tile.x, m, tile.x_stride) for m in range(rows)]
    for number in range(rows * VECTORS):
        target = pointer(builder, plus(builder, tile.sums, number * VECTOR_BYTES), FLOATS)
        builder.store(ir.Constant(FLOATS, [0.0] * LANES), target, align=4)
    text, x_bytes = _group(groups, rows), groups.steps.x_group_bytes(panel.layout.group)
    constraints = ["r"] * (2 + rows) + [f"~{{{name[1:]}}}" for name in REGISTERS] + ["~{memory}"]
    kind = ir.FunctionType(ir.VoidType(), [tile.w.type] * (2 + rows))
    count = builder.mul(tile.groups, int64(panel.layout.groups))
    ahead_step = builder.udiv(tile.ahead_step, int64(panel.layout.groups))
    with cgutils.for_range_slice(builder, int64(0), count, int64(1)) as (group, _):
        prefetch_group(builder, panel, plus(builder, tile.ahead, group, ahead_step))
        places = [groups.place(tile.w, None, None, group), tile.sums]
        places += [plus(builder, line, group, x_bytes) for line in lines]
        builder.asm(kind, text, ",".join(constraints), places, side_effect=True)


def _group(groups, rows):
    """A group's products, added to the totals of all rows. The operands are the addresses of the
    group, of the totals, and of the group in each row of x."""
    layout, lines = groups.panel.layout, [f"${2 + m}" for m in range(rows)]
    found = []
    for number in range(layout.group // groups.steps.inputs):
        at = (groups.first_step + number * VECTORS) * VECTOR_BYTES
        found += [f"vmovdqu {at}($0), {FIRST}", f"vmovdqu {at + VECTOR_BYTES}($0), {SECOND}"]
        for m, line in enumerate(lines):
            found += [f"vpbroadcastd {SUM_BYTES + 4 * number}({line}), {X}"]
            found += _products(*SUMS[m * VECTORS : (m + 1) * VECTORS], is_first=number == 0)
    found += [f"vmovups ($0), {FIRST}", f"vmovups {VECTOR_BYTES}($0), {SECOND}"]
    for m, line in enumerate(lines):
        if layout.has_offsets:
            found += [f"vbroadcastss ({line}), {X}"]
        for v, scale in enumerate((FIRST, SECOND)):
            total, at = SUMS[m * VECTORS + v], (m * VECTORS + v) * VECTOR_BYTES
            found += [f"vcvtdq2ps {total}, {total}", f"vfmadd213ps {at}($1), {scale}, {total}"]
            if layout.has_offsets:
                found += [f"vfmadd231ps {(VECTORS + v) * VECTOR_BYTES}($0), {X}, {total}"]
            found += [f"vmovups {total}, {at}($1)"]
    return "\n".join(found)


def _products(one, other, *, is_first):
    """An input of a row, times the weights of both vectors of a panel."""
    if is_first:
        return [f"vpmaddwd {FIRST}, {X}, {one}", f"vpmaddwd {SECOND}, {X}, {other}"]
    return [
        f"vpmaddwd {FIRST}, {X}, {PRODUCT}",
        f"vpmaddwd {SECOND}, {X}, {X}",
        f"vpaddd {PRODUCT}, {one}, {one}",
        f"vpaddd {X}, {other}, {other}",
    ]
