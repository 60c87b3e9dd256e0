"""Kernels that measure a core's limits: loads from memory, and products of registers alone.

Their results are of no use. No kernel with the same instructions can be faster.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, import-untyped"
import ctypes
from typing import NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.worker.cpu.intrinsics import INT32, int64, int64s
from engine.worker.cpu.kernels.linears import tile_formats
from engine.worker.cpu.kernels.linears.amx_tiles import (
    SUMS,
    TILE_ROWS,
    WEIGHTS,
    X,
    configure,
    tile_instruction,
)
from engine.worker.cpu.kernels.linears.packed_tiles import CONFIG_BYTES, INT8, pinned
from engine.worker.cpu.kernels.linears.tile_formats import AMX_GROUPS
from engine.worker.cpu.kernels.vectors import INT32S, LANES, LINE, pointer, prefetch
from engine.worker.cpu.operands import make_reader, operands

VECTOR_BYTES = 4 * LANES
VECTORS_PER_TURN = 4  # vectors read from each stream in turn
CHAINS = 16 if LANES == 16 else 12  # independent sums, which hide the latency of an instruction


@operands
class ReadOperands(ctypes.Structure):
    """Chunk i reads `chunk_bytes` at `address + i * chunk_bytes`; `total` is 64 bits of output."""

    address: int
    chunk_bytes: int
    total: int


@operands
class PeakOperands(ctypes.Structure):
    """`iterations` of `Products` in each chunk; `total` is 64 bits of output."""

    iterations: int
    total: int


_read_operands, _peak_operands = make_reader(ReadOperands), make_reader(PeakOperands)


def _first_lane_of_xor(builder, sums):
    total = builder.load(sums[0])
    for one in sums[1:]:
        total = builder.xor(total, builder.load(one))
    lanes = [builder.extract_element(total, ir.Constant(INT32, lane)) for lane in range(LANES)]
    found = lanes[0]
    for lane in lanes[1:]:
        found = builder.xor(found, lane)
    return builder.zext(found, ir.IntType(64))


def _make_read(streams, ahead):
    """`read(address, bytes)`: load `streams` equal runs of memory in parallel, xor all of it.

    Each load is prefetched `ahead` bytes before; 0: only by the hardware.
    """

    def build(context, builder, signature, args):
        address, size = args
        run, step = builder.udiv(size, int64(streams)), VECTORS_PER_TURN * VECTOR_BYTES
        zero = ir.Constant(INT32S, [0] * LANES)
        sums = [cgutils.alloca_once_value(builder, zero) for _ in range(VECTORS_PER_TURN)]
        starts = [builder.add(address, builder.mul(run, int64(i))) for i in range(streams)]
        with cgutils.for_range_slice(builder, int64(0), run, int64(step)) as (at, _):
            for start in starts:
                here = builder.add(start, at)
                for line in range(0, step if ahead else 0, LINE):
                    prefetch(builder, builder.add(here, int64(ahead + line)))
                for i, one in enumerate(sums):
                    place = builder.add(here, int64(i * VECTOR_BYTES))
                    found = builder.load(pointer(builder, place, INT32S), align=4)
                    builder.store(builder.xor(found, builder.load(one)), one)
        return _first_lane_of_xor(builder, sums)

    def read(typing, address, size):
        return types.int64(types.int64, types.int64), build

    return intrinsic(read)


def make_read_kernel(streams, ahead):
    """A kernel of `ReadOperands`."""
    read = _make_read(streams, ahead)

    def read_memory(operands, chunk, thread):
        a = _read_operands(operands)
        int64s(a.total, 1)[0] ^= read(a.address + chunk * a.chunk_bytes, a.chunk_bytes)

    return read_memory


class Products(NamedTuple):
    """A loop of the fastest products of a format, from registers alone."""

    build: object  # `(builder, iterations) -> int64`, of no use
    per_iteration: int


def _vector_products(add, in_lane, *, is_one=True):
    """`CHAINS` sums, each with one product per iteration; `add` as in `TileFormat`.

    Unless it is one instruction, each sum has an x of its own: LLVM would multiply once for all.
    """

    def build(builder, iterations):
        zero = ir.Constant(INT32S, [0] * LANES)
        sums = [cgutils.alloca_once_value(builder, zero) for _ in range(CHAINS)]
        x, weights = pinned(builder, zero), pinned(builder, zero)
        with cgutils.for_range_slice(builder, int64(0), iterations, int64(1)):
            for one in sums:
                factor = x if is_one else pinned(builder, x, in_order=True)
                total = add(builder, builder.load(one), weights, factor)
                builder.store(pinned(builder, total), one)
        return _first_lane_of_xor(builder, sums)

    return Products(build, CHAINS * LANES * in_lane)


def _amx_products(instruction, in_lane):
    """One product of each pair of tiles of x and weights per iteration."""
    sums = [(row, half) for row in range(len(X)) for half in range(len(WEIGHTS))]

    def build(builder, iterations):
        empty = ir.Constant(ir.ArrayType(INT8, CONFIG_BYTES), None)
        config = cgutils.alloca_once_value(builder, empty)
        config.align = LINE
        rows = int64(TILE_ROWS)
        configure(builder, builder.ptrtoint(config, iterations.type), rows, rows)
        with cgutils.for_range_slice(builder, int64(0), iterations, int64(1)):
            for row, half in sums:
                tile_instruction(builder, instruction, SUMS[row][half], X[row], WEIGHTS[half])
        tile_instruction(builder, "tilerelease")
        return int64(0)

    return Products(build, len(sums) * TILE_ROWS * LANES * AMX_GROUPS * in_lane)


def make_peak_kernel(loop):
    """A kernel of `PeakOperands` for `Products`."""

    def build(context, builder, signature, args):
        return loop.build(builder, args[0])

    @intrinsic
    def run(typing, iterations):
        return types.int64(types.int64), build

    def products(operands, chunk, thread):
        a = _peak_operands(operands)
        int64s(a.total, 1)[0] ^= run(a.iterations)

    return products


def _fastest():
    """The fastest products, by the format of weights."""
    yield "float32", _vector_products(tile_formats.FLOAT32.add, 1)
    if tile_formats.HAS_AMX:
        yield "bfloat16", _amx_products("tdpbf16ps", 2)
        yield "int8", _amx_products("tdpbusd", 4)
        return
    widest = tile_formats.BFLOAT16 if tile_formats.HAS_BFLOAT16 else tile_formats.FLOAT32
    yield "bfloat16", _vector_products(widest.add, widest.group)
    if tile_formats.HAS_VNNI:
        yield "int8", _vector_products(tile_formats.UINT8_INPUTS.add, 4)
    else:
        yield "int8", _vector_products(tile_formats.add_int16_pairs, 2, is_one=False)


PEAKS = dict(_fastest())
PEAKS["float16"] = PEAKS["float32"]
PEAKS["int4"] = PEAKS["int8"]  # the same instruction multiplies
