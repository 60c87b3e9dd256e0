"""`Operators` over native kernels: tensors in, addresses to the thread pool, tensors out.

A layer keeps the operands of its kernel and updates what changes from call to call, so a call
costs a few microseconds of Python.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from engine.worker.cpu.kernel_call import KernelCall
from engine.worker.cpu.kernels import (
    delta_rule,
    elementwise,
    experts,
    heads,
    joined,
    mamba,
    recurrence,
    sampling,
)
from engine.worker.cpu.linears.experts import NativeExperts, expert_linears
from engine.worker.cpu.linears.heads import NativeHeads
from engine.worker.cpu.linears.loras import NativeLoras
from engine.worker.cpu.linears.packed import MixedLinear, PackedLinear
from engine.worker.cpu.linears.packed_store import PackedStore
from engine.worker.cpu.recorded_decoder import RecordedDecoder
from engine.worker.cpu.recurrent import NativeConvolution, native_recurrence
from engine.worker.cpu.sampling import NativeSampling
from engine.worker.cpu.thread_pool import NativeThreadPool
from engine.worker.model.layers import Decoder
from engine.worker.model.torch_operators import TorchOperators
from engine.worker.ports import (
    Activation,
    ExpertWeights,
    Linear,
    LinearWeight,
    RecurrentWeights,
    Routing,
    StageModel,
    ThreadPool,
)

ACTIVATIONS = {
    "silu": elementwise.SILU,
    "swish": elementwise.SILU,
    "gelu": elementwise.GELU,
    "gelu_new": elementwise.GELU_TANH,
    "gelu_pytorch_tanh": elementwise.GELU_TANH,
    "relu": elementwise.RELU,
    "relu2": elementwise.RELU_SQUARED,
}


class NativeNorm:
    """Root mean square norm, or layer norm if there is a bias."""

    def __init__(self, pool: ThreadPool, weight: Tensor, bias: Tensor | None, eps: float) -> None:
        self._weights = weight, bias  # kernels keep addresses only
        self._pool = pool
        self._dim = len(weight)
        kernel = elementwise.rms_norm if bias is None else elementwise.layer_norm
        operands = elementwise.NormOperands(
            weight=weight.data_ptr(),
            bias=0 if bias is None else bias.data_ptr(),
            eps=eps,
            dim=self._dim,
        )
        self._call = KernelCall(pool, kernel, operands)

    def __call__(self, x: Tensor, add_to: Tensor | None = None) -> Tensor:
        y = self._pool.empty("norm", (len(x), self._dim)) if add_to is None else add_to
        self._run(x, y, 1, adds=add_to is not None)
        return y

    def apply_(self, heads: Tensor) -> None:
        self._run(heads, heads, heads.shape[1])

    def _run(self, x: Tensor, y: Tensor, groups: int, *, adds: bool = False) -> None:
        operands = self._call.operands
        operands.adds = adds
        operands.x, operands.x_stride = x.data_ptr(), x.stride(0)
        operands.y, operands.y_stride = y.data_ptr(), y.stride(0)
        operands.groups = groups
        self._call.over_rows(len(x))


class NativeActivation:
    """An activation that has a kernel, gated or not."""

    def __init__(self, pool: ThreadPool, function: int, is_gated: bool) -> None:
        self._pool = pool
        self._is_gated = is_gated
        operands = elementwise.ActivationOperands(function=function, is_gated=is_gated)
        self._call = KernelCall(pool, elementwise.activation, operands)

    def __call__(self, x: Tensor, by: Tensor | None = None) -> Tensor:
        """Gated: times `by`, or half of x times the other half."""
        rows, width = x.shape
        if self._is_gated and by is None:
            width //= 2
            by = x[:, width:]
        y = self._pool.empty("activation", (rows, width))
        operands = self._call.operands
        if by is not None:
            operands.by, operands.by_stride = by.data_ptr(), by.stride(0)
        operands.x, operands.x_stride = x.data_ptr(), x.stride(0)
        operands.y, operands.y_stride = y.data_ptr(), y.stride(0)
        operands.width = width
        self._call.over_rows(rows)
        return y


class NativeSwiglu:
    """gpt-oss' gate, `Operators.clamped_swiglu`."""

    def __init__(self, pool: ThreadPool, alpha: float, limit: float) -> None:
        self._pool = pool
        operands = elementwise.SwigluOperands(alpha=alpha, limit=limit)
        self._call = KernelCall(pool, elementwise.clamped_swiglu, operands)

    def __call__(self, x: Tensor) -> Tensor:
        rows, width = len(x), x.shape[1] // 2
        y = self._pool.empty("activation", (rows, width))
        operands = self._call.operands
        operands.x, operands.x_stride = x.data_ptr(), x.stride(0)
        operands.y, operands.y_stride = y.data_ptr(), y.stride(0)
        operands.width = width
        self._call.over_rows(rows)
        return y


def _attended(part: tuple[Tensor, ...]) -> Tensor:
    with torch.inference_mode():  # inference mode holds for one thread
        return TorchOperators().attend(*part)


def _fill_gates(operands: elementwise.HeadGateOperands, x: Tensor, y: Tensor, heads: int) -> None:
    operands.x, operands.x_stride = x.data_ptr(), x.stride(0)
    operands.y, operands.y_stride = y.data_ptr(), y.stride(0)
    operands.heads, operands.dim = heads, y.shape[2]


class NativeOperators:
    """`Operators` over native kernels. Activations without a kernel are torch's."""

    def __init__(self, pool: NativeThreadPool, store: PackedStore | None = None) -> None:
        """Without a `store` all linears are float32."""
        self._pool = pool
        self._store = store or PackedStore({})
        self._torch = TorchOperators()
        self._heads: ThreadPoolExecutor | None = None  # from the first image on
        self._rope = KernelCall(pool, elementwise.apply_rope, elementwise.RopeOperands())
        self._gate_rows = KernelCall(pool, elementwise.gate_rows, elementwise.GateRowsOperands())
        gates = elementwise.HeadGateOperands
        self._without_gates = KernelCall(pool, elementwise.without_gates, gates())
        self._gate_heads = KernelCall(pool, elementwise.gate_heads, gates())
        self.sampling = NativeSampling(pool)
        self.heads = NativeHeads(pool, self._store)
        self.loras = NativeLoras(pool)

    @property
    def kernels(self) -> tuple[Callable[..., None], ...]:
        """Every kernel that these operators may run."""
        return (
            *elementwise.KERNELS,
            joined.run_joined,
            *recurrence.KERNELS,
            *delta_rule.KERNELS,
            *mamba.KERNELS,
            *self._store.kernels,
            *experts.KERNELS,
            *heads.KERNELS,
            *sampling.KERNELS,
        )

    @property
    def usual_kernels(self) -> tuple[Callable[..., None], ...]:
        """The kernels of a dense model. Others are compiled when a layer is made that runs them."""
        common = elementwise.rms_norm, elementwise.apply_rope, elementwise.activation
        return *common, joined.run_joined, *self._store.usual_kernels, sampling.argmax

    def recorded(self, model: StageModel, num_ranks: int) -> StageModel:
        """The same model; its steps replay recorded kernels if they run nothing else."""
        if isinstance(model, Decoder) and num_ranks == 1:
            return RecordedDecoder(
                model, self._pool, self.sampling.run_argmax, self.sampling.largest
            )
        return model

    def linear(self, weights: Sequence[LinearWeight], bias: Tensor | None) -> Linear:
        """One linear; neighbours of one format are packed together."""
        parts, first = [], 0
        for linears, packed in self._store.packed(self._pool, weights):
            own_bias = None if bias is None else bias[first : first + packed.outputs]
            parts.append(PackedLinear(self._pool, linears, packed, own_bias))
            first += packed.outputs
        return parts[0] if len(parts) == 1 else MixedLinear(self._pool, parts)

    def experts(
        self, experts: Sequence[ExpertWeights], routing: Routing, activation: Activation
    ) -> NativeExperts:
        gates, downs = (
            [(each.gate, each.up) for each in experts],
            [(each.down,) for each in experts],
        )
        up_biases = [each.up_bias for each in experts]
        down_biases = [each.down_bias for each in experts]
        up = expert_linears(self._pool, self._store, gates, up_biases, "up")
        down = expert_linears(self._pool, self._store, downs, down_biases, "down")
        return NativeExperts(self._pool, up, down, activation, routing)

    def constant(self, tensor: Tensor) -> Tensor:
        return tensor

    def rms_norm(self, weight: Tensor, eps: float) -> NativeNorm:
        return NativeNorm(self._pool, weight, None, eps)

    def layer_norm(self, weight: Tensor, bias: Tensor, eps: float) -> NativeNorm:
        return NativeNorm(self._pool, weight, bias, eps)

    def activation(self, name: str, *, is_gated: bool) -> Callable[[Tensor], Tensor]:
        if name in ACTIVATIONS:
            return NativeActivation(self._pool, ACTIVATIONS[name], is_gated)
        return self._torch.activation(name, is_gated=is_gated)

    def clamped_swiglu(self, alpha: float, limit: float) -> NativeSwiglu:
        return NativeSwiglu(self._pool, alpha, limit)

    def scale(self, factor: float) -> Callable[[Tensor], Tensor]:
        call = KernelCall(self._pool, elementwise.scale, elementwise.ScaleOperands(factor=factor))

        def apply(x: Tensor) -> Tensor:
            operands = call.operands
            operands.x, operands.x_stride, operands.width = x.data_ptr(), x.stride(0), x.shape[1]
            call.over_rows(len(x))
            return x

        return apply

    def gate(self, name: str) -> Callable[[Tensor, Tensor], Tensor]:
        if name in ACTIVATIONS:
            return NativeActivation(self._pool, ACTIVATIONS[name], is_gated=True)
        return self._torch.gate(name)

    def gate_rows_(self, x: Tensor, scores: Tensor) -> None:
        operands = self._gate_rows.operands
        operands.x, operands.x_stride, operands.width = x.data_ptr(), x.stride(0), x.shape[1]
        operands.scores, operands.scores_stride = scores.data_ptr(), scores.stride(0)
        self._gate_rows.over_rows(len(x))

    def without_gates(self, y: Tensor, heads: int) -> Tensor:
        rows, count, dim = y.shape
        qkv = self._pool.empty("attention inputs", (rows, count - heads, dim))
        _fill_gates(self._without_gates.operands, qkv, y, heads)
        self._without_gates.operands.rest = (count - 2 * heads) * dim
        self._without_gates.over_rows(rows)
        return qkv

    def gate_heads_(self, x: Tensor, y: Tensor) -> None:
        heads = x.shape[1] // y.shape[2]
        _fill_gates(self._gate_heads.operands, x, y, heads)
        self._gate_heads.over_rows(len(x))

    def apply_rope_(self, heads: Tensor, cos: Tensor, sin: Tensor) -> None:
        rows, count, dim = heads.shape
        operands = self._rope.operands
        operands.x, operands.x_stride = heads.data_ptr(), heads.stride(0)
        operands.cos, operands.sin = cos.data_ptr(), sin.data_ptr()
        operands.heads, operands.half = count, dim // 2
        self._rope.over_rows(rows)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Torch's kernel, some heads in each thread, while the pool's helpers sleep."""
        count = min(self._pool.threads, q.shape[1])
        if count == 1:
            return self._torch.attend(q, k, v)
        was_awake = self._pool.is_awake
        self._pool.rest()
        parts = zip(*(each.tensor_split(count, dim=1) for each in (q, k, v)), strict=True)
        if self._heads is None:
            self._heads = ThreadPoolExecutor(count, "podway-heads")
        mixed = torch.cat(list(self._heads.map(_attended, parts)), dim=1)
        if was_awake:
            self._pool.wake()
        return mixed

    def recurrence(self, weights: RecurrentWeights) -> NativeConvolution:
        return native_recurrence(self._pool, weights)
