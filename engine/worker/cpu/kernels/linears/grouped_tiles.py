"""The register tile of a linear layer over the groups of `grouped_panels`.

For each group a row of x holds the sum of the group's inputs and then the inputs. Without minimums
the sum is an int32, multiplied by `-middle`, at which the sums of a group start: so steps are
multiplied as unsigned numbers. Weights that were unpacked first are signed. With minimums the sum
is a float32, which is multiplied by the group's minimum.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, import-untyped"
from contextlib import contextmanager

from llvmlite import ir
from numba.core import cgutils

from engine.worker.cpu.intrinsics import FLOAT, INT32, int64
from engine.worker.cpu.kernels.linears.avx2_groups import build_avx2_rows, suits_avx2
from engine.worker.cpu.kernels.linears.grouped_panels import (
    INT16_STEPS,
    SUM_BYTES,
    PackedGroups,
    Panel,
    UnpackedGroups,
    each_part,
    plus,
    prefetch_group,
)
from engine.worker.cpu.kernels.linears.packed_tiles import (
    INT8,
    SUMS_BYTES,
    VECTORS,
    WIDTH,
    add_function,
    call_tile,
    make_intrinsic,
    make_tile,
    pinned,
)
from engine.worker.cpu.kernels.vectors import (
    FLOATS,
    INT32S,
    LANES,
    LINE,
    broadcast,
    fma,
    pointer,
)

DEPTH = 1024  # so many products along k are added up at once
PACKED_ROWS = 4  # at most, of a tile that unpacks weights in registers
UNPACKED_ROWS = 3  # at least, of a tile over unpacked weights


def max_rows(steps):
    """The most rows of a tile."""
    return 6 if LANES == 16 or steps is INT16_STEPS else 4


def min_tiles(layout):
    """For so many tiles at least weights are unpacked first.

    On a core of Zen 3 int4 in L1 made 119 GOP/s with 4 rows that unpack in registers, q6_k 79.
    Unpacked first, both made less than 93 with 4 rows, and at least 132 and 116 with 48.
    """
    return 3 if layout.bits in (4, 8) and not layout.codes else 2


def make_grouped_tile(layout, steps):
    """`sums[m, n] = sum over k of x[m, k] * w[k, n]` in float32, with integer sums in each group.

    The `groups` of its operands are blocks of the layout.
    """
    name, panel = f"tile_{layout.name}_{steps.inputs}", Panel(layout)
    if steps is not INT16_STEPS:
        return make_tile(name, max_rows(steps), _build_rows(PackedGroups, panel, steps))

    def build(builder, tile):
        are_many = builder.icmp_signed(">=", tile.tiles, int64(min_tiles(layout)))
        least = builder.select(are_many, int64(UNPACKED_ROWS), int64(PACKED_ROWS + 1))
        with builder.if_else(builder.icmp_signed(">=", tile.rows, least)) as (many, few):
            with many:
                unpacked, rows = _unpack(builder, panel, steps, name, tile), max_rows(steps)
                build = build_avx2_rows if suits_avx2(layout) else _build
                build_rows = _build_rows(UnpackedGroups, panel, steps, build)
                numbers = range(UNPACKED_ROWS, rows + 1)
                call_tile(builder, f"{name}_unpacked", numbers, build_rows, unpacked)
            with few:
                build_rows = _build_rows(PackedGroups, panel, steps)
                call_tile(builder, name, range(1, PACKED_ROWS + 1), build_rows, tile)

    return make_intrinsic(build)


def _build(builder, groups, tile, rows):
    _Tile(groups, tile, rows).build()


def _build_rows(groups, panel, steps, build=_build):
    def build_rows(builder, tile, rows):
        build(builder, groups(builder, panel, steps), tile, rows)

    return build_rows


def _unpack(builder, panel, steps, name, tile):
    """The tile over unpacked weights, which stay for the next tile; whose they are is behind the
    sums."""
    size = UnpackedGroups(builder, panel, steps).group_bytes * (DEPTH // panel.layout.group)
    with builder.goto_entry_block():
        memory = builder.alloca(ir.ArrayType(INT8, size))
    memory.align = LINE
    address = builder.ptrtoint(memory, tile.w.type)
    last = pointer(builder, plus(builder, tile.sums, SUMS_BYTES), tile.w.type)

    def build_unpack(builder, tile, rows):
        packed = PackedGroups(builder, panel, steps)
        unpacked = UnpackedGroups(builder, panel, steps)
        with _each_group(builder, panel.layout, tile.groups) as numbers:
            unpacked.copy(
                packed, packed.place(tile.w, *numbers), unpacked.place(tile.sums, *numbers)
            )

    unpack = add_function(builder.module, f"{name}_unpack", 0, build_unpack)
    with builder.if_then(builder.icmp_signed("!=", builder.load(last), tile.w)):
        builder.store(tile.w, last)
        builder.call(unpack, tile._replace(sums=address))
    end = plus(builder, tile.w, tile.groups, panel.block_bytes)
    is_read = builder.icmp_signed("<", tile.ahead, end)
    return tile._replace(w=address, ahead=builder.select(is_read, end, tile.ahead))


@contextmanager
def _each_group(builder, layout, blocks):
    """A loop over the groups of some blocks: the block's number, and the group's in it and in
    all."""
    with cgutils.for_range_slice(builder, int64(0), blocks, int64(1)) as (block, _):
        first, groups = builder.mul(block, int64(layout.groups)), int64(layout.groups)
        with cgutils.for_range_slice(builder, int64(0), groups, int64(1)) as (inner, _):
            yield block, inner, builder.add(first, inner)


class _Tile:
    """Builds the code of a tile for one number of rows."""

    def __init__(self, source, tile, rows):
        """`source` is `PackedGroups` or `UnpackedGroups`."""
        self.builder, self.source, self.tile = source.builder, source, tile
        self.layout, self.steps = source.panel.layout, source.steps
        self.lines = [plus(self.builder, tile.x, m, tile.x_stride) for m in range(rows)]
        zero = ir.Constant(FLOATS, [0.0] * LANES)
        self.totals = self._variables(zero)
        self.sums = self._variables(ir.Constant(INT32S, [0] * LANES))

    def _variables(self, start):
        return [
            [cgutils.alloca_once_value(self.builder, start) for _ in range(VECTORS)]
            for _ in self.lines
        ]

    def build(self):
        builder, tile = self.builder, self.tile
        x_bytes = self.steps.x_group_bytes(self.layout.group)
        ahead_step = builder.udiv(tile.ahead_step, int64(self.layout.groups))
        with _each_group(builder, self.layout, tile.groups) as numbers:
            group = numbers[-1]
            prefetch_group(builder, self.source.panel, plus(builder, tile.ahead, group, ahead_step))
            lines = [plus(builder, line, group, x_bytes) for line in self.lines]
            self._add_group(self.source.place(tile.w, *numbers), lines)
        for m, row in enumerate(self.totals):
            for v, one in enumerate(row):
                target = plus(builder, tile.sums, (m * WIDTH + v * LANES) * 4)
                builder.store(builder.load(one), pointer(builder, target, FLOATS), align=4)

    def _add_group(self, place, lines):
        """Add one group to the totals of all rows."""
        builder = self.builder
        self._start_sums(lines)
        with each_part(builder, self.source) as part:
            x_bytes = 4 * self.source.inputs_at_once // self.steps.inputs
            self._add_inputs(place, part, [plus(builder, line, part, x_bytes) for line in lines])
        for v in range(VECTORS):
            scale, minimum = self.source.scale_and_minimum(place, v)
            for totals, sums, line in zip(self.totals, self.sums, lines, strict=True):
                number = builder.sitofp(builder.load(sums[v]), FLOATS)
                total = fma(builder, number, scale, builder.load(totals[v]))
                if minimum is not None:
                    total = fma(builder, self._load_sum(line, FLOAT), minimum, total)
                builder.store(total, totals[v])

    def _load_sum(self, line, kind):
        builder = self.builder
        return broadcast(builder, builder.load(pointer(builder, line, kind), align=4))

    def _start_sums(self, lines):
        zero = ir.Constant(INT32S, [0] * LANES)
        are_signed = isinstance(self.source, UnpackedGroups) or self.layout.has_offsets
        for line, row in zip(lines, self.sums, strict=True):
            start = zero if are_signed else self._load_sum(line, INT32)
            for one in row:
                self.builder.store(start, one)

    def _add_inputs(self, place, part, lines):
        """Multiply some inputs into the sums of a group."""
        builder, in_order = self.builder, self.steps is INT16_STEPS
        for number, vectors in enumerate(self.source.vectors(place, part)):
            for line, row in zip(lines, self.sums, strict=True):
                address = plus(builder, line, SUM_BYTES + 4 * number)
                x = broadcast(builder, builder.load(pointer(builder, address, INT32), align=4))
                for vector, one in zip(vectors, row, strict=True):
                    added = self.steps.add(builder, builder.load(one), vector, x)
                    builder.store(pinned(builder, added, in_order=in_order), one)
