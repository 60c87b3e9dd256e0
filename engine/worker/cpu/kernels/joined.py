"""Two kernels over rows in one call: the second reads what the first wrote to the same row.

The row is still in the L1 or L2 cache then, and threads wait for each other once less.
"""

# mypy: disable-error-code="no-untyped-def"
import ctypes

from engine.worker.cpu.intrinsics import call_kernel
from engine.worker.cpu.operands import make_reader, operands


@operands
class JoinedOperands(ctypes.Structure):
    """Kernels and their operands, all addresses; both kernels have one row per chunk."""

    first: int
    first_operands: int
    second: int
    second_operands: int
    rows: int
    rows_per_chunk: int


_joined_operands = make_reader(JoinedOperands)


def run_joined(operands, chunk, thread):
    """`JoinedOperands` for a run of rows, one row after the other."""
    a = _joined_operands(operands)
    for row in range(chunk * a.rows_per_chunk, min(a.rows, (chunk + 1) * a.rows_per_chunk)):
        call_kernel(a.first, a.first_operands, row, thread)
        call_kernel(a.second, a.second_operands, row, thread)
