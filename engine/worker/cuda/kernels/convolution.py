"""The short convolution of recurrent layers: alone, between gates (LFM2), or ahead of a scan.

All is float32. The reference is `engine.worker.model.short_conv`.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
import triton
import triton.language as tl
from torch import Tensor

from engine.worker.cuda.kernels.dependent import launch_options, wait
from engine.worker.ports import ConvWeights, DeltaWeights, RecurrentWeights, StateRuns

MAX_TAPS = 4
CHANNELS = 256  # per program
ROWS = tl.constexpr(16)  # per program, behind the first rows of a run


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _input(y, row, channel, mask, num_channels, y_row, IS_GATED: tl.constexpr):
    """What is convolved: B x of a gated convolution, else the first columns."""
    at = y + row * y_row + channel
    found = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    if IS_GATED:
        found *= tl.load(at + 2 * num_channels, mask=mask, other=0.0).to(tl.float32)
    return found


@triton.jit
def _before(at, mask, stride, TAPS: tl.constexpr):
    """What lies 1, 2 and 3 strides before `at`, as far as there are taps for it."""
    past1 = tl.load(at - stride, mask=mask, other=0.0)
    past2 = past1
    past3 = past1
    if TAPS > 2:
        past2 = tl.load(at - 2 * stride, mask=mask, other=0.0)
    if TAPS > 3:
        past3 = tl.load(at - 3 * stride, mask=mask, other=0.0)
    return past1, past2, past3


@triton.jit
def _inputs_before(
    y, row, channel, mask, num_channels, y_row, IS_GATED: tl.constexpr, TAPS: tl.constexpr
):
    """The inputs 1, 2 and 3 rows before one of this step."""
    past1 = _input(y, row - 1, channel, mask, num_channels, y_row, IS_GATED)
    past2 = past1
    past3 = past1
    if TAPS > 2:
        past2 = _input(y, row - 2, channel, mask, num_channels, y_row, IS_GATED)
    if TAPS > 3:
        past3 = _input(y, row - 3, channel, mask, num_channels, y_row, IS_GATED)
    return past1, past2, past3


@triton.jit
def _write(state, slot, past1, past2, past3, channel, mask, num_channels, TAPS: tl.constexpr):
    """A state has the oldest input first."""
    at = state + (slot * (TAPS - 1) + TAPS - 1) * num_channels + channel
    mask = tl.where(mask, slot, -1) >= 0
    tl.store(at - num_channels, past1, mask=mask)
    if TAPS > 2:
        tl.store(at - 2 * num_channels, past2, mask=mask)
    if TAPS > 3:
        tl.store(at - 3 * num_channels, past3, mask=mask)


@triton.jit
def convolution_kernel(
    y,
    weights,
    bias,
    state,
    runs,
    writes,
    out,
    num_channels,
    y_row,
    TAPS: tl.constexpr,
    IS_FIRST: tl.constexpr,
    IS_GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Grid: runs × blocks of channels, for the first `TAPS - 1` rows of each run, which read its
    state; then, in another launch, × blocks of the rows behind them. So a state is read before it
    is overwritten."""
    wait(IS_DEPENDENT)
    run = runs + tl.program_id(0) * 3
    start, stop, source = tl.load(run), tl.load(run + 1), tl.load(run + 2)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = channel < num_channels
    tap1, tap2, tap3 = _before(weights + channel * TAPS + TAPS - 1, mask, 1, TAPS)
    tap0 = tl.load(weights + channel * TAPS + TAPS - 1, mask=mask, other=0.0)
    if IS_FIRST:
        at = state + (source * (TAPS - 1) + TAPS - 1) * num_channels + channel
        is_known = tl.where(mask, source, -1) >= 0
        past1, past2, past3 = _before(at, is_known, num_channels, TAPS)
        stop = tl.minimum(stop, start + TAPS - 1)
    else:
        start += TAPS - 1 + tl.program_id(2) * ROWS
        stop = tl.minimum(stop, start + ROWS)
        is_read = tl.where(mask, start, stop) < stop
        past1, past2, past3 = _inputs_before(
            y, start, channel, is_read, num_channels, y_row, IS_GATED, TAPS
        )
    for row in range(start, stop):
        newest = _input(y, row, channel, mask, num_channels, y_row, IS_GATED)
        mixed = tl.fma(past1, tap1, newest * tap0)  # a compiler would round either product
        if TAPS > 2:
            mixed = tl.fma(past2, tap2, mixed)
        if TAPS > 3:
            mixed = tl.fma(past3, tap3, mixed)
        if HAS_BIAS:
            mixed += tl.load(bias + channel, mask=mask, other=0.0)
        past3, past2, past1 = past2, past1, newest
        if IS_GATED:
            by = y + row * y_row + num_channels + channel
            mixed *= tl.load(by, mask=mask, other=0.0).to(tl.float32)
        else:
            mixed = silu(mixed)
        to = out + row * num_channels + channel
        tl.store(to, mixed.to(out.dtype.element_ty), mask=mask)
        for which in tl.static_range(2):
            slot = tl.load(writes + row * 2 + which)
            _write(state, slot, past1, past2, past3, channel, mask, num_channels, TAPS)


def numbers_of(runs: StateRuns) -> tuple[Tensor, Tensor]:
    """The runs of a step and what they write, on the device."""
    assert runs.on_device is not None, "a GPU's steps have their runs on the device"
    return runs.on_device


def convolved(
    weights: RecurrentWeights, y: Tensor, state: Tensor, runs: StateRuns, out: Tensor
) -> Tensor:
    """`out` `[rows, channels]` behind the convolution of y, with gates or SiLU; the states of the
    runs are read and written."""
    channels, taps = weights.conv.shape
    bias = None if isinstance(weights, DeltaWeights) else weights.conv_bias
    block = min(CHANNELS, triton.next_power_of_2(channels))
    grid = (len(runs.runs), triton.cdiv(channels, block))
    behind = triton.cdiv(max(0, runs.longest - (taps - 1)), ROWS.value)
    for is_first in (True, False) if behind else (True,):
        convolution_kernel[grid if is_first else (*grid, behind)](
            y,
            weights.conv,
            weights.conv if bias is None else bias,
            state,
            *numbers_of(runs),
            out,
            channels,
            y.stride(0),
            TAPS=taps,
            IS_FIRST=is_first,
            IS_GATED=isinstance(weights, ConvWeights),
            HAS_BIAS=bias is not None,
            BLOCK=block,
            num_warps=max(1, block // 64),
            **launch_options(y.device),
        )
    return out
