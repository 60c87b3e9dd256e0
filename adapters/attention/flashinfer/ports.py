"""The port to FlashInfer and CUDA; everything else in this package also runs on CPU tensors.

The wrapper protocols have FlashInfer's own method and argument names; the shape, dtype and device
that FlashInfer requires of each argument is documented here.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypedDict, Unpack

import torch
from torch import Tensor

from engine.worker.cuda.kernels.reference import CacheRows, DecodeKeys, Scoring
from engine.worker.ports import AttentionSpec

# RoPE of q, in place or into the last tensor, and of k, if any, on its way to the cache, with
# cosines and sines `[tokens, rotated / 2]` or None.
RopeAndCacheWrite = Callable[
    [Tensor, Tensor | None, Tensor | None, tuple[Tensor, Tensor] | None, CacheRows, Tensor | None],
    None,
]

# What parts of rows found, their sums, the first part of each row; into the next tensor, with
# sinks.
MergeParts = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None], None]
# Attention of q over runs of keys, into the fifth tensor or into the runs' results and sums; with
# sinks.
AttendDecodes = Callable[
    [Tensor, Tensor, Tensor, DecodeKeys, Tensor, tuple[Tensor, Tensor], Scoring, Tensor | None],
    None,
]
AddSinks = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]  # the same with sinks


class DecodeKernels(NamedTuple):
    """Attention of decodes over runs of keys, and what adds up a row's runs."""

    attend: AttendDecodes  # `reference.attend_decodes`
    merge: MergeParts  # `reference.merge_runs`


class DeviceEvent(Protocol):
    """A point in the stream; an event that was never recorded counts as reached."""

    def record(self) -> None:
        """Move the event after all work submitted to the current stream so far."""

    def synchronize(self) -> None:
        """Block the host until the event is reached."""


class RunsPaged(Protocol):
    """The part that both wrappers share."""

    def reset_workspace_buffer(
        self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor
    ) -> None: ...

    def run(
        self,
        q: Tensor,
        paged_kv_cache: tuple[Tensor, Tensor],
        *,
        k_scale: float | None,
        v_scale: float | None,
        out: Tensor,
        lse: Tensor | None = None,
        return_lse: bool = False,
    ) -> object:
        """Attention of q `[tokens, heads, dim]` over pages `[pages, page, kv heads, dim]`.

        All dtypes are those given to `plan`. With `return_lse` the logarithms to base 2 of the sums
        of exponentiated scores are written to `lse`, float32 `[tokens, heads]`.
        """


class PlanArguments(TypedDict):
    """What both wrappers' `plan` is given."""

    num_qo_heads: int
    num_kv_heads: int
    page_size: int
    sm_scale: float
    logits_soft_cap: float | None
    window_left: int
    q_data_type: torch.dtype
    kv_data_type: torch.dtype
    o_data_type: torch.dtype


class MixedWrapper(RunsPaged, Protocol):
    """`BatchPrefillWithPagedKVCacheWrapper`: any number of new tokens of each request."""

    def plan(
        self,
        *,
        qo_indptr: Tensor,  # [N + 1] int32, host
        paged_kv_indptr: Tensor,  # [N + 1] int32, host
        paged_kv_indices: Tensor,  # [pages] int32, device
        paged_kv_last_page_len: Tensor,  # [N] int32, host
        head_dim_qk: int,
        causal: bool,
        non_blocking: bool,
        seq_lens: Tensor,  # [N] int32, host
        max_token_per_sequence: int,
        max_sequence_kv: int,
        disable_split_kv: bool,
        **arguments: Unpack[PlanArguments],
    ) -> None:
        """Split the work of one step; host tensors must not change until the stream has copied
        them."""


class CapturedWrapper(RunsPaged, Protocol):
    """`BatchDecodeWithPagedKVCacheWrapper` for CUDA graphs: a fixed batch of N decodes."""

    def plan(
        self,
        *,
        indptr: Tensor,  # [N + 1] int32, host
        indices: Tensor,  # [pages] int32, device
        last_page_len: Tensor,  # [N] int32, host
        head_dim: int,
        non_blocking: bool,
        seq_lens: Tensor,  # [N] int32, host
        disable_split_kv: bool,
        **arguments: Unpack[PlanArguments],
    ) -> None:
        """See `MixedWrapper.plan`; the tables are copied to the wrapper's fixed buffers."""

    def workspace_size(
        self,
        *,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        head_dim: int,
        seq_lens: Tensor,
        **arguments: Unpack[PlanArguments],
    ) -> tuple[int, int]:
        """Bytes of the float and of the integer workspace that `plan` would use."""


class CapturedBuffers(NamedTuple):
    """The page tables that a graph reads, at fixed addresses; int32."""

    indptr: Tensor  # [N + 1]
    indices: Tensor  # [max pages of a step]
    last_page_len: Tensor  # [N]
    qo_indptr: Tensor | None = None  # [N + 1]; None for decodes


class LatentKernels(Protocol):
    """The compiled module of `BatchMLAPagedAttentionWrapper`: attention to latent vectors."""

    def plan(
        self,
        parts: Tensor,  # uint8, on the device
        cuts: Tensor,  # uint8, on the device; gets the plan, by a copy in the current stream
        staging: Tensor,  # uint8, pinned; free when this returns
        qo_indptr: Tensor,  # [N + 1] int32, host
        kv_indptr: Tensor,  # [N + 1] int32, host
        kv_len: Tensor,  # [N] int32, host
        num_heads: int,
        latent: int,
        is_causal: bool,
        /,
    ) -> Sequence[int]:
        """Split the work of one step; what `run` is given of it, a CUDA graph as constants."""

    def run(
        self,
        parts: Tensor,
        cuts: Tensor,
        planned: Sequence[int],
        q: Tensor,  # [tokens, heads, latent]
        q_turned: Tensor,  # [tokens, heads, turned]
        keys: Tensor,  # [pages, page, latent]
        keys_turned: Tensor,  # [pages, page, turned]
        indices: Tensor,  # [pages] int32, on the device
        out: Tensor,  # [tokens, heads, latent]
        sums: Tensor | None,
        mask: int,
        num_heads: int,
        page_size: int,
        scale: float,
        has_natural_sums: bool,
        key_scale: float,
        turned_scale: float,
        scales: Tensor | None,
        /,
    ) -> object:
        """Attention over pages, into `out`; tensors are strided but in the last dimension."""


class Library(Protocol):
    """FlashInfer and memory on one device."""

    @property
    def num_processors(self) -> int:
        """The number of streaming multiprocessors."""

    def compile(self, spec: AttentionSpec, kv_dtype: torch.dtype) -> None:
        """Compile the modules of such layers that this machine has not compiled yet."""

    def on_device(self, size: int, dtype: torch.dtype) -> Tensor:
        """A zeroed tensor on the device."""

    def pinned(self, num_bytes: int) -> Tensor:
        """Uninitialised page-locked host memory."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """An asynchronous copy from pinned memory to the device, in the current stream."""

    def event(self) -> DeviceEvent: ...

    def mixed(self, workspace: Tensor, buffers: CapturedBuffers | None = None) -> MixedWrapper:
        """With buffers for a CUDA graph: the first plan has as many rows as any later one, and all
        have N requests, of which some may be empty."""

    def captured(self, workspace: Tensor, buffers: CapturedBuffers) -> CapturedWrapper: ...

    def latents(self, dtype: torch.dtype) -> LatentKernels:
        """Attention to latent vectors of this dtype."""

    def baked(self, wrapper: RunsPaged) -> tuple[int, ...]:
        """The last plan's values that a graph contains as constants."""

    def rope_and_cache_write(self, kept: torch.dtype) -> RopeAndCacheWrite:
        """RoPE and the cache write, in one launch if there is a kernel; `kept` is the dtype of the
        cache."""

    def merge_parts(self) -> MergeParts | None:
        """What adds up attention over parts of keys (`reference.merge_parts`), if there is a
        kernel."""

    def decode_kernels(self) -> DecodeKernels | None:
        """Our kernels for decodes, if they are verified on this GPU."""
