"""Loads the Triton kernels and verifies each of them on this GPU before a worker uses it.

A kernel that cannot be compiled, or computes something else than its reference, is named in the
log, and torch or FlashInfer is used in its place: a new GPU or Triton version can make a worker
slower, not wrong. A kernel that makes the GPU fault is left out by the next start. Compiled kernels
are cached by Triton, so that only the first start takes long.
"""

import functools
import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from engine.errors import KernelFaulted
from engine.step import NO_STATE
from engine.worker.cuda.choice_file import ChoiceFile, KernelTrials, file_of
from engine.worker.cuda.kernels import reference
from engine.worker.cuda.kernels.reference import (
    CHUNK,
    FP8,
    CacheRows,
    DecodeKeys,
    FourBitWeight,
    QuantizedRows,
    RowBlocks,
    Scoring,
)
from engine.worker.cuda.kernels.tiling import (
    EIGHT_BIT,
    FEW_ROWS_4_BIT,
    FIXED,
    FIXED_4_BIT,
    GATED,
    MORE_ROWS_8_BIT,
    MORE_ROWS_GATED,
    MORE_ROWS_LONG,
    NARROW,
    NARROW_4_BIT,
    NARROW_FP8,
    WIDE,
)
from engine.worker.model.experts import route
from engine.worker.model.torch_operators import TorchOperators
from engine.worker.ports import (
    ConvShape,
    ConvWeights,
    DeltaShape,
    DeltaWeights,
    MambaShape,
    MambaWeights,
    RecurrentWeights,
    Routing,
    StateRuns,
)

logger = logging.getLogger(__name__)

PACKAGE = "engine.worker.cuda.kernels"
NOT_USED = "Triton kernel %s is not used, torch takes its place: %s"


class WrongResult(Exception):
    """A kernel ran and computed something else than its reference."""


@dataclass(frozen=True, slots=True)
class TritonKernels:
    """Modules with verified kernels; None where a kernel is not used."""

    rope_and_cache_write: ModuleType | None = None
    rows: ModuleType | None = None
    sampling: ModuleType | None = None
    gemm: ModuleType | None = None
    four_bit: ModuleType | None = None
    fp8_weights: ModuleType | None = None
    parts: ModuleType | None = None
    decode_attention: ModuleType | None = None
    recurrence: ModuleType | None = None
    lora: ModuleType | None = None
    experts: ModuleType | None = None


NO_KERNELS = TritonKernels()


@dataclass(frozen=True, slots=True)
class Trial:
    """Small inputs of one worker's kind."""

    place: torch.device
    dtype: torch.dtype

    def noise(self, *shape: int, seed: int = 0) -> Tensor:
        """Normal numbers."""
        made = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        return made.to(self.place, self.dtype)

    def rope_and_cache_write(self, module: ModuleType) -> None:
        """RoPE in place, and keys and values in their slots."""
        angles = torch.arange(3 * 32, device=self.place).view(3, 32) / 7
        pair = angles.cos(), angles.sin()
        found = []
        for write in (module.rope_and_cache_write, reference.rope_and_cache_write):
            qkv = self.noise(3, 8, 64)
            q, k, v = torch.split(qkv, [4, 2, 2], dim=1)
            keys, values = (
                torch.zeros(3, 3, 2, 64, dtype=self.dtype, device=self.place) for _ in "kv"
            )
            slots = torch.tensor([4, 0, 7], device=self.place)
            write(q, k, v, pair, CacheRows(slots, keys, values))
            found.append((q, keys, values))
        for one, other in zip(*found, strict=True):
            check("RoPE and cache write", one, other)

    def rows(self, module: ModuleType) -> None:
        """Norms, also of heads in place, gates, and after them rows in int8, and in fp8 where the
        GPU has it."""
        x, weight = self.noise(3, 96), self.noise(96, seed=1)
        found = []
        for kernels in (module, reference):
            heads = self.noise(3, 4, 96, seed=2)
            outs = torch.empty_like(x), heads[:, 1:], x.new_empty(3, 48)
            kernels.rms_norm(x, weight, 1e-5, outs[0])
            kernels.rms_norm(outs[1], weight, 1e-5, outs[1])
            kernels.gated("silu", x, outs[2])
            found.append(outs)
        for what, one, other in zip(("norm", "norm of heads", "gate"), *found, strict=True):
            check(what, one, other)
        for dtype in (torch.int8, FP8) if has_fp8(self.place) else (torch.int8,):
            pairs = (
                (module.quantize_rows(x, dtype), reference.quantize_rows(x, dtype)),
                (
                    module.norm_and_quantize(x, weight, 1e-5, dtype),
                    reference.norm_and_quantize(x, weight, 1e-5, dtype),
                ),
                (
                    module.gate_and_quantize("silu", x, dtype),
                    reference.gate_and_quantize("silu", x, dtype),
                ),
            )
            for found, wanted in pairs:
                check("quantized rows", _expanded(found), _expanded(wanted))

    def sampling(self, module: ModuleType) -> None:
        """The ids at points of a filtered distribution, by hand."""
        logits = torch.zeros(3, 1000, device=self.place)
        logits[:, 7], logits[:, 400], logits[:, 999] = 5.0, 4.0, 4.0
        each = [torch.full((3,), value, device=self.place) for value in (1.0, 0.0)]
        top_ks = torch.full((3,), 3, device=self.place)
        top_ps = torch.full((3,), 0.7, device=self.place, dtype=torch.float64)
        points = torch.tensor([0.0, 0.5, 0.99], device=self.place, dtype=torch.float64)
        found = module.sample(logits, *each, top_ks, top_ps, points)
        if found.tolist() != [7, 7, 400]:
            raise WrongResult(f"sampled {found.tolist()} instead of [7, 7, 400]")

    def gemm(self, module: ModuleType) -> None:
        """Products in this dtype, with splits and with a gate, and in int8 with splits."""
        x, weight, add_to = self.noise(5, 160), self.noise(72, 160, seed=1), self.noise(5, 72)
        x8, weight8 = ((20 * each).to(torch.int8) for each in (x, weight))
        for tiling, left, right in (
            (FIXED, x, weight),
            (WIDE, x, weight),
            (NARROW, x, weight),
            (MORE_ROWS_LONG, x, weight),
            (replace(EIGHT_BIT, splits=4), x8, weight8),
            (MORE_ROWS_8_BIT, x8, weight8),
        ):
            wanted = reference.product(left, right, self.dtype, add_to=add_to)
            epilogue = module.Epilogue(add_to=add_to.clone())
            check("product", module.product(left, right, tiling, self.dtype, epilogue), wanted)
        wanted = self.noise(5, 36)
        reference.gated("silu", reference.product(x, weight, self.dtype), wanted)
        for tiling in (GATED, MORE_ROWS_GATED):
            check("gated product", module.gated_product("silu", x, weight, tiling), wanted)

    def four_bit(self, module: ModuleType) -> None:
        """Weights of integers with offsets and of MXFP4: unpacked, and their products, also of rows
        of the second of two experts."""
        codes = torch.arange(48 * CHUNK, device=self.place).remainder(251).remainder(16)
        words = reference.pack(codes.view(48, CHUNK)).contiguous()
        numbers = self.noise(4, 48).to(torch.float16)
        exponents = torch.full((4, 48), 126, dtype=torch.uint8, device=self.place)
        table = torch.tensor([[1, 0, 5]], dtype=torch.int32, device=self.place)
        x, add_to = self.noise(5, CHUNK, seed=1), self.noise(5, 48, seed=2)
        for scales, offsets in ((numbers, numbers.flip(0)), (exponents, None)):
            weight = FourBitWeight(words, scales, offsets, 32, CHUNK)
            plain = reference.unpack(weight, slice(0, 48), self.dtype)
            check("4-bit weight", module.unpack(weight, slice(0, 48), self.dtype), plain)
            wanted = reference.product(x, plain, self.dtype, add_to=add_to)
            for tiling in (FIXED_4_BIT, NARROW_4_BIT):
                after = module.Epilogue(add_to=add_to.clone())
                check("4-bit product", module.product(x, weight, tiling, after), wanted)
            blocks = RowBlocks(table, num_experts=2)
            found = module.product(x, weight, FEW_ROWS_4_BIT, module.Epilogue(), blocks)
            check("4-bit experts", found, reference.product(x, plain[24:], self.dtype))

    def fp8_weights(self, module: ModuleType) -> None:
        """Products with weights that have scales of blocks, and of output channels with splits."""
        x, scales = self.noise(5, 160), self.noise(72, 5, seed=2).float().abs()
        bits = torch.arange(72 * 160, device=self.place) % 127  # all finite numbers from 0 on
        values = bits.to(torch.uint8).view(72, 160).view(FP8)
        for run, tiling in ((32, replace(FIXED, block_k=32)), (160, NARROW_FP8)):
            count = -(-160 // run)
            weight = values.float() * scales[:, :count].repeat_interleave(run, dim=1)
            found = module.product(x, values, scales[:, :count].contiguous(), run, tiling)
            check("product with fp8", found, reference.product(x, weight, self.dtype))

    def parts(self, module: ModuleType) -> None:
        """Attention over one, two and three parts of keys, and sinks."""
        found, sums = self.noise(6, 4, 64), self.noise(6, 4, seed=1).float()
        first = torch.tensor([0, 1, 3, 6], dtype=torch.int32, device=self.place)
        one, other = (self.noise(3, 4, 64) for _ in range(2))
        for sinks in (None, self.noise(4, seed=2).float()):
            module.merge_parts(found, sums, first, one, sinks)
            reference.merge_parts(found, sums, first, other, sinks)
            check("attention over parts", one, other)

    def decode_attention(self, module: ModuleType) -> None:
        """A row with one run of keys and one with two, in this dtype and in fp8."""
        q, numbers = self.noise(2, 8, 64), self.noise(2, 9, 16, 2, 64, seed=1)
        pages = torch.arange(9, dtype=torch.int32, device=self.place).flip(0)
        runs = [[0, 0, 0, 70], [~1, 5, 0, 32], [~1, 5, 32, 33], [0, 0, 0, 0]]
        read = DecodeKeys(torch.tensor(runs, dtype=torch.int32, device=self.place), pages)
        for keys, values in (numbers, numbers.to(FP8)) if has_fp8(self.place) else (numbers,):
            results = []
            for attend in (module.attend_decodes, reference.attend_decodes):
                parts = q.new_zeros(4, 8, 64, dtype=torch.float32), q.new_zeros(4, 8).float()
                results.append((torch.zeros_like(q), *parts))
                attend(q, keys, values, read, results[-1][0], parts, Scoring(0.2))
            for one, other in zip(*results, strict=True):
                check("attention of decodes", one, other)

    def recurrence(self, module: ModuleType) -> None:
        """A decode, a run that begins and one that goes on, of each kind of recurrent layer."""
        rows, writes = [[0, 1, 1], [1, 9, NO_STATE], [9, 11, 2]], np.full((11, 2), NO_STATE)
        writes[[0, 3, 8, 10], 0] = 1, 4, 0, 3
        on_device = torch.tensor(rows).to(self.place), torch.from_numpy(writes).to(self.place)
        runs = StateRuns(np.array(rows), writes, on_device)
        for weights, width in self._recurrent_layers():
            found = []
            for made in (partial(module.recurrence, weights), TorchOperators().recurrence(weights)):
                states = [self.noise(5, *size).float() for size in weights.shape.state_sizes]
                y = self.noise(11, width, seed=1)
                found.append((made(y, tuple(states), runs), *states))
            for one, other in zip(*found, strict=True):
                check("recurrent layer", one, other)

    def lora(self, module: ModuleType) -> None:
        """Rows of two adapters, of which one changes the second part only, and of none."""
        x, y, slots = self.noise(3, 300), self.noise(3, 96, seed=1), torch.tensor([1, -1, 0])
        downs = self.noise(20, 300, seed=2), self.noise(5, 300, seed=3)
        ups = self.noise(64, 12, seed=4), self.noise(32, 8, seed=5), self.noise(32, 5, seed=6)
        entries = [
            [downs[0].data_ptr(), 20, ups[0].data_ptr(), 0, 12, ups[1].data_ptr(), 12, 8],
            [downs[1].data_ptr(), 5, 0, 0, 0, ups[2].data_ptr(), 0, 5],
        ]
        blocks = torch.tensor([[0, 0, 0, 64], [1, 64, 64, 96]], dtype=torch.int32)
        table = module.LoraTable(torch.tensor(entries).to(self.place), blocks.to(self.place), 20)
        wanted = y.float()
        wanted[2, :64] += ups[0].float() @ (downs[0][:12].float() @ x[2].float())
        wanted[2, 64:] += ups[1].float() @ (downs[0][12:].float() @ x[2].float())
        wanted[0, 64:] += ups[2].float() @ (downs[1].float() @ x[0].float())
        module.add_low_rank(x, y, table, slots.to(self.place))
        check("LoRA", y, wanted)

    def experts(self, module: ModuleType) -> None:
        """Three of seven experts of each row, in the order of experts, and their sums."""
        found, added = self.noise(15, 40, seed=1), self.noise(5, 40, seed=2)
        logits = self.noise(5, 7).float().argsort(dim=1).to(self.dtype) / 2  # none are equal
        routing = Routing(3, renormalizes=True)
        ids, weights = route(logits, routing)
        experts, order = ids.flatten().sort(stable=True)
        choices = module.choose(logits, routing)
        places = order.argsort().view(5, 3)
        for one, other in (
            (choices.weights, weights),
            (choices.experts + 1, experts + 1),  # so that there is no division by zero
            (choices.sources + 1, order // 3 + 1),
            (choices.places + 1, places + 1),
            (choices.ends, torch.bincount(experts, minlength=7).cumsum(0)),
        ):
            check("routing", one, other, allowed=1e-2)
        wanted = added + (found.float()[places] * weights[:, :, None]).sum(dim=1)
        check("sum of experts", module.add_up(found, choices, added), wanted)

    def _recurrent_layers(self) -> list[tuple[RecurrentWeights, int]]:
        """One of each kind, and the columns that it reads."""

        def numbers(*shape: int, seed: int) -> Tensor:
            return self.noise(*shape, seed=seed).float()

        conv, delta, mamba = (
            ConvShape(40, 3),
            DeltaShape(2, 4, 16, 16, 4),
            MambaShape(1, 2, 32, 16, 4),
        )
        of_delta = numbers(128, 4, seed=2), -numbers(4, seed=3).exp(), numbers(4, seed=4)
        of_mamba = numbers(96, 4, seed=2), numbers(96, seed=5), -numbers(2, seed=3).exp()
        return [
            (ConvWeights(conv, numbers(40, 3, seed=2), numbers(40, seed=3)), 3 * 40),
            (DeltaWeights(delta, *of_delta, numbers(16, seed=5), 1e-6), 128 + 4 * (16 + 2)),
            (MambaWeights(mamba, *of_mamba, *numbers(2, 2, seed=4)), 96 + 2 * (16 + 1)),
        ]


TRIALS: dict[str, tuple[str, Callable[[Trial, ModuleType], None]]] = {
    "rope_and_cache_write": ("rope_and_cache_write", Trial.rope_and_cache_write),
    "rows": ("rows", Trial.rows),
    "sampling": ("sampling", Trial.sampling),
    "gemm": ("gemm", Trial.gemm),
    "four_bit": ("four_bit", Trial.four_bit),
    "fp8_weights": ("fp8_weights", Trial.fp8_weights),
    "parts": ("parts", Trial.parts),
    "decode_attention": ("decode_attention", Trial.decode_attention),
    "recurrence": ("recurrence", Trial.recurrence),
    "lora": ("lora", Trial.lora),
    "experts": ("experts", Trial.experts),
}


@functools.cache  # each kernel is verified once in a process
def load(place: torch.device, dtype: torch.dtype, choices: str = "") -> TritonKernels:
    """The kernels that compile and compute correctly on this device; the log names the others.

    Trials are noted in a file of the directory `choices`, if it is not "". Raises `KernelFaulted`.
    """
    found: dict[str, ModuleType] = {}
    trials = kernel_trials(place, choices)
    for name, (module, trial) in TRIALS.items():
        if reason := trials.excluded(name):
            logger.warning(NOT_USED, name, reason)
            continue
        try:
            kernels = importlib.import_module(f"{PACKAGE}.{module}")
            with trials.trial(name, "--attention reference"), torch.inference_mode():
                trial(Trial(place, dtype), kernels)
        except KernelFaulted:
            raise
        except Exception as error:  # a compiler may raise anything; torch does the kernel's work
            line = next(iter(str(error).splitlines()), "") or type(error).__name__
            logger.warning(NOT_USED, name, line)
        else:
            found[name] = kernels
    return TritonKernels(**found)


def kernel_trials(
    place: torch.device, choices: str, synchronize: Callable[[], None] | None = None
) -> KernelTrials:
    """The trials of our kernels on the kind of GPU at `place`; `synchronize` waits for its work."""
    if place.type != "cuda":
        return KernelTrials(ChoiceFile(None), synchronize or (lambda: None))
    words = torch.cuda.get_device_name(place), "torch", torch.__version__, "kernel trials"
    wait = synchronize or (lambda: torch.cuda.synchronize(place))
    return KernelTrials(ChoiceFile(file_of(choices, *words)), wait)


def check(what: str, found: Tensor, wanted: Tensor, allowed: float = 2e-2) -> None:
    """Raise `WrongResult` if the relative error (L2) exceeds what rounding explains."""
    error = float((found.float() - wanted.float()).norm() / wanted.float().norm())
    if not error < allowed:
        raise WrongResult(f"{what}: relative error {error:.2g} against plain torch")


def has_fp8(place: torch.device) -> bool:
    """Whether the device converts to fp8; the interpreter on a CPU does."""
    return place.type != "cuda" or torch.cuda.get_device_capability(place) >= (8, 9)


def _expanded(rows: QuantizedRows) -> Tensor:
    return rows.values.float() * rows.scales
