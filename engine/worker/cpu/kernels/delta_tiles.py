"""Passes over a panel of a recurrent state, in vector registers: lines of `PANEL` columns, one per
key. Sums run over the keys in their order, with one rounding per key."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, import-untyped"
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.worker.cpu.intrinsics import FLOAT, int64
from engine.worker.cpu.kernels.vectors import FLOATS, LANES, broadcast, fma, pointer

PARTS = 4 if LANES == 16 else 2  # vectors per line, so that all sums stay in registers
PANEL = PARTS * LANES
LINE_BYTES = 4 * PANEL


def _vectors(builder, address):
    """Pointers to the vectors of a line."""
    return [
        pointer(builder, builder.add(address, int64(4 * LANES * part)), FLOATS)
        for part in range(PARTS)
    ]


def _zeros(builder):
    """Sums in registers, one for each vector of a line."""
    sums = [cgutils.alloca_once(builder, FLOATS) for _ in range(PARTS)]
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
    for one, target in zip(sums, _vectors(builder, address), strict=True):
        builder.store(builder.load(one), target, align=4)


@intrinsic
def predict(typing, panel, k, keys, line):
    """`line = sum over i of k[i] * panel[i]`; all arguments but `keys` are byte addresses."""

    def build(context, builder, signature, args):
        panel, k, keys, line = args
        sums = _zeros(builder)
        with cgutils.for_range_slice(builder, int64(0), keys, int64(1)) as (i, _):
            at = builder.add(panel, builder.mul(i, int64(LINE_BYTES)))
            known = [builder.load(one, align=4) for one in _vectors(builder, at)]
            _add(builder, sums, _number(builder, k, i), known)
        _store(builder, sums, line)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), build


def _token(builder, panel, q, k, following, decay, keys, lines):
    """The code of one token; without `following` nothing is predicted."""
    corrections = [
        builder.load(one, align=4)
        for one in _vectors(builder, builder.add(lines, int64(LINE_BYTES)))
    ]
    decays, outputs, predicted = broadcast(builder, decay), _zeros(builder), _zeros(builder)
    with cgutils.for_range_slice(builder, int64(0), keys, int64(1)) as (i, _):
        at = _vectors(builder, builder.add(panel, builder.mul(i, int64(LINE_BYTES))))
        key = _number(builder, k, i)
        line = [
            fma(
                builder,
                key,
                correction,
                builder.fmul(decays, builder.load(one, align=4)),
            )
            for one, correction in zip(at, corrections, strict=True)
        ]
        for value, one in zip(line, at, strict=True):
            builder.store(value, one, align=4)
        _add(builder, outputs, _number(builder, q, i), line)
        if following is not None:
            _add(builder, predicted, _number(builder, following, i), line)
    if following is not None:
        _store(builder, predicted, lines)
    _store(builder, outputs, builder.add(lines, int64(2 * LINE_BYTES)))


@intrinsic
def update(typing, panel, q, k, following, decay, keys, lines):
    """One token: `panel[i] = decay * panel[i] + k[i] * correction`, what q reads of it, and what
    it predicts for the key of the following token.

    `lines` has the prediction, which is replaced, the correction, and the output.
    """

    def build(context, builder, signature, args):
        _token(builder, *args)
        return context.get_dummy_value()

    arguments = [types.int64] * 4 + [types.float32] + [types.int64] * 2
    return types.void(*arguments), build


@intrinsic
def add_token(typing, panel, q, k, decay, keys, lines):
    """The same without a prediction."""

    def build(context, builder, signature, args):
        panel, q, k, decay, keys, lines = args
        _token(builder, panel, q, k, None, decay, keys, lines)
        return context.get_dummy_value()

    arguments = [types.int64] * 3 + [types.float32] + [types.int64] * 2
    return types.void(*arguments), build
