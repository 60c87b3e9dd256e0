"""How much memory FlashInfer works in, found out and taken once, for the largest step there can be.

Where a request's keys are shared out among processors, each leaves a float32 part of the result in
the float workspace. The integer workspace has the cuts of a plan. All wrappers share the float
workspace, and all captured ones an integer workspace: everything runs in one stream, where each
plan comes before the layers that use it and behind those that used the one before.
"""

import torch
from torch import Tensor

from adapters.attention.flashinfer.launches import Geometry
from adapters.attention.flashinfer.ports import CapturedBuffers, CapturedWrapper, Library
from adapters.attention.flashinfer.tables import TableSizes
from engine.errors import StartupError
from engine.worker.ports import StepLimits

MIB = 1 << 20
MOST_BYTES = 1 << 30
MOST_TABLE_BYTES = 256 * MIB
TILE = 128  # rows that a block of threads takes at most
SMALLEST_TILE = 16
BLOCKS = 2  # of threads, on each processor
MOST_PARTS = 1024  # of a step that is shared out: BLOCKS on each of the processors of any GPU
OWN_INT_BYTES = 8 * MIB  # that a wrapper brings along
ROUND = 64 << 10
SLACK = 256  # bytes, for what alignment takes


def check_limits(limits: StepLimits, page_size: int, group: int) -> TableSizes:
    """The sizes of tables; raises `StartupError` naming the limits that are too large."""
    sizes = TableSizes.of(limits, page_size)
    if 4 * sizes.pages > MOST_TABLE_BYTES:
        raise StartupError(
            f"max_batch_size={limits.max_requests} requests of "
            f"max_model_len={limits.max_model_len} tokens in blocks of block_size={page_size} need "
            f"page tables of {4 * sizes.pages // MIB:,} MiB; attention on a GPU takes at most "
            f"{MOST_TABLE_BYTES // MIB}"
        )
    tiles = sizes.tokens * group // SMALLEST_TILE + sizes.requests + MOST_PARTS
    cuts = 12 * tiles + 4 * (sizes.tokens + sizes.requests) + SLACK
    if cuts > OWN_INT_BYTES:
        raise StartupError(
            f"max_batch_tokens={limits.max_tokens} and max_batch_size={limits.max_requests} need "
            f"plans of {cuts:,} bytes; attention on a GPU takes at most {OWN_INT_BYTES:,}"
        )
    return sizes


def eager_bytes(num_processors: int, num_heads: int, head_dim: int) -> int:
    """The float workspace of a step that is not captured, whatever there is in it.

    A step is shared out only while its parts are fewer than the blocks of threads that run at
    once; a part of a row of a head is `head_dim` sums and their weight.
    """
    rows = BLOCKS * num_processors * TILE + num_heads
    return rows * (head_dim + 1) * 4 + SLACK


class Workspaces:
    """The memory that wrappers work in."""

    def __init__(
        self, library: Library, geometry: Geometry, sizes: TableSizes, limits: StepLimits
    ) -> None:
        """Raises `StartupError` naming the limit that needs too much."""
        self._library = library
        self.indices = library.on_device(sizes.pages, torch.int32)
        parts, cuts = self._captured_bytes(geometry, sizes.requests)
        spec = geometry.spec
        parts = max(parts, eager_bytes(library.num_processors, spec.num_heads, spec.head_dim))
        if parts > MOST_BYTES:
            raise StartupError(
                f"max_batch_size={limits.max_requests} needs {parts // MIB:,} MiB for attention to "
                f"work in; it takes at most {MOST_BYTES // MIB:,}"
            )
        self.parts = library.on_device(_rounded(parts), torch.uint8)
        self._cuts = library.on_device(_rounded(cuts), torch.uint8)

    def captured(self, size: int) -> CapturedWrapper:
        """A wrapper for graphs of `size` requests."""
        wrapper = self._wrapper(self.parts, size)
        wrapper.reset_workspace_buffer(self.parts, self._cuts)
        return wrapper

    def _wrapper(self, parts: Tensor, size: int) -> CapturedWrapper:
        buffers = CapturedBuffers(
            indptr=self._library.on_device(size + 1, torch.int32),
            indices=self.indices,
            last_page_len=self._library.on_device(size, torch.int32),
        )
        return self._library.captured(parts, buffers)

    def _captured_bytes(self, geometry: Geometry, size: int) -> tuple[int, int]:
        """For graphs of `size` requests; FlashInfer is asked. What they attend to is no matter."""
        spec = geometry.spec
        ones = torch.ones(size, dtype=torch.int32)
        wrapper = self._wrapper(self._library.on_device(ROUND, torch.uint8), size)
        return wrapper.workspace_size(
            indptr=torch.arange(size + 1, dtype=torch.int32),
            indices=self.indices[:size],
            last_page_len=ones,
            num_qo_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            page_size=geometry.page_size,
            window_left=geometry.window_left,
            q_data_type=spec.dtype,
            kv_data_type=geometry.kv_dtype,
            o_data_type=spec.dtype,
            sm_scale=spec.scale,
            seq_lens=ones,
        )


def _rounded(num_bytes: int) -> int:
    return -(-num_bytes // ROUND) * ROUND
