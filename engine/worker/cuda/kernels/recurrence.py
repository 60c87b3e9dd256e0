"""Recurrent layers between their linears: a convolution, and behind it the scan of a Gated DeltaNet
or a Mamba 2.

A run's tokens are scanned one after the other, because the result of a form by chunks depends on
where a prompt is cut; runs, heads and columns of states are computed side by side. A program of a
scan is one warp that keeps its part of a state in registers, and reads the inputs of a token while
it computes the one before. All is float32. The reference is `engine.worker.model.mamba`, with the
equations.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.worker.cuda.kernels.convolution import MAX_TAPS, convolved, numbers_of, silu
from engine.worker.cuda.kernels.dependent import launch_options, wait
from engine.worker.model.mamba import UNIT_EPS
from engine.worker.ports import (
    ConvShape,
    ConvWeights,
    DeltaShape,
    DeltaWeights,
    MambaWeights,
    RecurrentShape,
    RecurrentWeights,
    StateRuns,
)

MAX_KEY_DIM = 256  # a warp has 8 columns of a state then, 32 bytes of each of its rows
STATE_ELEMENTS = 2048  # a warp's: 64 registers of each thread; with 128 some are spilled


@triton.jit
def _softplus(x):
    """log(1 + exp x), with the relative error of a product where exp x is small, too."""
    power = tl.exp(tl.minimum(x, 20.0))
    rounded = 1.0 + power
    is_small = rounded == 1.0
    found = tl.log(rounded) * power / tl.where(is_small, 1.0, rounded - 1.0)
    return tl.where(x > 20.0, x, tl.where(is_small, power, found))


@triton.jit
def _unit(x, EPS: tl.constexpr):
    return x * tl.rsqrt(tl.sum(x * x, axis=0) + EPS)


@triton.jit
def _token(mixed, y, at_q, at_k, at_v, at_step, at_decay, is_key, is_value, row, stop):
    """What a head reads of a row, if there is one before `stop`: of a DeltaNet q, k, v, b and a, of
    a Mamba C, B, x and twice its time step."""
    is_row = row < stop
    is_key, is_value = tl.where(is_key, row, stop) < stop, tl.where(is_value, row, stop) < stop
    q = tl.load(mixed + at_q, mask=is_key, other=0.0)
    k = tl.load(mixed + at_k, mask=is_key, other=0.0)
    v = tl.load(mixed + at_v, mask=is_value, other=0.0)
    step = tl.load(y + at_step, mask=is_row, other=0.0).to(tl.float32)
    decay = tl.load(y + at_decay, mask=is_row, other=0.0).to(tl.float32)
    return q, k, v, step, decay


@triton.jit
def _write_matrix(states, slot, SIZE: tl.constexpr, places, matrix, is_state):
    if slot >= 0:
        tl.store(states + slot * SIZE + places, matrix, mask=is_state)


@triton.jit
def scan_kernel(
    mixed,
    y,
    states,
    runs,
    writes,
    rates,
    biases,
    skips,
    out,
    y_row,
    NUM_KEYS: tl.constexpr,
    NUM_VALUES: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    IS_MAMBA: tl.constexpr,
    EPS: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Grid: value heads × blocks of `VALUES` columns of a state, × runs. `mixed` `[rows, channels]`
    is what was convolved; in `y` the gates and steps lie behind that. The results of a DeltaNet go
    to `out` without norm and gate."""
    wait(IS_DEPENDENT)
    BLOCKS: tl.constexpr = (VALUE_DIM + VALUES - 1) // VALUES
    CHANNELS: tl.constexpr = 2 * NUM_KEYS * KEY_DIM + NUM_VALUES * VALUE_DIM
    SIZE: tl.constexpr = NUM_VALUES * KEY_DIM * VALUE_DIM
    run = runs + tl.program_id(1) * 3
    start, stop, source = tl.load(run), tl.load(run + 1), tl.load(run + 2)
    head = tl.program_id(0) // BLOCKS
    key, value = tl.arange(0, KEYS), tl.program_id(0) % BLOCKS * VALUES + tl.arange(0, VALUES)
    is_key, is_value = key < KEY_DIM, value < VALUE_DIM
    is_state = is_key[:, None] & is_value[None, :]
    places = (head * KEY_DIM + key[:, None]) * VALUE_DIM + value[None, :]
    at = states + source * SIZE + places
    matrix = tl.load(at, mask=tl.where(is_state, source, -1) >= 0, other=0.0)
    rate, bias, skip = tl.load(rates + head), tl.load(biases + head), tl.load(skips + head)
    # The places of a token's inputs in its row
    at_q = head // (NUM_VALUES // NUM_KEYS) * KEY_DIM + key
    at_k, at_v = at_q + NUM_KEYS * KEY_DIM, 2 * NUM_KEYS * KEY_DIM + head * VALUE_DIM + value
    at_step = CHANNELS + NUM_VALUES * VALUE_DIM + head
    at_decay = at_step if IS_MAMBA else at_step + NUM_VALUES
    mixed, y = mixed + start * CHANNELS, y + start * y_row
    q, k, v, step, decay = _token(
        mixed, y, at_q, at_k, at_v, at_step, at_decay, is_key, is_value, start, stop
    )
    for row in range(start, stop):
        slot, other_slot = tl.load(writes + row * 2), tl.load(writes + row * 2 + 1)
        time = _softplus(decay + bias)
        matrix *= tl.exp(rate * time)
        if IS_MAMBA:
            update = time * v
            gate = tl.load(y + CHANNELS + head * VALUE_DIM + value, mask=is_value, other=0.0)
            added, factor = skip * v, silu(gate.to(tl.float32))
        else:
            q, k = _unit(q, EPS) * KEY_DIM**-0.5, _unit(k, EPS)
            update = (v - tl.sum(k[:, None] * matrix, axis=0)) / (1.0 + tl.exp(-step))
            added, factor = 0.0, 1.0
        matrix += k[:, None] * update[None, :]
        found = (tl.sum(q[:, None] * matrix, axis=0) + added) * factor
        mixed, y = mixed + CHANNELS, y + y_row
        q, k, v, step, decay = _token(
            mixed, y, at_q, at_k, at_v, at_step, at_decay, is_key, is_value, row + 1, stop
        )
        to = out + (row * NUM_VALUES + head) * VALUE_DIM + value
        tl.store(to, found.to(out.dtype.element_ty), mask=is_value)
        _write_matrix(states, slot, SIZE, places, matrix, is_state)
        _write_matrix(states, other_slot, SIZE, places, matrix, is_state)


@triton.jit
def gated_norm_kernel(
    x,
    y,
    weight,
    out,
    y_row,
    gate_column,
    eps,
    NUM_HEADS: tl.constexpr,
    TILED_KEYS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Grid: rows × heads. `TILED_KEYS`: key heads if heads are reordered (`HeadTiles`), else 1."""
    wait(IS_DEPENDENT)
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    mask = column < DIM
    found = tl.load(x + (row * NUM_HEADS + head) * DIM + column, mask=mask, other=0.0)
    factors = tl.load(weight + column, mask=mask, other=0.0)
    gate = y + row * y_row + gate_column + head * DIM + column
    by = tl.load(gate, mask=mask, other=0.0).to(tl.float32)
    found = found * tl.rsqrt(tl.sum(found * found, axis=0) / DIM + eps) * factors * silu(by)
    PER_KEY: tl.constexpr = NUM_HEADS // TILED_KEYS
    if TILED_KEYS > 1:
        head = head % PER_KEY * TILED_KEYS + head // PER_KEY
    to = out + (row * NUM_HEADS + head) * DIM + column
    tl.store(to, found.to(out.dtype.element_ty), mask=mask)


def has_kernels(shape: RecurrentShape) -> bool:
    """Whether the kernels compute layers of these sizes."""
    if isinstance(shape, ConvShape):
        return 2 <= shape.kernel <= MAX_TAPS
    assert isinstance(shape, DeltaShape), "there are no others"
    return 2 <= shape.kernel <= MAX_TAPS and shape.key_dim <= MAX_KEY_DIM


def recurrence(
    weights: RecurrentWeights, y: Tensor, state: tuple[Tensor, ...], runs: StateRuns
) -> Tensor:
    """A `Recurrence` of y `[rows, columns]`, whose rows may be strided."""
    if isinstance(weights, ConvWeights):
        out = y.new_empty(len(y), weights.shape.channels)
        return convolved(weights, y, state[0], runs, out)
    shape = weights.shape
    mixed = y.new_empty(len(y), shape.channels, dtype=torch.float32)
    convolved(weights, y, state[0], runs, mixed)
    out = y.new_empty(len(y), shape.num_value_heads * shape.value_dim)
    if isinstance(weights, MambaWeights):
        _scan(weights, mixed, y, state[1], runs, out)
        return out
    read = torch.empty_like(out, dtype=torch.float32)
    _scan(weights, mixed, y, state[1], runs, read)
    _gated_norm(weights, read, y, out)
    return out


def _scan(
    weights: DeltaWeights | MambaWeights,
    mixed: Tensor,
    y: Tensor,
    states: Tensor,
    runs: StateRuns,
    out: Tensor,
) -> None:
    shape: DeltaShape = weights.shape
    keys = triton.next_power_of_2(shape.key_dim)
    values = min(triton.next_power_of_2(shape.value_dim), 32, STATE_ELEMENTS // keys)
    is_mamba = isinstance(weights, MambaWeights)
    blocks = triton.cdiv(shape.value_dim, values)
    scan_kernel[(shape.num_value_heads * blocks, len(runs.runs))](
        mixed,
        y,
        states,
        *numbers_of(runs),
        weights.decay_rate,
        weights.decay_bias,
        weights.skip if isinstance(weights, MambaWeights) else weights.decay_rate,
        out,
        y.stride(0),
        NUM_KEYS=shape.num_key_heads,
        NUM_VALUES=shape.num_value_heads,
        KEY_DIM=shape.key_dim,
        VALUE_DIM=shape.value_dim,
        IS_MAMBA=is_mamba,
        EPS=UNIT_EPS,
        KEYS=keys,
        VALUES=values,
        num_warps=1,
        **launch_options(y.device),
    )


def _gated_norm(weights: DeltaWeights, x: Tensor, y: Tensor, out: Tensor) -> None:
    shape = weights.shape
    block = triton.next_power_of_2(shape.value_dim)
    gated_norm_kernel[(len(y), shape.num_value_heads)](
        x,
        y,
        weights.norm,
        out,
        y.stride(0),
        shape.channels,
        weights.eps,
        NUM_HEADS=shape.num_value_heads,
        TILED_KEYS=1 if shape.tiles is None else shape.tiles.num_keys,
        DIM=shape.value_dim,
        BLOCK=block,
        num_warps=max(1, block // 128),
        **launch_options(y.device),
    )
