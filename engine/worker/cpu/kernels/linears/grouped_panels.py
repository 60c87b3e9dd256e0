"""Weights in groups of inputs, each with a scale, as the tiles of `grouped_tiles` read them.

A panel is `WIDTH` output channels, as in `packed_tiles`. It is a run of blocks, each with, for all
channels of the panel:

    scales float16, [minimums float16]
    for each group: [factors int8], [minimum factors or zero points int8], steps

Steps or codes of steps are stored in planes of bits: the low 4 (or all 8) bits, then the remaining
ones. In a plane each lane has words of 32 bits with the bits of 32 / (bits of the plane) inputs.

Several tiles read a piece of a panel that one of them would unpack as often: it is unpacked for
them once, to a run of groups with

    scales float32, [minus minimums float32], signed weights (`step - middle`) in 32 bits of as
    many inputs as one instruction multiplies
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, import-untyped"
from contextlib import contextmanager
from typing import NamedTuple

from llvmlite import ir
from numba.core import cgutils

from engine.worker.cpu.intrinsics import int64
from engine.worker.cpu.kernels.dtypes import FLOAT16, INT8, load
from engine.worker.cpu.kernels.linears.code_tables import look_up
from engine.worker.cpu.kernels.linears.packed_tiles import VECTORS, WIDTH
from engine.worker.cpu.kernels.linears.tile_formats import (
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
    call,
    pointer,
    prefetch,
)
from engine.worker.weights.formats.grouped import GroupLayout

WORD = 32  # bits of a lane
SUM_BYTES = 4  # the sum of a group of x
VECTOR_BYTES = 4 * LANES


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
UNROLLED = {INT8_STEPS: 32, INT16_STEPS: 8}  # inputs that are multiplied without a loop, at most 32


class PackedGroups(NamedTuple):
    """Reads the groups of a panel."""

    builder: ir.IRBuilder
    panel: Panel
    steps: StepFormat

    @property
    def inputs_at_once(self) -> int:
        """How many are read without a loop: whole words of all planes."""
        words = max(plane.inputs for plane in self.panel.planes)
        return min(self.panel.layout.group, max(words, UNROLLED[self.steps]))

    def place(self, w, block, inner, group):
        """Where a group lies: the addresses of its block and of its own bytes."""
        start = plus(self.builder, w, block, self.panel.block_bytes)
        first = plus(self.builder, start, self.panel.scales_bytes)
        return start, plus(self.builder, first, inner, self.panel.group_bytes)

    def scale_and_minimum(self, place, v):
        """A group's scale and minus its minimum as float vectors; None if it has no minimum."""
        builder, layout = self.builder, self.panel.layout
        halves, bytes_at = (
            plus(builder, place[0], 2 * LANES * v),
            plus(builder, place[1], LANES * v),
        )
        scale, minimum = load(builder, FLOAT16, halves, LANES), None
        if layout.has_factors:
            scale = builder.fmul(scale, load(builder, INT8, bytes_at, LANES))
            bytes_at = plus(builder, bytes_at, WIDTH)
        if layout.has_minimums:
            minimum = load(builder, FLOAT16, plus(builder, halves, 2 * WIDTH), LANES)
            if layout.has_factors:
                minimum = builder.fmul(minimum, load(builder, INT8, bytes_at, LANES))
        if layout.has_zeros:
            minimum = builder.fmul(scale, load(builder, INT8, bytes_at, LANES))
        return scale, None if minimum is None else builder.fneg(minimum)

    def vectors(self, place, part):
        """The steps of `inputs_at_once` inputs, number `part` of a group: for each instruction
        the vectors of a panel's width, built when they are asked for."""
        builder, words = self.builder, dict[tuple[Plane, int, int], ir.Value]()
        starts = {
            plane: plus(
                builder,
                plus(builder, place[1], self.panel.factors_bytes + plane.at),
                part,
                4 * WIDTH * self.inputs_at_once // plane.inputs,
            )
            for plane in self.panel.planes
        }
        for number in range(self.inputs_at_once // self.steps.inputs):
            yield [self._vector(starts, words, number, v) for v in range(VECTORS)]

    def _vector(self, starts, words, number, v):
        builder, found = self.builder, None
        for plane, start in starts.items():
            word, part = divmod(number, plane.inputs // self.steps.inputs)
            key = plane, word, v
            if key not in words:
                words[key] = load_vector(builder, start, word * VECTORS + v, INT32S)
            bits = words[key]
            if part:
                bits = builder.lshr(bits, _all(plane.bits * part))
            if (plane.bits, self.steps.inputs) != (8, QUAD):
                bits = builder.and_(bits, _all(self.steps.mask(plane.bits)))
            if self.panel.layout.codes:
                bits = look_up(builder, self.panel.layout.codes, bits, WORD // self.steps.inputs)
            if plane.shift:
                bits = builder.shl(bits, _all(plane.shift))
            found = bits if found is None else builder.or_(found, bits)
        return found


class UnpackedGroups(NamedTuple):
    """Reads and writes groups that are unpacked."""

    builder: ir.IRBuilder
    panel: Panel
    steps: StepFormat

    @property
    def inputs_at_once(self) -> int:
        return UNROLLED[self.steps]

    @property
    def first_step(self) -> int:
        """The number of vectors of scales and minimums."""
        return VECTORS * (1 + self.panel.layout.has_offsets)

    @property
    def group_bytes(self) -> int:
        steps = VECTORS * self.panel.layout.group // self.steps.inputs
        return (self.first_step + steps) * VECTOR_BYTES

    def place(self, w, block, inner, group):
        """The address of a group."""
        return plus(self.builder, w, group, self.group_bytes)

    def scale_and_minimum(self, place, v):
        """A group's scale and minus its minimum as float vectors; None if it has no minimum."""
        numbers = range(v, self.first_step, VECTORS)
        found = [load_vector(self.builder, place, number, FLOATS) for number in numbers]
        return found[0], found[1] if len(found) > 1 else None

    def vectors(self, place, part):
        """The unpacked weights of a part of a group, step by step."""
        count = self.inputs_at_once // self.steps.inputs
        first = plus(self.builder, place, part, count * VECTORS * VECTOR_BYTES)
        for number in range(count):
            at = self.first_step + number * VECTORS
            yield [load_vector(self.builder, first, at + v, INT32S) for v in range(VECTORS)]

    def copy(self, packed, source, target):
        """Write a group of `PackedGroups`."""
        builder = self.builder
        for v in range(VECTORS):
            found = packed.scale_and_minimum(source, v)
            for number, vector in enumerate(found[: self.first_step // VECTORS]):
                self._store(target, number * VECTORS + v, vector)
        with each_part(builder, packed) as part:
            size = packed.inputs_at_once // self.steps.inputs * VECTORS * VECTOR_BYTES
            first = plus(builder, target, part, size)
            for number, vectors in enumerate(packed.vectors(source, part)):
                for v, vector in enumerate(vectors):
                    at = self.first_step + number * VECTORS + v
                    self._store(first, at, self._signed(vector))

    def _signed(self, steps):
        layout, lane = self.panel.layout, WORD // self.steps.inputs
        if layout.has_offsets or not layout.middle:
            return steps
        fields = ir.VectorType(ir.IntType(lane), LANES * self.steps.inputs)
        middle = ir.Constant(fields, [layout.middle] * fields.count)
        builder = self.builder
        return builder.bitcast(builder.sub(builder.bitcast(steps, fields), middle), INT32S)

    def _store(self, place, number, vector):
        at = plus(self.builder, place, number * VECTOR_BYTES)
        self.builder.store(vector, pointer(self.builder, at, vector.type), align=4)


def prefetch_group(builder, panel, ahead):
    """Prefetch a group's share of a block: a line left out would stall every block."""
    for line in range(0, panel.block_bytes // panel.layout.groups, LINE):
        prefetch(builder, plus(builder, ahead, line))


def load_vector(builder, address, number, kind):
    """Vector number `number` at an address."""
    at = plus(builder, address, number * VECTOR_BYTES)
    return builder.load(pointer(builder, at, kind), align=4)


@contextmanager
def each_part(builder, groups):
    """A loop over the inputs of a group, `inputs_at_once` each time."""
    parts = int64(groups.panel.layout.group // groups.inputs_at_once)
    with cgutils.for_range_slice(builder, int64(0), parts, int64(1)) as (part, _):
        yield part


def plus(builder, address, number, size=1):
    """An address plus `number` times `size` bytes; each may be a constant."""
    if isinstance(number, int) and isinstance(size, int):
        return builder.add(address, int64(number * size))
    number, size = (int64(each) if isinstance(each, int) else each for each in (number, size))
    return builder.add(address, builder.mul(number, size))


def _all(number):
    """An int32 in all lanes."""
    return ir.Constant(INT32S, [number] * LANES)
