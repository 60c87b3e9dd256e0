"""The gated delta rule for one token of each of several requests (`engine.worker.model.delta_net`).

A chunk is one head of one row: its matrix is read from memory once, to predict v and to read q, and
then updated while it is still in the cache.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
import ctypes

import numpy as np

from engine.worker.cpu.intrinsics import float32s, int64s
from engine.worker.cpu.operands import make_reader, operands

BYTES = 4  # of a float


@operands
class DeltaOperands(ctypes.Structure):
    """Addresses of contiguous float32 tensors, `[rows, heads, …]` each; `slots` has an int64 for
    each row, and `scratch` has `value_dim` floats for each thread."""

    q: int  # [rows, heads, key_dim]
    k: int
    v: int  # [rows, heads, value_dim]
    decay: int  # [rows, heads]
    rate: int
    matrices: int  # [slots, heads, key_dim, value_dim]
    slots: int
    out: int  # [rows, heads, value_dim]
    scratch: int
    rows: int
    heads: int
    key_dim: int
    value_dim: int


_delta_operands = make_reader(DeltaOperands)


def delta_steps(operands, chunk, thread):
    """One head of one row."""
    a = _delta_operands(operands)
    keys, values = a.key_dim, a.value_dim
    slot = int64s(a.slots, a.rows)[chunk // a.heads]
    q = float32s(a.q + chunk * keys * BYTES, keys)
    k = float32s(a.k + chunk * keys * BYTES, keys)
    v = float32s(a.v + chunk * values * BYTES, values)
    out = float32s(a.out + chunk * values * BYTES, values)
    update = float32s(a.scratch + thread * values * BYTES, values)
    decay = float32s(a.decay + chunk * BYTES, 1)[0]
    rate = float32s(a.rate + chunk * BYTES, 1)[0]
    matrix = a.matrices + (slot * a.heads + chunk % a.heads) * keys * values * BYTES
    overlap = np.float32(0)
    for j in range(values):
        update[j] = np.float32(0)
        out[j] = np.float32(0)
    for i in range(keys):
        line, k_i, q_i = float32s(matrix + i * values * BYTES, values), k[i], q[i]
        overlap += q_i * k_i
        for j in range(values):
            update[j] += k_i * line[j]
            out[j] += q_i * line[j]
    for j in range(values):
        update[j] = (v[j] - decay * update[j]) * rate
        out[j] = decay * out[j] + overlap * update[j]
    for i in range(keys):
        line, k_i = float32s(matrix + i * values * BYTES, values), k[i]
        for j in range(values):
            line[j] = decay * line[j] + k_i * update[j]


KERNELS = (delta_steps,)
