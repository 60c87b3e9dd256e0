"""Attention over the paged KV cache: what a backend is given, and what it has to do."""

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from engine.worker.ports.kv import KVTensors
from engine.worker.ports.layout import RaggedLayout
from engine.worker.ports.shapes import StepLimits

NO_LIMIT = 1 << 40  # tokens


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """One kind of attention layer. Scores are `q · k * scale`, in float32.

    A stage whose layers differ has several specs (`engine.worker.model.mixed_attention`). `window`,
    `soft_cap`, `has_sinks`, `is_causal` and `sees_images` are those of `AttentionOptions`. Without
    `has_own_kv`, `run` gets no keys and values, and reads those that another layer has written.
    `cache_head_dim` is the head size that the cache has room for, None for `head_dim`.
    `values_from` is that of `ModelShape`: `run` gets no values then.
    `dtype` is the dtype of q, k, v and of the attention output. The KV cache may have another
    dtype: a cached number times `k_scale` or `v_scale` is the key or value. Backends on a GPU
    need `limits`. Batch-invariant: a token's attention has the same bits whatever else is in the
    step, as far as the backend can. Choices that a backend measures are kept in the directory
    `choices`; "": nowhere.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    dtype: torch.dtype = torch.float32
    k_scale: float = 1.0
    v_scale: float = 1.0
    limits: StepLimits | None = None
    is_batch_invariant: bool = False
    soft_cap: float | None = None
    has_sinks: bool = False
    is_causal: bool = True
    sees_images: bool = False
    has_own_kv: bool = True
    cache_head_dim: int | None = None
    choices: str = ""
    values_from: int | None = None

    @property
    def value_dim(self) -> int:
        """The width of a value, and of a head of the output."""
        return self.head_dim - (self.values_from or 0)

    @property
    def tokens_ahead(self) -> int:
        """How many tokens behind itself a token attends to, at most."""
        if self.is_causal:
            return 0
        return NO_LIMIT if self.window is None else self.window - 1


@dataclass(frozen=True, slots=True)
class RopeAngles:
    """Cosine and sine of the RoPE angles of every token of a step, `[tokens, rotated / 2]`.

    Only the first `rotated` dimensions of a head change (partial RoPE if that is not all).
    """

    cos: Tensor
    sin: Tensor


class AttentionBackend(Protocol):
    """Attention over the paged cache. `plan` is called once per step, then `run` once per layer."""

    def plan(self, layout: RaggedLayout) -> None: ...

    def run(
        self,
        layer: int,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        rope: RopeAngles | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Rotate q and k, write k and v into the cache, attend; all `[tokens, heads, dim]`, the
        result `[tokens, heads, value_dim]`.

        `layer` counts within the stage. Each token attends to its request's slots up to itself; if
        the spec is not causal, to all its request's slots in the step; if it `sees_images`, the
        tokens of an image to all tokens of it.
        RoPE rotates pairs made of the two halves of the rotated dimensions; `rope` None leaves q
        and k as they are. `sinks` `[heads]` in float32 are given if the spec has them.
        q, k and v are adjacent views of one tensor, in this order, and may be overwritten.
        """


class RecordableAttention(ABC):
    """An `AttentionBackend` that runs kernels of the CPU's thread pool only."""

    @property
    @abstractmethod
    def plan_key(self) -> bytes:
        """What the last plan put into the operands of kernels, not behind addresses in them.

        After plans of equal keys `run` makes the same calls.
        """

    @property
    @abstractmethod
    def has_decodes_only(self) -> bool:
        """Whether the last plan was of a step without prompts."""


@runtime_checkable
class CapturableAttention(AttentionBackend, Protocol):
    """A backend that can be captured in CUDA graphs.

    There is a graph for each number of rows, one for steps of decodes only and one for all steps;
    steps are padded to it (`layout.padded`).
    """

    def plan_captured(self, layout: RaggedLayout) -> tuple[int, ...]:
        """Like `plan`, before each warm-up, capture and replay of the graph of such layouts;
        returns what it decided that a captured graph cannot change.

        Reads and writes only addresses that are the same for every step of this graph.
        """


class KernelRecorder(Protocol):
    """Collects kernel calls so that they can be repeated later."""

    def add(
        self, function: int, operands: ctypes.Structure, chunks: int, weights: Tensor | None = None
    ) -> None:
        """A call with these operands, which reads `weights` from memory."""

    def add_rows(
        self,
        function: int,
        operands: Any,
        rows: int,
        fit: Callable[[Any, int], int],
        weights: Tensor | None = None,
    ) -> None:
        """A call over rows. `fit` changes its operands to those of a call over another number of
        rows, and returns the number of its chunks."""

    def add_row_chunks(
        self,
        function: int,
        operands: Any,
        rows: int,
        fit: Callable[[Any, int], int],
        *,
        joins: bool,
    ) -> None:
        """The same with `rows_per_chunk` rows in each chunk. A call that `joins` may run with the
        call before it, row by row."""


class ThreadPool(Protocol):
    """The threads of a worker on the CPU, implemented by `engine.worker.cpu.thread_pool`."""

    @property
    def threads(self) -> int: ...

    @property
    def graph(self) -> KernelRecorder | None:
        """What kernel calls are being recorded to, None outside a recording."""

    def empty(
        self, kind: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Memory for the output of a kernel. Every tensor passed to kernels is allocated here,
        except tensors that outlive all steps."""

    def run(self, kernel: int, operands: int, chunks: int) -> None:
        """Run `kernel(operands, chunk, thread)` for all chunks; both are addresses."""


class MakesAttention(Protocol):
    """A class in the table of `adapters.attention`."""

    def __call__(
        self, spec: AttentionSpec, cache: KVTensors, pool: ThreadPool
    ) -> AttentionBackend: ...


class ChoosesShapes(MakesAttention, Protocol):
    """A class in that table that does not support every device and shape."""

    def why_not(self, spec: AttentionSpec, kv_dtype: torch.dtype, block_size: int) -> str:
        """Called on the class: "" if it supports them, else one line with what it does not."""
