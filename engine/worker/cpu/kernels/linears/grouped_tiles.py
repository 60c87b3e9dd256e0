"""The register tile of a linear layer over weights in groups of inputs, each with a scale.

A panel is `WIDTH` output channels, as in `packed_tiles`. It is a run of blocks, each with, for all
channels of the panel:

    scales float16, [minimums float16]
    for each group: [factors int8], [minimum factors or zero points int8], steps

Steps or codes of steps are stored in planes of bits: the low 4 (or all 8) bits, then the remaining
ones. In a plane each lane has words of 32 bits with the bits of 32 / (bits of the plane) inputs.
For each group a row of x holds the sum of the group's inputs and then the inputs. Without minimums
the sum is an int32, multiplied by `-middle`, at which the sums of a group start: so steps are
multiplied as unsigned numbers. With minimums the sum is a float32, which is multiplied by the
group's minimum.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, import-untyped"
from typing import NamedTuple

from llvmlite import ir
from numba.core import cgutils

from engine.worker.cpu.intrinsics import FLOAT, INT32, int64
from engine.worker.cpu.kernels.dtypes import FLOAT16, INT8, load
from engine.worker.cpu.kernels.linears.code_tables import look_up
from engine.worker.cpu.kernels.linears.packed_tiles import VECTORS, WIDTH, make_tile, pinned
from engine.worker.cpu.kernels.linears.tile_formats import (
    HAS_VNNI,
    INT16S,
    PAIR,
    QUAD,
    QUAD_SUMS,
    add_fields,
    add_int16_pairs,
)
from engine.worker.cpu.kernels.vectors import (
    FLOATS,
    INT32S,
    LANES,
    LINE,
    broadcast,
    call,
    fma,
    pointer,
    prefetch,
)
from engine.worker.weights.formats.grouped import GroupLayout

WORD = 32  # bits of a lane
INPUTS_AT_ONCE = 32  # inputs of a group that are multiplied without a loop
SUM_BYTES = 4  # the sum of a group of x
MAX_ROWS = 6 if LANES == 16 else 4


class Plane(NamedTuple):
    """Some bits of each step of a group."""

    bits: int
    shift: int  # the position of these bits in the step
    at: int  # bytes after the start of the group's steps

    @property
    def inputs(self) -> int:
        """Whose bits one word has."""
        return WORD // self.bits


class Panel(NamedTuple):
    """Byte offsets in a panel."""

    layout: GroupLayout

    @property
    def scales_bytes(self) -> int:
        """Bytes of scales and minimums, at the start of a block."""
        return 2 * WIDTH * (1 + self.layout.has_minimums)

    @property
    def factors_bytes(self) -> int:
        """Bytes of factors and zero points, at the start of a group."""
        one = self.layout
        return WIDTH * (one.has_factors * (1 + one.has_minimums) + one.has_zeros)

    @property
    def group_bytes(self) -> int:
        return self.factors_bytes + self.layout.group * self.layout.bits * WIDTH // 8

    @property
    def block_bytes(self) -> int:
        return self.scales_bytes + self.layout.groups * self.group_bytes

    @property
    def planes(self) -> tuple[Plane, ...]:
        bits, group = self.layout.bits, self.layout.group
        if bits in (4, 8):
            return (Plane(bits, 0, 0),)
        return Plane(4, 0, 0), Plane(bits - 4, 4, group * WIDTH // 2)


class StepFormat(NamedTuple):
    """How the steps of a lane are multiplied by x."""

    inputs: int  # multiplied by one instruction, which have 32 bits in x
    add: object  # `(builder, sums, steps, x) -> sums`

    def mask(self, bits: int) -> int:
        """A mask of the lowest bits of each field of a lane."""
        field = WORD // self.inputs
        return sum(((1 << bits) - 1) << at for at in range(0, WORD, field))

    def x_group_bytes(self, group: int) -> int:
        return SUM_BYTES + group * 4 // self.inputs


def _add_quads(builder, sums, steps, x):
    """Four unsigned steps times int8 inputs."""
    if QUAD_SUMS is None:
        return add_fields(builder, sums, x, steps, 4, builder.lshr)
    return call(builder, QUAD_SUMS, INT32S, sums, steps, x)


def _add_pairs(builder, sums, steps, x):
    """Two steps times int16 inputs."""
    return add_int16_pairs(builder, sums, builder.bitcast(steps, INT16S), x)


INT8_STEPS = StepFormat(QUAD, _add_quads)
INT16_STEPS = StepFormat(PAIR, _add_pairs)
FASTEST = INT8_STEPS if HAS_VNNI else INT16_STEPS


def make_grouped_tile(layout, steps):
    """`sums[m, n] = sum over k of x[m, k] * w[k, n]` in float32, with integer sums in each group.

    The `groups` of its operands are blocks of the layout.
    """

    def build_rows(builder, tile, rows):
        _Tile(builder, layout, steps, tile, rows).build()

    return make_tile(f"tile_{layout.name}_{steps.inputs}", MAX_ROWS, build_rows)


class _Tile:
    """Builds the code of a tile for one number of rows."""

    def __init__(self, builder, layout, steps, tile, rows):
        self.builder, self.layout, self.steps, self.tile = builder, layout, steps, tile
        self.panel = Panel(layout)
        self.lines = [self.plus(tile.x, builder.mul(tile.x_stride, int64(m))) for m in range(rows)]
        zero = ir.Constant(FLOATS, [0.0] * LANES)
        self.totals = self._variables(zero)
        self.sums = self._variables(ir.Constant(INT32S, [0] * LANES))

    def _variables(self, start):
        return [
            [cgutils.alloca_once_value(self.builder, start) for _ in range(VECTORS)]
            for _ in self.lines
        ]

    def plus(self, address, offset):
        """An address plus a number of bytes."""
        return self.builder.add(address, int64(offset) if isinstance(offset, int) else offset)

    def build(self):
        builder, layout, tile = self.builder, self.layout, self.tile
        x_bytes = self.steps.x_group_bytes(layout.group)
        ahead_step = builder.udiv(tile.ahead_step, int64(layout.groups))
        with cgutils.for_range_slice(builder, int64(0), tile.groups, int64(1)) as (number, _):
            block = self.plus(tile.w, builder.mul(number, int64(self.panel.block_bytes)))
            first = self.plus(block, self.panel.scales_bytes)
            of_block = builder.mul(number, int64(layout.groups))
            with cgutils.for_range_slice(builder, int64(0), int64(layout.groups), int64(1)) as (
                inner,
                _,
            ):
                group = builder.add(of_block, inner)
                self._prefetch(self.plus(tile.ahead, builder.mul(group, ahead_step)))
                shift = builder.mul(group, int64(x_bytes))
                at = self.plus(first, builder.mul(inner, int64(self.panel.group_bytes)))
                self._add_group(block, at, [self.plus(line, shift) for line in self.lines])
        for m, row in enumerate(self.totals):
            for v, one in enumerate(row):
                target = self.plus(tile.sums, (m * WIDTH + v * LANES) * 4)
                builder.store(builder.load(one), pointer(builder, target, FLOATS), align=4)

    def _prefetch(self, ahead):
        """Prefetch a group's share of a block: a line left out would stall every block."""
        for line in range(0, self.panel.block_bytes // self.layout.groups, LINE):
            prefetch(self.builder, self.plus(ahead, line))

    def _add_group(self, block, group, lines):
        """Add one group to the totals of all rows."""
        builder, layout = self.builder, self.layout
        self._start_sums(lines)
        steps_at = self.plus(group, self.panel.factors_bytes)
        if layout.group <= INPUTS_AT_ONCE:
            self._add_inputs(steps_at, lines, layout.group)
        else:
            steps_bytes, x_bytes = INPUTS_AT_ONCE * WIDTH // 2, 4 * INPUTS_AT_ONCE
            with cgutils.for_range_slice(
                builder, int64(0), int64(layout.group // INPUTS_AT_ONCE), int64(1)
            ) as (part, _):
                at = self.plus(steps_at, builder.mul(part, int64(steps_bytes)))
                shift = builder.mul(part, int64(x_bytes // self.steps.inputs))
                self._add_inputs(at, [self.plus(line, shift) for line in lines], INPUTS_AT_ONCE)
        for v in range(VECTORS):
            scale, minimum = self._scale_and_minimum(block, group, v)
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
        for line, row in zip(lines, self.sums, strict=True):
            zero = ir.Constant(INT32S, [0] * LANES)
            start = zero if self.layout.has_offsets else self._load_sum(line, INT32)
            for one in row:
                self.builder.store(start, one)

    def _scale_and_minimum(self, block, group, v):
        """A group's scale and minimum as float vectors; the minimum is negative, or None if there
        is none."""
        builder, layout = self.builder, self.layout
        halves = self.plus(block, 2 * LANES * v)
        bytes_at = self.plus(group, LANES * v)
        scale, minimum = load(builder, FLOAT16, halves, LANES), None
        if layout.has_factors:
            scale = builder.fmul(scale, load(builder, INT8, bytes_at, LANES))
            bytes_at = self.plus(bytes_at, WIDTH)
        if layout.has_minimums:
            minimum = load(builder, FLOAT16, self.plus(halves, 2 * WIDTH), LANES)
            if layout.has_factors:
                minimum = builder.fmul(minimum, load(builder, INT8, bytes_at, LANES))
        if layout.has_zeros:
            minimum = builder.fmul(scale, load(builder, INT8, bytes_at, LANES))
        return scale, None if minimum is None else builder.fneg(minimum)

    def _add_inputs(self, steps_at, lines, inputs):
        """Multiply `inputs` inputs into the sums of a group."""
        builder, words = self.builder, dict[tuple[Plane, int, int], ir.Value]()
        for number in range(inputs // self.steps.inputs):
            vectors = [self._steps(steps_at, words, number, v) for v in range(VECTORS)]
            for line, row in zip(lines, self.sums, strict=True):
                address = self.plus(line, SUM_BYTES + 4 * number)
                x = broadcast(builder, builder.load(pointer(builder, address, INT32), align=4))
                for vector, one in zip(vectors, row, strict=True):
                    added = self.steps.add(builder, builder.load(one), vector, x)
                    builder.store(pinned(builder, added), one)

    def _steps(self, steps_at, words, number, v):
        """The steps that instruction `number` of a group multiplies; `words` are those loaded."""
        builder, found = self.builder, None
        for plane in self.panel.planes:
            word, part = divmod(number, plane.inputs // self.steps.inputs)
            key = plane, word, v
            if key not in words:
                at = self.plus(steps_at, plane.at + 4 * (word * WIDTH + v * LANES))
                words[key] = builder.load(pointer(builder, at, INT32S), align=4)
            bits = words[key]
            if part:
                bits = builder.lshr(bits, _all(plane.bits * part))
            if (plane.bits, self.steps.inputs) != (8, QUAD):
                bits = builder.and_(bits, _all(self.steps.mask(plane.bits)))
            if self.layout.codes:
                bits = look_up(builder, self.layout.codes, bits, WORD // self.steps.inputs)
            if plane.shift:
                bits = builder.shl(bits, _all(plane.shift))
            found = bits if found is None else builder.or_(found, bits)
        return found


def _all(number):
    """An int32 in all lanes."""
    return ir.Constant(INT32S, [number] * LANES)
