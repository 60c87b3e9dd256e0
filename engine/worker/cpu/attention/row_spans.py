"""Scores of a span by vector registers, for keys that are stored token by token.

So are keys of which the values are a part (`ModelShape.values_from`). The tiles take keys dimension
by dimension, so 16 keys at a time are transposed into scratch memory, where all rows of q are
multiplied by them. `score_span` has the arguments of that of `vector_spans`.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped"
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from engine.worker.cpu.attention.kv_pages import Keys, page_at
from engine.worker.cpu.attention.tiles import HAS_TWO_TILES, KEYS
from engine.worker.cpu.attention.vector_spans import round_rows, score_rows, score_rows_of_two
from engine.worker.cpu.intrinsics import INT64, float32s, int64, int64s
from engine.worker.cpu.kernels.dtypes import INT8, ITEM_BYTES, JOINED_PAIRS
from engine.worker.cpu.kernels.elementwise import BYTES
from engine.worker.cpu.kernels.vectors import pointer

TILES = 2
UNIT_BYTES = (4, 2, 2, 1, 2, 1, 4)  # bytes of what stays together, by dtype
PLACES_BYTES = KEYS * (8 + BYTES)  # the addresses of keys, and their scales


def scratch_floats(max_rows: int, dim: int) -> int:
    """Floats that a thread needs: rounded queries, and transposed keys with their places."""
    return max_rows * dim + TILES * (KEYS * dim + PLACES_BYTES // BYTES)


@intrinsic(prefer_literal=True)
def _transpose(typing, dtype, places, shift, target):
    """The 16 units `shift` bytes behind each of 16 addresses, int64 at `places`, as 16 lines, of
    which the first has the first unit of each."""

    def build(context, builder, signature, args):
        size = UNIT_BYTES[signature.args[0].literal_value]
        _, places, shift, target = args
        kind = ir.VectorType(ir.IntType(8 * size), KEYS)
        lines = []
        for i in range(KEYS):
            place = builder.load(pointer(builder, builder.add(places, int64(8 * i)), INT64))
            at = pointer(builder, builder.add(place, shift), kind)
            lines.append(builder.load(at, align=min(size, 2)))
        for step in (8, 4, 2, 1):
            orders = [
                [j if not j & step else KEYS + j - step for j in range(KEYS)],
                [j + step if not j & step else KEYS + j for j in range(KEYS)],
            ]
            masks = [ir.Constant(ir.VectorType(ir.IntType(32), KEYS), order) for order in orders]
            for i in range(KEYS):
                if not i & step:
                    pair = lines[i], lines[i + step]
                    lines[i], lines[i + step] = (
                        builder.shuffle_vector(*pair, mask) for mask in masks
                    )
        for i, line in enumerate(lines):
            at = builder.add(target, int64(i * KEYS * size))
            builder.store(line, pointer(builder, at, kind), align=min(size, 4))
        return context.get_dummy_value()

    return types.void(dtype, *[types.int64] * 3), build


@intrinsic(prefer_literal=True)
def _copy_unit(typing, dtype, source, target):
    """Copy one unit between two addresses."""

    def build(context, builder, signature, args):
        size = UNIT_BYTES[signature.args[0].literal_value]
        _, source, target = args
        kind = ir.IntType(8 * size)
        unit = builder.load(pointer(builder, source, kind), align=min(size, 2))
        builder.store(unit, pointer(builder, target, kind), align=min(size, 4))
        return context.get_dummy_value()

    return types.void(dtype, types.int64, types.int64), build


@njit(inline="always")
def _gathered(dtype, kind, pages, at, end, dim, scratch):
    """The 16 keys from token `at` on as `[dim, 16]`; those from `end` on are the last one's. `kind`
    is the dtype that the tiles read."""
    places, scales = int64s(scratch, KEYS), float32s(scratch + KEYS * 8, KEYS)
    size, row_bytes, unit = pages.block_size, dim * ITEM_BYTES[dtype], UNIT_BYTES[kind]
    for i in range(KEYS):
        token = min(at + i, end - 1)
        number, offset = token // size, token % size
        places[i] = page_at(pages, number) + offset * row_bytes
        if dtype == INT8:
            block = int64s(pages.table + number * 8, 1)[0]
            scale = pages.scales + block * pages.scale_bytes + offset * BYTES
            scales[i] = float32s(scale, 1)[0]
    keys, whole = scratch + PLACES_BYTES, row_bytes - row_bytes % (KEYS * unit)
    for shift in range(0, whole, KEYS * unit):
        _transpose(kind, scratch, shift, keys + KEYS * shift)
    for shift in range(whole, row_bytes, unit):
        for i in range(KEYS):
            _copy_unit(kind, places[i] + shift, keys + KEYS * shift + i * unit)
    return Keys(keys, scratch + KEYS * 8, keys)


@njit(inline="always")
def _score_span(dtype, kind, pages, start, end, q, dim, scores, rows, scratch):
    first = scratch + rows * dim * BYTES
    second = first + KEYS * dim * BYTES + PLACES_BYTES
    at = start
    while at < end:
        out = scores + (at - start) * BYTES
        keys = _gathered(dtype, kind, pages, at, end, dim, first)
        if HAS_TWO_TILES and at + KEYS < end:
            then = _gathered(dtype, kind, pages, at + KEYS, end, dim, second)
            score_rows_of_two(kind, KEYS, keys, then, q, dim, out, rows)
            at += 2 * KEYS
        else:
            score_rows(kind, KEYS, keys, q, dim, out, rows)
            at += KEYS


@njit(inline="always")
def score_span(dtype, pages, seen, start, end, q, dim, scores, rows, scratch):
    """Scores of all rows against the keys of [start, end). A tile may run over the end."""
    _score_span(dtype, dtype, pages, start, end, q, dim, scores, rows, scratch)


@njit(inline="always")
def score_span_in_pairs(dtype, pages, seen, start, end, q, dim, scores, rows, scratch):
    """The same with AVX-512 BF16, of keys with an even number of dimensions."""
    round_rows(q, dim * BYTES, dim, rows, scratch)
    _score_span(dtype, JOINED_PAIRS, pages, start, end, scratch, dim, scores, rows, scratch)
