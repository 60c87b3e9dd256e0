"""Packs rows of blocks, the bytes of a `BlockFormat`, into the panels of `grouped_panels`.

A chunk is the part of a panel that its rows are in. The steps of a block are first spread to a byte
each, eight in an int64 at a time.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
import ctypes
from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np

from engine.worker.cpu.build import leaf
from engine.worker.cpu.intrinsics import int8s, int16s, int32s, int64s
from engine.worker.cpu.kernels.linears.grouped_linear import ACTIVATION_BITS
from engine.worker.cpu.kernels.linears.grouped_panels import WORD, Panel, StepFormat
from engine.worker.cpu.kernels.linears.packed_tiles import WIDTH
from engine.worker.cpu.kernels.linears.tile_formats import QUAD
from engine.worker.cpu.operands import make_reader, operands
from engine.worker.weights.formats.blocks import Bits, BlockFormat, Factors
from engine.worker.weights.formats.mxfp4 import BIAS, LARGEST, SMALLEST

EACH_BYTE = 0x0101010101010101
HALF_BIAS, HALF_FRACTION = 15, 10  # the exponents of float16, and the bits of its fraction
FACTORS = tuple(Factors)
OF_Q2_K, OF_Q3_K, OF_Q4_K, OF_IQ4_XS = range(1, len(FACTORS))
FORMAT: Any = None  # the `_Format` that a kernel is made for


@operands
class GroupPackingOperands(ctypes.Structure):
    """Rows of blocks, and the panels of which they become rows `first` and following."""

    x: int
    x_stride: int  # bytes
    rows: int
    first: int
    blocks: int  # in a row
    y: int
    steps: int  # uint8 [threads, block], for the steps of a block
    lacks_scales: int  # set where float16 lacks a scale


_read_operands = make_reader(GroupPackingOperands)
_LACKS_SCALES = GroupPackingOperands.lacks_scales.offset  # type: ignore[attr-defined]


class _Format(NamedTuple):
    """The constants of a kernel: a `BlockFormat` and the panels that it becomes; 0 bits are none.

    Bytes of x are those of a block, bytes of y those of a block of a panel.
    """

    x_bytes: int
    group: int
    groups: int
    scale: int
    has_exponents: bool
    has_minimums: bool
    negates_minimums: bool
    factors: int
    arrays: int  # int8 for each group: factors, factors of minimums or zero points
    factors_in: int  # the number of the `Factors`
    low: Bits
    high: Bits
    flipped: int
    y_bytes: int
    y_factors: int  # bytes before the first group
    y_group: int  # bytes
    y_bits: int  # the first plane
    y_high_bits: int  # the second
    at_once: int  # inputs that are multiplied by one instruction

    @classmethod
    def of(cls, format: BlockFormat, steps: StepFormat) -> "_Format":
        layout, panel = format.layout, Panel(format.layout)
        low, high, *_ = (*format.steps, Bits(0, 0, 0))
        y_bits, y_high_bits, *_ = (*(plane.bits for plane in panel.planes), 0)
        return cls(
            x_bytes=format.num_bytes,
            group=layout.group,
            groups=layout.groups,
            scale=format.scale,
            has_exponents=format.has_exponents,
            has_minimums=layout.has_minimums,
            negates_minimums=format.negates_minimums,
            factors=format.factors,
            arrays=panel.factors_bytes // WIDTH,
            factors_in=FACTORS.index(format.factors_in),
            low=low,
            high=high,
            flipped=format.flipped,
            y_bytes=panel.block_bytes,
            y_factors=panel.scales_bytes,
            y_group=panel.group_bytes,
            y_bits=y_bits,
            y_high_bits=y_high_bits,
            at_once=steps.inputs,
        )


@leaf
def _read_bits(x, bits, run, shift, flipped, count, steps):
    """Add some bits of each step of a block, as `Bits.read` does."""
    parts, mask = 8 // bits, (1 << bits) - 1
    if run % 8 != 0:  # one
        each, packed = int8s(steps, count), int8s(x, count // parts)
        for part in range(parts):
            for k in range(count // parts):
                each[k * parts + part] |= ((packed[k] >> (bits * part)) & mask) << shift
        return
    masks, flips = np.int64(EACH_BYTE) * mask, np.int64(EACH_BYTE) * flipped
    for first in range(0, count, run * parts):
        packed = int64s(x + first // parts, run // 8)
        for part in range(parts):
            wide = int64s(steps + first + part * run, run // 8)
            for k in range(run // 8):
                found = ((packed[k] >> (bits * part)) & masks) ^ flips
                wide[k] = wide[k] | (found << shift) if shift else found


@leaf
def _write_words(steps, count, bits, shift, at_once, y):
    """A plane of a group of one channel, the words of `Panel.planes`."""
    parts, mask = WORD // bits // at_once, (1 << bits) - 1
    if at_once == QUAD:
        mask *= EACH_BYTE
        words, quads = int32s(y, count * bits), int32s(steps, count // QUAD)
        for number in range(count * bits // WORD):
            word = np.int64(0)
            for part in range(parts):
                word |= ((quads[number * parts + part] >> shift) & mask) << (bits * part)
            words[number * WIDTH] = word
        return
    words, pairs = int32s(y, count * bits), int16s(steps, count // 2)
    for number in range(count * bits // WORD):
        word = np.int64(0)
        for part in range(parts):
            pair = pairs[number * parts + part] >> shift
            word |= ((pair & mask) | ((pair >> 8) & mask) << 16) << (bits * part)
        words[number * WIDTH] = word


@leaf
def _half_of_exponent(exponent):
    """Half of the scale of an exponent in float16; 0 if it has none."""
    exponent -= BIAS
    if exponent < SMALLEST or exponent > LARGEST:
        return 0
    if exponent > -HALF_BIAS:
        return (exponent + HALF_BIAS) << HALF_FRACTION
    return 1 << (exponent - SMALLEST)


@leaf
def _factor(f, x, array, group):
    """The int8 of a group in an array."""
    stored = int8s(x, f.arrays * f.groups)
    if f.factors_in == OF_Q2_K:
        return (stored[group] >> 4 * array) & 15
    if f.factors_in == OF_Q3_K:
        low = (stored[group % 8] >> 4 * (group // 8)) & 15
        return (low | ((stored[8 + group % 4] >> 2 * (group // 4)) & 3) << 4) - 32
    if f.factors_in == OF_IQ4_XS:
        low = (stored[2 + group // 2] >> 4 * (group % 2)) & 15
        return (low | ((stored[group // 4] >> 2 * (group % 4)) & 3) << 4) - 32
    if f.factors_in != OF_Q4_K:
        return stored[array * f.groups + group]
    own = 4 * array
    if group < 4:
        return stored[own + group] & 63
    return ((stored[group + 4] >> own) & 15) | (((stored[own + group - 4] >> 6) & 3) << 4)


@leaf
def _pack_scales(f, operands, x, y):
    """The scale and the minimum of a block of one channel."""
    stored, packed = int16s(x + f.scale, 2), int16s(y, 2 * WIDTH)
    if f.has_exponents:
        half = _half_of_exponent(int8s(x + f.scale, 1)[0] & 255)
        packed[0] = half
        if half == 0:
            int64s(operands + _LACKS_SCALES, 1)[0] = 1
    else:
        packed[0] = stored[0]
    if f.has_minimums:
        packed[WIDTH] = stored[1] ^ -0x8000 if f.negates_minimums else stored[1]


@leaf
def _pack_block(f, operands, x, y, lane, steps):
    """A block of one channel, a lane of the block of a panel at y."""
    _pack_scales(f, operands, x, y + 2 * lane)
    count = f.group * f.groups
    _read_bits(x + f.low.at, f.low.bits, f.low.run, 0, f.flipped, count, steps)
    if f.high.bits > 0:
        _read_bits(x + f.high.at, f.high.bits, f.high.run, f.low.bits, 0, count, steps)
    for group in range(f.groups):
        at = y + f.y_factors + group * f.y_group + lane
        for array in range(f.arrays):
            int8s(at, 1)[0] = _factor(f, x + f.factors, array, group)
            at += WIDTH
        at += 3 * lane  # four bytes for each channel
        own = steps + group * f.group
        _write_words(own, f.group, f.y_bits, 0, f.at_once, at)
        if f.y_high_bits > 0:
            at += f.group * f.y_bits * WIDTH // 8
            _write_words(own, f.group, f.y_high_bits, f.y_bits, f.at_once, at)


def _pack_blocks(operands, chunk, thread):
    """`GroupPackingOperands` of one format."""
    a = _read_operands(operands)
    panel = a.first // WIDTH + chunk
    start = max(a.first, panel * WIDTH)
    stop = min(a.first + a.rows, (panel + 1) * WIDTH)
    steps = a.steps + thread * FORMAT.group * FORMAT.groups
    for block in range(a.blocks):
        y = a.y + (panel * a.blocks + block) * FORMAT.y_bytes
        for row in range(start, stop):
            x = a.x + (row - a.first) * a.x_stride + block * FORMAT.x_bytes
            _pack_block(FORMAT, operands, x, y, row - panel * WIDTH, steps)


@cache
def packing_kernel(format: BlockFormat, steps: StepFormat) -> Callable[..., None]:
    """The kernel of `GroupPackingOperands` for one format of blocks and width of inputs.

    Its name is part of the name of its compiled code.
    """
    plain = "" if format != BlockFormat.plain(format.layout) else "plain_"
    name = f"pack_{plain}{format.layout.name}_for_{ACTIVATION_BITS[steps]}_bits"
    constants = {"FORMAT": _Format.of(format, steps)}
    function = FunctionType(_pack_blocks.__code__, {**globals(), **constants}, name)
    function.__qualname__ = name
    return function
