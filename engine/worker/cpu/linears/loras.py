"""LoRA adapters by the kernels of linears, in float32."""

from collections.abc import Sequence

from torch import Tensor

from engine.worker.cpu.linears.floats import FLOAT32
from engine.worker.cpu.linears.packed import CpuLinears, PackedLinear
from engine.worker.cpu.pages import WeightPages
from engine.worker.cpu.thread_pool import NativeThreadPool
from engine.worker.ports import LowRankUp


class NativeLowRank:
    """What a LoRA adapter adds to a linear, by the kernels of `linears`: a row's sum has the same
    bits whatever rows are beside it."""

    def __init__(
        self, pool: NativeThreadPool, linears: CpuLinears, down: Tensor, ups: Sequence[LowRankUp]
    ) -> None:
        pages = WeightPages(slab_bytes=1)  # a mapping for each weight, freed with it
        weights = [linears.pack([each], pages, pool) for each in (down, *(up.weight for up in ups))]
        self._pool = pool
        self._down, *seconds = [PackedLinear(pool, linears, each, None) for each in weights]
        self._ups = [
            (up.ranks, up.columns, second) for up, second in zip(ups, seconds, strict=True)
        ]
        self.num_bytes = sum(each.packed.nbytes for each in weights)

    def __call__(self, x: Tensor, y: Tensor) -> None:
        inner = self._pool.empty("low rank", (len(x), self._down.outputs))
        self._down.write(x, inner, adds=False)
        for ranks, columns, up in self._ups:
            up.write(inner[:, ranks], y[:, columns], adds=True)


class NativeLoras:
    """`LoraOperators` whose factors are in float32."""

    def __init__(self, pool: NativeThreadPool) -> None:
        self._pool = pool

    def low_rank(self, down: Tensor, ups: Sequence[LowRankUp]) -> NativeLowRank:
        return NativeLowRank(self._pool, FLOAT32, down, ups)

    def slots(self, widths: Sequence[int]) -> None:
        """Recordings have the segments of the adapters."""
