"""Launches: one FlashInfer attention call per layer, planned once a step.

`plan` splits the work on the host, writes the split to the wrapper's pinned memory and starts its
copy in the stream. The next plan of the same wrapper waits until that copy is done (`staged`); its
own copy comes, in stream order, after all layers that read the previous split.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from adapters.attention.flashinfer.fit import kernel_dim, latent_heads
from adapters.attention.flashinfer.ports import (
    AddSinks,
    CapturedWrapper,
    DeviceEvent,
    Library,
    MixedWrapper,
    PlanArguments,
    RunsPaged,
)
from adapters.attention.flashinfer.tables import PageTableArena, PageTables
from engine.worker.ports import AttentionSpec, KVTensors

NO_WINDOW = -1  # FlashInfer's value for full attention
BLOCKS_PER_PROCESSOR = 2  # thread blocks that run at once; FlashInfer splits up to so many


class Sinks(NamedTuple):
    """The attention sinks of a layer, each a key without a value, and what adds them to rows."""

    scores: Tensor  # [heads], float32
    first: Tensor  # 0, 1, 2 … up to the rows of a step, int32: each row has one part
    merge: AddSinks


@dataclass(frozen=True, slots=True)
class Geometry:
    """The parameters that all plans of a stage share."""

    spec: AttentionSpec
    page_size: int
    kv_dtype: torch.dtype

    @classmethod
    def of(cls, spec: AttentionSpec, cache: KVTensors) -> "Geometry":
        return cls(spec, cache.block_size, cache.keys[0].dtype)

    @property
    def head_dim(self) -> int:
        """The head size of the kernel, of which a model's heads may be the first part."""
        dim = self.spec.head_dim
        return kernel_dim(dim) if self.spec.values_from is None else dim

    @property
    def num_heads(self) -> int:
        """The heads of the kernel, of which a model's are the first."""
        count = self.spec.num_heads
        return count if self.spec.values_from is None else latent_heads(count)

    @property
    def value_dim(self) -> int:
        """The head size of the kernel's outputs."""
        return self.head_dim - (self.spec.values_from or 0)

    @property
    def window_left(self) -> int:
        """The number of earlier tokens that a token attends to."""
        return NO_WINDOW if self.spec.window is None else self.spec.window - 1

    def disables_splits(self, size: int, num_processors: int) -> bool:
        """Whether captured decodes of `size` rows keep each request's keys in one thread block.

        Their thread blocks fill the GPU by themselves then, and split keys would only cost float32
        partial results and a launch per layer that merges them. Always in batch-invariant mode: how
        keys are split depends on the other requests.
        """
        fills_gpu = size * self.spec.num_kv_heads > BLOCKS_PER_PROCESSOR * num_processors
        return self.spec.is_batch_invariant or fills_gpu

    @property
    def is_scaled(self) -> bool:
        """Whether the cache is in another dtype, so that keys and values are divided by scales."""
        return self.kv_dtype != self.spec.dtype

    def plan_arguments(self) -> PlanArguments:
        """Without a soft cap another module is compiled than with one."""
        spec = self.spec
        return PlanArguments(
            num_qo_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            page_size=self.page_size,
            sm_scale=spec.scale,
            logits_soft_cap=spec.soft_cap,
            window_left=self.window_left,
            q_data_type=spec.dtype,
            kv_data_type=self.kv_dtype,
            o_data_type=spec.dtype,
        )

    def attend(
        self,
        wrapper: RunsPaged,
        q: Tensor,
        pages: tuple[Tensor, Tensor],
        out: Tensor,
        sinks: Sinks | None,
    ) -> None:
        """Run a planned wrapper into `out`."""
        if sinks is None:
            self.run(wrapper, q, pages, out)
            return
        sums = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        found = torch.empty_like(out)
        self.run(wrapper, q, pages, found, sums)
        sinks.merge(found, sums, sinks.first[: len(q) + 1], out, sinks.scores)

    def run(
        self,
        wrapper: RunsPaged,
        q: Tensor,
        pages: tuple[Tensor, Tensor],
        out: Tensor,
        sums: Tensor | None = None,
    ) -> None:
        """Run a planned wrapper into `out`, and into `sums` the logarithms to base 2 of the sums
        of exponentiated scores, float32 `[rows, heads]`."""
        wrapper.run(
            q,
            pages,
            k_scale=self.spec.k_scale if self.is_scaled else None,
            v_scale=self.spec.v_scale if self.is_scaled else None,
            out=out,
            lse=sums,
            return_lse=sums is not None,
        )


class MixedLaunch:
    """Attention of requests with any number of new tokens; a decode has one."""

    def __init__(
        self,
        geometry: Geometry,
        wrapper: MixedWrapper,
        staged: DeviceEvent,
        *,
        size: int = 0,
        disables_splits: bool = False,
    ) -> None:
        """`size` are the rows of a CUDA graph, 0 outside of one.

        FlashInfer chooses the tile by the mean number of new tokens. In batch-invariant mode a step
        has as many requests as rows, empty ones among them, and always the decodes' tile.
        """
        self._geometry = geometry
        self._wrapper = wrapper
        self._staged = staged
        self._size = size
        self._disables_splits = disables_splits or geometry.spec.is_batch_invariant

    def plan(self, arena: PageTableArena, tables: PageTables, indices: Tensor) -> None:
        geometry = self._geometry
        if size := self._size or (tables.num_rows if geometry.spec.is_batch_invariant else 0):
            tables = tables.widened(size)
        self._staged.synchronize()
        self._wrapper.plan(
            qo_indptr=arena.put(tables.qo_indptr),
            paged_kv_indptr=arena.put(tables.kv_indptr),
            paged_kv_indices=indices,
            paged_kv_last_page_len=arena.put(tables.kv_last_page_len),
            head_dim_qk=geometry.head_dim,
            causal=True,  # aligned at the last key: later chunks see all earlier tokens
            non_blocking=True,
            seq_lens=arena.put(tables.kv_len),
            max_token_per_sequence=tables.max_rows,
            max_sequence_kv=int(tables.kv_len.max()),
            disable_split_kv=self._disables_splits,
            **geometry.plan_arguments(),
        )
        self._staged.record()

    def run(
        self, q: Tensor, pages: tuple[Tensor, Tensor], out: Tensor, sinks: Sinks | None = None
    ) -> None:
        self._geometry.attend(self._wrapper, q, pages, out, sinks)

    def baked(self, library: Library) -> tuple[int, ...]:
        return library.baked(self._wrapper)


class CapturedLaunch:
    """Attention of a fixed number of decodes, for capture in a CUDA graph."""

    def __init__(
        self,
        geometry: Geometry,
        wrapper: CapturedWrapper,
        staged: DeviceEvent,
        *,
        disables_splits: bool,
    ) -> None:
        self._disables_splits = disables_splits
        self.wrapper = wrapper
        self._geometry = geometry
        self._staged = staged

    def plan(self, arena: PageTableArena, tables: PageTables, indices: Tensor) -> None:
        geometry = self._geometry
        self._staged.synchronize()
        self.wrapper.plan(
            indptr=arena.put(tables.kv_indptr),
            indices=indices,
            last_page_len=arena.put(tables.kv_last_page_len),
            head_dim=geometry.head_dim,
            non_blocking=True,
            seq_lens=arena.put(tables.kv_len),
            disable_split_kv=self._disables_splits,
            **geometry.plan_arguments(),
        )
        self._staged.record()

    def run(
        self, q: Tensor, pages: tuple[Tensor, Tensor], out: Tensor, sinks: Sinks | None = None
    ) -> None:
        self._geometry.attend(self.wrapper, q, pages, out, sinks)

    def baked(self, library: Library) -> tuple[int, ...]:
        return library.baked(self.wrapper)


class Launch(Protocol):
    """Attention that is planned once a step and run once a layer."""

    def plan(self, arena: PageTableArena, tables: PageTables, indices: Tensor) -> None:
        """Plan one step; `indices` are the requests' pages, int32 on the device."""

    def run(
        self, q: Tensor, pages: tuple[Tensor, Tensor], out: Tensor, sinks: Sinks | None = None
    ) -> None:
        """Attention of one layer into `out`; q and `out` have the heads of the kernel."""


class GraphLaunch(Launch, Protocol):
    """A launch that a CUDA graph can contain."""

    def baked(self, library: Library) -> tuple[int, ...]:
        """The last plan's values that a graph contains as constants."""


class Launches(Protocol):
    """The launches of a worker; they take turns in one stream."""

    @property
    def indices(self) -> Tensor:
        """Room for the pages of a step, int32 on the device."""

    @property
    def mixed(self) -> Launch:
        """The launch of any requests outside of graphs."""

    @property
    def decodes(self) -> Launch:
        """The launch of decodes outside of graphs."""

    def captured(self, size: int, *, is_mixed: bool) -> GraphLaunch:
        """The launch in graphs of `size` rows, of any requests or of decodes."""
