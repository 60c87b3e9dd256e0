"""LoRA adapters on a GPU: where steps find their factors, captured steps by slots.

They are loaded beside steps, by a thread that never waits for the GPU: what it copies starts from
pinned memory, and is there before the steps that are launched later.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from types import ModuleType

import torch
from torch import Tensor

from engine.worker.cuda.step.transfers import put
from engine.worker.model.torch_operators import TorchLoras, TorchLowRank
from engine.worker.ports import NUM_LORA_SLOTS, LowRank, LowRankUp
from engine.worker.streams import Streams


class CapturedLoras:
    """`SlottedLoras` of a linear whose outputs are parts of these widths; their weights are kept
    alive by who has loaded them."""

    def __init__(
        self, widths: Sequence[int], max_rank: int, streams: Streams, kernels: ModuleType
    ) -> None:
        """`kernels` is the module `kernels.lora`."""
        edges = list(pairwise(accumulate(widths, initial=0)))
        self._parts = {start: part for part, (start, _) in enumerate(edges)}
        blocks = [
            [part, start, first, min(first + kernels.COLUMNS, end)]
            for part, (start, end) in enumerate(edges)
            for first in range(start, end, kernels.COLUMNS)
        ]
        sizes = NUM_LORA_SLOTS, 2 + 3 * len(widths)
        self._table = kernels.LoraTable(
            torch.zeros(sizes, dtype=torch.int64, device=streams.device),
            torch.tensor(blocks, dtype=torch.int32, device=streams.device),
            max_rank * len(widths),
        )
        self._streams = streams
        self._kernels = kernels

    def put(self, slot: int, lora: LowRank | None) -> None:
        entry = [0] * self._table.entries.shape[1]
        if lora is not None:
            assert isinstance(lora, TorchLowRank), "made by these operators"
            entry[:2] = lora.down.data_ptr(), len(lora.down)
            for ranks, columns, weight in lora.ups:
                at = 2 + 3 * self._parts[columns.start]
                entry[at : at + 3] = weight.data_ptr(), ranks.start, ranks.stop - ranks.start
        self._table.entries[slot].copy_(put(self._streams, torch.tensor(entry)))

    def __call__(self, x: Tensor, y: Tensor, slots: Tensor) -> None:
        self._kernels.add_low_rank(x, y, self._table, slots)


class CudaLoras(TorchLoras):
    """`LoraOperators` in the dtype of the activations."""

    def __init__(
        self,
        streams: Streams,
        dtype: torch.dtype,
        kernels: ModuleType | None = None,
        max_rank: int = 0,
    ) -> None:
        """Steps are captured if there are `kernels`, the module `kernels.lora`."""
        self._streams = streams
        self._dtype = dtype
        self._kernels = kernels
        self._max_rank = max_rank

    def low_rank(self, down: Tensor, ups: Sequence[LowRankUp]) -> TorchLowRank:
        streams, dtype = self._streams, self._dtype
        moved = [up._replace(weight=put(streams, up.weight, dtype)) for up in ups]
        return super().low_rank(put(streams, down, dtype), moved)

    def slots(self, widths: Sequence[int]) -> CapturedLoras | None:
        if self._kernels is None:
            return None
        return CapturedLoras(widths, self._max_rank, self._streams, self._kernels)
