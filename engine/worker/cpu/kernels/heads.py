"""Linears of each head, by the kernels of dense linears, and copies of heads.

A head's rows have the bits of a dense linear's, whatever other rows a step has.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
import ctypes

from engine.worker.cpu.intrinsics import call_kernel, float32s, int64s
from engine.worker.cpu.kernels.elementwise import BYTES
from engine.worker.cpu.kernels.experts import (
    COLUMNS,
    LINEAR_WORDS,
    ROWS,
    SCRATCH_BYTES,
    WORD,
    X_SCALE,
    X_STRIDE,
    Y_STRIDE,
    X,
    Y,
)
from engine.worker.cpu.kernels.linears.linear import InputOperands
from engine.worker.cpu.operands import make_reader, operands

INPUT_WORDS = ctypes.sizeof(InputOperands) // WORD
_PLACES = {field[0]: place for place, field in enumerate(InputOperands._fields_)}
FROM, TO, SCALE, ROWS_PER_CHUNK = (_PLACES[name] for name in ("x", "y", "scale", "rows_per_chunk"))


@operands
class HeadInputOperands(ctypes.Structure):
    """Convert the inputs of each head, a chunk each, to `[heads, rows, padded]`. The fields before
    `kernel` are those of `InputOperands`, for the first head."""

    x: int
    x_stride: int
    width: int
    y: int
    padded: int
    scale: int
    group: int
    middle: int
    rows: int
    rows_per_chunk: int  # not used: a head is one run of rows
    kernel: int  # address of the kernel that converts rows
    scratch: int  # SCRATCH_BYTES for each thread
    x_head: int  # bytes between heads
    y_head: int
    scale_head: int  # 0 without scales


_head_input_operands = make_reader(HeadInputOperands)


def head_inputs(operands, chunk, thread):
    """`HeadInputOperands` of one head."""
    a = _head_input_operands(operands)
    own = int64s(operands, INPUT_WORDS)
    call = int64s(a.scratch + thread * SCRATCH_BYTES, INPUT_WORDS)
    for word in range(INPUT_WORDS):
        call[word] = own[word]
    call[FROM] += chunk * a.x_head
    call[TO] += chunk * a.y_head
    call[SCALE] += chunk * a.scale_head
    call[ROWS_PER_CHUNK] = a.rows
    call_kernel(a.kernel, a.scratch + thread * SCRATCH_BYTES, 0, thread)


@operands
class HeadLinearOperands(ctypes.Structure):
    """A linear of each head over all rows; `table` has its `LinearOperands`."""

    kernel: int  # address of the kernel of a dense linear
    table: int  # LinearOperands [heads], without what the call determines
    scratch: int  # SCRATCH_BYTES for each thread
    column_chunks: int  # chunks of columns of each head
    columns: int
    x: int
    x_stride: int  # bytes between rows
    x_head: int  # bytes between heads
    x_scale: int
    scale_head: int  # bytes between heads
    y: int
    y_stride: int  # floats between rows
    y_head: int  # bytes between heads
    rows: int


_head_linear_operands = make_reader(HeadLinearOperands)


def head_linear(operands, chunk, thread):
    """Some columns of one head."""
    a = _head_linear_operands(operands)
    head = chunk // a.column_chunks
    own = int64s(a.table + head * LINEAR_WORDS * WORD, LINEAR_WORDS)
    call = int64s(a.scratch + thread * SCRATCH_BYTES, LINEAR_WORDS)
    for word in range(LINEAR_WORDS):
        call[word] = own[word]
    call[X], call[X_STRIDE] = a.x + head * a.x_head, a.x_stride
    call[X_SCALE] = a.x_scale + head * a.scale_head
    call[Y], call[Y_STRIDE] = a.y + head * a.y_head, a.y_stride
    call[ROWS], call[COLUMNS] = a.rows, a.columns
    call_kernel(
        a.kernel, a.scratch + thread * SCRATCH_BYTES, chunk - head * a.column_chunks, thread
    )


@operands
class CopyHeadsOperands(ctypes.Structure):
    """`HeadOperators.copy`."""

    x: int
    x_stride: int  # floats between rows
    x_head: int  # bytes between heads
    y: int
    y_stride: int
    y_head: int
    heads: int
    pairs: int
    dim: int
    rows: int
    rows_per_chunk: int


_copy_heads_operands = make_reader(CopyHeadsOperands)


def copy_heads(operands, chunk, thread):
    """`CopyHeadsOperands` for a run of rows."""
    a = _copy_heads_operands(operands)
    pairs = a.pairs
    for row in range(chunk * a.rows_per_chunk, min(a.rows, (chunk + 1) * a.rows_per_chunk)):
        for head in range(a.heads):
            x = float32s(a.x + row * a.x_stride * BYTES + head * a.x_head, a.dim)
            y = float32s(a.y + row * a.y_stride * BYTES + head * a.y_head, a.dim)
            for k in range(pairs):
                y[k], y[pairs + k] = x[2 * k], x[2 * k + 1]
            for k in range(2 * pairs, a.dim):
                y[k] = x[k]


KERNELS = (head_inputs, head_linear, copy_heads)
