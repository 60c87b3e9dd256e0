"""Passes over some columns of a recurrent state, in vector registers: a line of columns per key.

Sums run over the keys in their order, with one rounding per key. A panel of `PANEL` columns is
copied out for runs of several tokens; `DIRECT` columns are read and written where the state lies.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, import-untyped"
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.worker.cpu.intrinsics import FLOAT, int64
from engine.worker.cpu.kernels.vectors import FLOATS, LANES, broadcast, fma, pointer

PARTS = 4 if LANES == 16 else 2  # vectors per line, so that all sums stay in registers
PANEL = PARTS * LANES
DIRECT_PARTS = 4  # there are fewer sums
DIRECT = DIRECT_PARTS * LANES
WIDE_PARTS = 8 if LANES == 8 else DIRECT_PARTS  # with fewer each sum waits for the one before
WIDE = WIDE_PARTS * LANES
LINE_BYTES = 4 * PANEL


def _vectors(builder, address, parts=PARTS):
    """Pointers to the vectors of a line."""
    return [
        pointer(builder, builder.add(address, int64(4 * LANES * part)), FLOATS)
        for part in range(parts)
    ]


def _load(builder, vectors):
    return [builder.load(one, align=4) for one in vectors]


def _line(builder, start, stride, i, parts):
    """Pointers to the vectors of line `i`."""
    return _vectors(builder, builder.add(start, builder.mul(i, stride)), parts)


def _zeros(builder, parts):
    """Sums in registers, one for each vector of a line."""
    sums = [cgutils.alloca_once(builder, FLOATS) for _ in range(parts)]
    for one in sums:
        builder.store(ir.Constant(FLOATS, [0.0] * LANES), one)
    return sums


def _number(builder, base, i):
    """Float number `i` at an address, in all lanes."""
    place = builder.add(base, builder.mul(i, int64(4)))
    return broadcast(builder, builder.load(pointer(builder, place, FLOAT)))


def _add(builder, sums, weight, line):
    for one, value in zip(sums, line, strict=True):
        builder.store(fma(builder, weight, value, builder.load(one)), one)


def _store(builder, sums, address):
    for one, target in zip(sums, _vectors(builder, address, len(sums)), strict=True):
        builder.store(builder.load(one), target, align=4)


@intrinsic
def copy_panel(typing, source, source_stride, target, target_stride, keys):
    """Copy the lines of a panel, which are strides of bytes apart."""

    def build(context, builder, signature, args):
        source, source_stride, target, target_stride, keys = args
        with cgutils.for_range_slice(builder, int64(0), keys, int64(1)) as (i, _):
            values = _load(builder, _line(builder, source, source_stride, i, PARTS))
            to = _line(builder, target, target_stride, i, PARTS)
            for value, one in zip(values, to, strict=True):
                builder.store(value, one, align=4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), build


def _predict(builder, state, stride, k, keys, line, parts, start=None):
    sums = _zeros(builder, parts)
    for one, value in zip(sums, start or (), strict=False):
        builder.store(value, one)
    with cgutils.for_range_slice(builder, int64(0), keys, int64(1)) as (i, _):
        known = _load(builder, _line(builder, state, stride, i, parts))
        _add(builder, sums, _number(builder, k, i), known)
    _store(builder, sums, line)


@intrinsic
def predict(typing, panel, k, keys, line):
    """`line = sum over i of k[i] * panel[i]`; all arguments but `keys` are byte addresses."""

    def build(context, builder, signature, args):
        panel, k, keys, line = args
        _predict(builder, panel, int64(LINE_BYTES), k, keys, line, PARTS)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), build


def _make_predict(parts):
    def build(context, builder, signature, args):
        state, stride, k, keys, line = args
        start = _load(builder, _vectors(builder, line, parts))
        _predict(builder, state, stride, k, keys, line, parts, start)
        return context.get_dummy_value()

    def predict_columns(typing, state, stride, k, keys, line):
        """Add to `line` the same of some columns of lines that are `stride` bytes apart."""
        return types.void(*[types.int64] * 5), build

    return intrinsic(predict_columns)


predict_direct, predict_wide = _make_predict(DIRECT_PARTS), _make_predict(WIDE_PARTS)


def _token(builder, places, vectors, decay, keys, following=None):
    """The code of one token. `places`: the state, where it is written, and its stride. `vectors`:
    the addresses of q, k, the correction, whose length is that of all lines, and the output.
    `following`: the next token's k, and where its prediction is written."""
    (source, target, stride), (q, k, correction, output, parts) = places, vectors
    corrections = _load(builder, _vectors(builder, correction, parts))
    decays, outputs, predicted = (
        broadcast(builder, decay),
        _zeros(builder, parts),
        _zeros(builder, parts),
    )
    with cgutils.for_range_slice(builder, int64(0), keys, int64(1)) as (i, _):
        key = _number(builder, k, i)
        line = [
            fma(builder, key, change, builder.fmul(decays, known))
            for known, change in zip(
                _load(builder, _line(builder, source, stride, i, parts)), corrections, strict=True
            )
        ]
        for value, one in zip(line, _line(builder, target, stride, i, parts), strict=True):
            builder.store(value, one, align=4)
        _add(builder, outputs, _number(builder, q, i), line)
        if following is not None:
            _add(builder, predicted, _number(builder, following[0], i), line)
    if following is not None:
        _store(builder, predicted, following[1])
    _store(builder, outputs, output)


def _lines(builder, lines):
    """Addresses of the three lines of a panel: the prediction, the correction, the output."""
    return [builder.add(lines, int64(part * LINE_BYTES)) for part in range(3)]


@intrinsic
def update(typing, panel, q, k, following, decay, keys, lines):
    """One token: `panel[i] = decay * panel[i] + k[i] * correction`, what q reads of it, and what
    it predicts for the key of the following token.

    `lines` has the prediction, which is replaced, the correction, and the output.
    """

    def build(context, builder, signature, args):
        panel, q, k, following, decay, keys, lines = args
        prediction, correction, output = _lines(builder, lines)
        places = (panel, panel, int64(LINE_BYTES))
        vectors = (q, k, correction, output, PARTS)
        _token(builder, places, vectors, decay, keys, (following, prediction))
        return context.get_dummy_value()

    arguments = [types.int64] * 4 + [types.float32] + [types.int64] * 2
    return types.void(*arguments), build


@intrinsic
def add_token(typing, panel, q, k, decay, keys, lines):
    """The same without a prediction."""

    def build(context, builder, signature, args):
        panel, q, k, decay, keys, lines = args
        _, correction, output = _lines(builder, lines)
        places = (panel, panel, int64(LINE_BYTES))
        _token(builder, places, (q, k, correction, output, PARTS), decay, keys)
        return context.get_dummy_value()

    arguments = [types.int64] * 3 + [types.float32] + [types.int64] * 2
    return types.void(*arguments), build


@intrinsic
def add_direct(typing, state, target, stride, q, k, correction, output, decay, keys):
    """The same of `DIRECT` columns of a state that becomes `target`, which may be itself; the
    output may be written where the correction is."""

    def build(context, builder, signature, args):
        state, target, stride, q, k, correction, output, decay, keys = args
        vectors = (q, k, correction, output, DIRECT_PARTS)
        _token(builder, (state, target, stride), vectors, decay, keys)
        return context.get_dummy_value()

    arguments = [types.int64] * 7 + [types.float32, types.int64]
    return types.void(*arguments), build
