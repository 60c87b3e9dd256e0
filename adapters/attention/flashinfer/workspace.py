"""FlashInfer's workspaces, allocated once for the largest possible step.

If a request's keys are split among multiprocessors, each writes a float32 partial result to the
float workspace. The integer workspace holds the split of a plan. All wrappers share the float
workspace, and all captured wrappers share an integer workspace: everything runs in one stream,
where a plan comes before the layers that use it and after the layers that used the previous plan.
"""

import torch

from adapters.attention.flashinfer.launches import Geometry
from adapters.attention.flashinfer.ports import (
    CapturedBuffers,
    CapturedWrapper,
    Library,
    MixedWrapper,
)
from adapters.attention.flashinfer.tables import TableSizes
from engine.errors import StartupError
from engine.worker.ports import StepLimits

MIB = 1 << 20
MAX_BYTES = 1 << 30
MAX_TABLE_BYTES = 256 * MIB
TILE = 128  # rows of a thread block at most
SMALLEST_TILE = 16
BLOCKS = 2  # thread blocks per multiprocessor
MAX_PARTS = 1024  # splits of a step: BLOCKS on each multiprocessor of any GPU
OWN_INT_BYTES = 8 * MIB  # the size of a wrapper's own integer workspace
ROUND = 64 << 10
SLACK = 256  # bytes for alignment


def check_limits(limits: StepLimits, page_size: int, group: int) -> TableSizes:
    """The table sizes; raises `StartupError` naming the limits that are too large."""
    sizes = TableSizes.of(limits, page_size)
    if 4 * sizes.pages > MAX_TABLE_BYTES:
        raise StartupError(
            f"max_batch_size={limits.max_requests} requests of "
            f"max_model_len={limits.max_model_len} tokens in blocks of block_size={page_size} need "
            f"page tables of {4 * sizes.pages // MIB:,} MiB; attention on a GPU takes at most "
            f"{MAX_TABLE_BYTES // MIB}"
        )
    tiles = sizes.tokens * group // SMALLEST_TILE + sizes.requests + MAX_PARTS
    cuts = 12 * tiles + 4 * (sizes.tokens + sizes.requests) + SLACK
    if cuts > OWN_INT_BYTES:
        raise StartupError(
            f"max_batch_tokens={limits.max_tokens} and max_batch_size={limits.max_requests} need "
            f"plans of {cuts:,} bytes; attention on a GPU takes at most {OWN_INT_BYTES:,}"
        )
    return sizes


def eager_bytes(num_processors: int, num_heads: int, head_dim: int) -> int:
    """Bytes of float workspace that any uncaptured step can need.

    FlashInfer splits a step only while its splits are fewer than the thread blocks that run at
    once; a split of one row of a head is `head_dim` sums and their weight.
    """
    rows = BLOCKS * num_processors * TILE + num_heads
    return rows * (head_dim + 1) * 4 + SLACK


class Workspaces:
    """The workspaces of all wrappers."""

    def __init__(
        self, library: Library, geometry: Geometry, sizes: TableSizes, limits: StepLimits
    ) -> None:
        """Raises `StartupError` naming the limit that needs too much memory."""
        self._library = library
        self.indices = library.on_device(sizes.pages + sizes.rows, torch.int32)
        parts, cuts = self._captured_bytes(geometry, sizes.rows)
        spec = geometry.spec
        parts = max(parts, eager_bytes(library.num_processors, spec.num_heads, geometry.head_dim))
        if parts > MAX_BYTES:
            raise StartupError(
                f"max_batch_size={limits.max_requests} needs {parts // MIB:,} MiB of attention "
                f"workspace; the maximum is {MAX_BYTES // MIB:,}"
            )
        self.parts = library.on_device(_aligned(parts), torch.uint8)
        self._cuts = library.on_device(_aligned(cuts), torch.uint8)

    def captured(self, size: int) -> CapturedWrapper:
        """A wrapper for the graph of `size` decodes."""
        wrapper = self._library.captured(self.parts, self._buffers(size))
        wrapper.reset_workspace_buffer(self.parts, self._cuts)
        return wrapper

    def captured_mixed(self, size: int) -> MixedWrapper:
        """A wrapper for the graph of `size` rows of any requests.

        FlashInfer plans it like a graph of `size` decodes: in the smallest tiles, since each row
        may be a request.
        """
        buffers = self._buffers(size)
        indptr = self._library.on_device(size + 1, torch.int32)
        wrapper = self._library.mixed(self.parts, buffers._replace(qo_indptr=indptr))
        wrapper.reset_workspace_buffer(self.parts, self._cuts)
        return wrapper

    def _buffers(self, size: int) -> CapturedBuffers:
        return CapturedBuffers(
            indptr=self._library.on_device(size + 1, torch.int32),
            indices=self.indices,
            last_page_len=self._library.on_device(size, torch.int32),
        )

    def _captured_bytes(self, geometry: Geometry, size: int) -> tuple[int, int]:
        """Float and integer workspace bytes of graphs of `size` rows, as FlashInfer computes
        them."""
        ones = torch.ones(size, dtype=torch.int32)
        parts = self._library.on_device(ROUND, torch.uint8)
        wrapper = self._library.captured(parts, self._buffers(size))
        return wrapper.workspace_size(
            indptr=torch.arange(size + 1, dtype=torch.int32),
            indices=self.indices[:size],
            last_page_len=ones,
            head_dim=geometry.head_dim,
            seq_lens=ones,
            **geometry.plan_arguments(),
        )


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ROUND) * ROUND
