"""What this room takes of FlashInfer and of CUDA, so that all else runs on tensors of the CPU.

The methods of the two wrappers are FlashInfer's own, by the names of their arguments; what they
demand of each (shape, dtype, host or device) stands here once.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class CudaEvent(Protocol):
    """A place in the stream; one that was never recorded is reached."""

    def record(self) -> None:
        """It is from now on behind all work given to the current stream so far."""
        ...

    def synchronize(self) -> None:
        """Let the host wait until it is reached."""
        ...


class RunsPaged(Protocol):
    """Either wrapper, once planned."""

    def run(
        self,
        q: Tensor,
        paged_kv_cache: tuple[Tensor, Tensor],
        *,
        k_scale: float | None,
        v_scale: float | None,
        out: Tensor,
    ) -> Tensor:
        """Attention of q `[tokens, heads, dim]` over pages `[pages, page, kv heads, dim]`.

        Both are of the dtypes that were planned, and so is `out`, which is returned.
        """
        ...


class MixedWrapper(RunsPaged, Protocol):
    """`BatchPrefillWithPagedKVCacheWrapper`: any number of new tokens of each request."""

    def plan(
        self,
        *,
        qo_indptr: Tensor,  # [N + 1] int32, host
        paged_kv_indptr: Tensor,  # [N + 1] int32, host
        paged_kv_indices: Tensor,  # [pages] int32, device
        paged_kv_last_page_len: Tensor,  # [N] int32, host
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        window_left: int,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        o_data_type: torch.dtype,
        non_blocking: bool,
        seq_lens: Tensor,  # [N] int32, host
        max_token_per_sequence: int,
        max_sequence_kv: int,
    ) -> None:
        """Cut the work of one step; it reads host tensors later too, until the stream is there."""
        ...


class CapturedWrapper(RunsPaged, Protocol):
    """`BatchDecodeWithPagedKVCacheWrapper` for CUDA graphs: N requests of one token, always N."""

    def plan(
        self,
        *,
        indptr: Tensor,  # [N + 1] int32, host
        indices: Tensor,  # [pages] int32, device
        last_page_len: Tensor,  # [N] int32, host
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        window_left: int,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        o_data_type: torch.dtype,
        sm_scale: float,
        non_blocking: bool,
        seq_lens: Tensor,  # [N] int32, host
    ) -> None:
        """As that of `MixedWrapper`; the tables go to the buffers that the wrapper was given."""
        ...

    def workspace_size(
        self,
        *,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        window_left: int,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        o_data_type: torch.dtype,
        sm_scale: float,
        seq_lens: Tensor,
    ) -> tuple[int, int]:
        """Bytes of the float and of the integer workspace that `plan` would take."""
        ...

    def reset_workspace_buffer(
        self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor
    ) -> None: ...


class CapturedBuffers(NamedTuple):
    """Where a graph finds the tables of its step, at addresses that never change; int32."""

    indptr: Tensor  # [N + 1]
    indices: Tensor  # [most pages of any step]
    last_page_len: Tensor  # [N]


class Library(Protocol):
    """FlashInfer on one device, and the device itself."""

    @property
    def num_processors(self) -> int:
        """Streaming multiprocessors."""
        ...

    def on_device(self, size: int, dtype: torch.dtype) -> Tensor:
        """A tensor of the device, not written yet."""
        ...

    def pinned(self, num_bytes: int) -> Tensor:
        """Bytes of the host that the device can fetch by itself."""
        ...

    def copy(self, target: Tensor, source: Tensor) -> None:
        """From pinned memory to the device, in the stream: the host goes on at once."""
        ...

    def event(self) -> CudaEvent: ...

    def mixed(self, workspace: Tensor) -> MixedWrapper: ...

    def captured(self, workspace: Tensor, buffers: CapturedBuffers) -> CapturedWrapper: ...

    def baked(self, wrapper: CapturedWrapper) -> tuple[int, ...]:
        """What its last plan decided that a graph has by value."""
        ...

    def turn(self, q: Tensor, k: Tensor, cos_sin: Tensor, rows: Tensor) -> None:
        """Rotate q and k `[tokens, heads, dim]` in place by row `rows[t]` of `cos_sin`.

        A row has the cosines, then the sines, of the pairs that the halves of dim are; float32.
        """
        ...
