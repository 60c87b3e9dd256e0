"""How many kernels a layer of a decode step launches, before and after fusion, on stand-ins.

Every operation of torch that computes counts as one launch, and so does every call of a kernel.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from adapters.attention.flashinfer.backend import FlashInferAttention
from adapters.attention.flashinfer.ports import DecodeKernels
from engine.worker.cpu.thread_pool import NativeThreadPool
from engine.worker.cuda.kernels import reference, tiling
from engine.worker.cuda.model.fusion import fused
from engine.worker.cuda.model.linears import FastProducts
from engine.worker.cuda.model.operators import CudaOperators
from engine.worker.model.layers import (
    AttentionBlock,
    Decoder,
    DecoderLayer,
    Mlp,
    RowParallelLinear,
)
from engine.worker.model.layout import padded
from engine.worker.model.rope import Rope
from engine.worker.ports import AttentionSpec, KVTensors, StepContext, StepLimits
from tests.adapters.attention.flashinfer_cases import Paged
from tests.flashinfer_stand_in import StandIn

CPU = torch.device("cpu")
HEADS, KV_HEADS, DIM, HIDDEN, INNER = 2, 2, 64, 64, 96
ROWS = 8
PAGES = 40
MOVES_NO_DATA = {
    "view", "_unsafe_view", "split", "split_with_sizes", "slice", "select", "t", "transpose",
    "unsqueeze", "squeeze", "expand", "as_strided", "detach", "alias", "permute", "empty",
    "empty_like", "empty_strided", "new_empty",
}  # fmt: skip


class LaunchCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts launches; what a kernel's stand-in computes with is not counted."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []
        self._is_inside = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func.overloadpacket.__name__
        if not self._is_inside and name not in MOVES_NO_DATA:
            self.names.append(name)
        return func(*args, **(kwargs or {}))

    @contextmanager
    def kernel(self, *names: str) -> Iterator[None]:
        """Counts as launches of these names, whatever happens inside."""
        if not self._is_inside:
            self.names += names
        before, self._is_inside = self._is_inside, True
        try:
            yield
        finally:
            self._is_inside = before

    def wrap(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **more: Any) -> Any:
            with self.kernel(name):
                return work(*args, **more)

        return run


class CountedStandIn(StandIn):
    """Our kernels for RoPE and cache write, and for attention of decodes."""

    def __init__(self, counter: LaunchCounter) -> None:
        super().__init__()
        self.counter = counter

    def rope_and_cache_write(self, kept: torch.dtype) -> Any:
        return self.counter.wrap("rope and write", super().rope_and_cache_write(kept))

    def decode_kernels(self) -> Any:
        kernels = super().decode_kernels()
        assert kernels is not None
        wrap = self.counter.wrap
        return DecodeKernels(wrap("attention", kernels.attend), wrap("merge", kernels.merge))


def triton_rows(counter: LaunchCounter) -> Any:
    """The module `kernels.rows`, computed by the reference."""
    names = ("rms_norm", "gated", "quantize_rows", "norm_and_quantize", "gate_and_quantize")
    kernels = {name: counter.wrap(name, getattr(reference, name)) for name in names}
    return SimpleNamespace(**kernels, MAX_WIDTH=32768, MAX_PAIR_WIDTH=16384, GATES=("silu",))


def triton_gemm(counter: LaunchCounter) -> Any:
    """The module `kernels.gemm`, computed by the reference."""

    def product(x: Tensor, weight: Tensor, tiling: Any, dtype: torch.dtype, after: Any) -> Tensor:
        x_scales, weight_scales, bias, add_to = after
        scales = None if x_scales is None else (x_scales, weight_scales)
        found = reference.product(x, weight, dtype, scales, bias, add_to)
        return found if add_to is None else cast(Tensor, add_to.copy_(found))

    def gated_product(name: str, x: Tensor, weight: Tensor, tiling: Any, bias: Any) -> Tensor:
        found = x.new_empty(len(x), len(weight) // 2)
        reference.gated(name, reference.product(x, weight, x.dtype, bias=bias), found)
        return found

    return SimpleNamespace(
        product=counter.wrap("product", product),
        gated_product=counter.wrap("gated_product", gated_product),
        takes=lambda x, weight: True,
        Epilogue=lambda *each: each,
    )


def noise(*shape: int, seed: int) -> Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return (made / shape[-1] ** 0.5 if len(shape) == 2 else made).bfloat16()


def decoder(
    counter: LaunchCounter, weights: str, *, is_fused: bool, is_ranked: bool = False
) -> Decoder:
    """Three equal layers, of one worker or of one of two ranks."""
    rows = triton_rows(counter) if is_fused or weights == "bfloat16" else None
    gemm = triton_gemm(counter) if is_fused else None
    fast = FastProducts(rows, gemm, is_batch_invariant=weights != "bfloat16")
    operators = CudaOperators(CPU, torch.bfloat16, weights, fast)

    def all_reduce(x: Tensor) -> None:
        with counter.kernel("all-reduce"):
            x.mul_(2)

    def layer(number: int) -> DecoderLayer:
        attention = AttentionBlock(
            number,
            HEADS,
            KV_HEADS,
            DIM,
            operators.linear([noise((HEADS + 2 * KV_HEADS) * DIM, HIDDEN, seed=1)], None),
            operators.linear([noise(HIDDEN, HEADS * DIM, seed=2)], None),
            rope=0,
        )
        gate = operators.activation("silu", is_gated=True)
        up = operators.linear([noise(2 * INNER, HIDDEN, seed=3)], None)
        down = operators.linear([noise(HIDDEN, INNER, seed=4)], None)
        if is_ranked:
            attention = replace(attention, out=RowParallelLinear(attention.out, all_reduce))
            down = RowParallelLinear(down, all_reduce)
        norms = [operators.rms_norm(noise(HIDDEN, seed=seed), 1e-5) for seed in (5, 6)]
        return DecoderLayer(norms[0], attention, norms[1], Mlp(up, down, gate))

    rope = Rope(1 / 100.0 ** (torch.arange(8) / 8))
    plain = Decoder((layer(0), layer(1), layer(2)), ropes=(rope,))
    found = fused(plain, rows if gemm else None)
    assert isinstance(found, Decoder)
    return found


def decode(weights: str, *, is_fused: bool, is_ranked: bool = False) -> tuple[Tensor, list[str]]:
    """Hidden states of a decode step, and the launches of its second of three layers."""
    counter = LaunchCounter()
    model = decoder(counter, weights, is_fused=is_fused, is_ranked=is_ranked)
    pages = torch.zeros((2, 3, PAGES + 1, 4, KV_HEADS, DIM), dtype=torch.bfloat16)
    cache = KVTensors(tuple(pages[0]), tuple(pages[1]), 1)
    limits = StepLimits(max_requests=ROWS, max_tokens=ROWS, max_model_len=64)
    spec = AttentionSpec(HEADS, KV_HEADS, DIM, 0.25, None, torch.bfloat16, limits=limits)
    stand_in = CountedStandIn(counter)
    stand_in.num_processors = 2 if is_fused else 400  # splits keys, as FlashInfer did in any graph
    attention = FlashInferAttention(spec, cache, NativeThreadPool(1), stand_in)
    step = padded(Paged(((3, 1),) * ROWS, 4).layout(), ROWS, spare_block=PAGES)
    attention.plan_captured(step)
    stand_in.catch_up()
    context = StepContext(torch.from_numpy(np.asarray(step.positions)), attention)
    hidden = noise(ROWS, HIDDEN, seed=9)
    with torch.inference_mode(), counter:
        ropes = model.rope_angles(context.positions)
        both = StepContext(context.positions, attention, None, ropes)
        model.blocks[0](hidden, both)
        counter.names.clear()
        model.blocks[1](hidden, both)
        names = list(counter.names)
        return model.blocks[2](hidden, both), names


BEFORE = [
    "rms_norm", "linear", "rope and write", "attention", "merge", "addmm_",
    "rms_norm", "linear", "gated", "addmm_",
]  # fmt: skip
AFTER = [
    "rms_norm", "product", "rope and write", "attention", "merge", "addmm_",
    "rms_norm", "gated_product", "addmm_",
]  # fmt: skip
AFTER_8_BITS = [
    "norm_and_quantize", "product", "rope and write", "attention", "merge", "quantize_rows",
    "product", "norm_and_quantize", "product", "gate_and_quantize", "product",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of qkv and up are wide enough for our kernel, those of o and down are not."""
    monkeypatch.setattr(tiling, "MIN_WIDE", 2 * INNER)


def test_a_layer_in_bfloat16_launches_9_kernels_instead_of_10() -> None:
    plain, before = decode("bfloat16", is_fused=False)
    found, after = decode("bfloat16", is_fused=True)
    assert before == BEFORE
    assert after == AFTER
    torch.testing.assert_close(found, plain, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("weights", ["int8", "fp8"])
def test_a_layer_in_8_bits_launches_11_kernels_instead_of_40(weights: str) -> None:
    plain, before = decode(weights, is_fused=False)
    found, after = decode(weights, is_fused=True)
    assert len(before) >= 40
    assert after == AFTER_8_BITS
    assert float((found - plain).norm() / plain.norm()) < 0.05


def test_a_layer_of_a_rank_launches_13_kernels_instead_of_14() -> None:
    plain, before = decode("bfloat16", is_fused=False, is_ranked=True)
    found, after = decode("bfloat16", is_fused=True, is_ranked=True)
    assert before == [
        "rms_norm", "linear", "rope and write", "attention", "merge", "linear",
        "all-reduce", "add_", "rms_norm", "linear", "gated", "linear", "all-reduce", "add_",
    ]  # fmt: skip
    assert after == [
        "rms_norm", "product", "rope and write", "attention", "merge", "linear", "all-reduce",
        "add_", "rms_norm", "gated_product", "linear", "all-reduce", "add_",
    ]  # fmt: skip
    torch.testing.assert_close(found, plain, rtol=2e-2, atol=5e-2)


def test_a_layer_of_a_rank_in_8_bits_norms_and_quantizes_in_one_launch() -> None:
    _, after = decode("int8", is_fused=True, is_ranked=True)
    assert after.count("norm_and_quantize") == 2
    assert len(after) == 15
