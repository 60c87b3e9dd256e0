"""Temperature, filters and sampling for all rows at once by a kernel, without host
synchronisation."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from torch import Tensor

from engine.worker.model.torch_operators import TorchSampling
from engine.worker.ports import Draw
from engine.worker.sampling.logits_processors import Put

# logits, temperatures, min-ps, top-ks or None, top-ps or None, points -> ids; one launch
SampleKernel = Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """Sampling parameters, `[rows]` each; the flags let the host skip unused filters."""

    temperatures: Tensor  # float32
    min_ps: Tensor  # float32
    top_ks: Tensor  # int64, the whole vocabulary where there is no limit
    top_ps: Tensor  # float64
    points: Tensor  # float64, in [0, 1)
    has_top_k: bool
    has_top_p: bool

    @classmethod
    def of(cls, draws: Sequence[Draw], vocab_size: int, put: Put) -> Self:
        """All parameters in one copy to the device."""
        samplings = [draw.sampling for draw in draws]
        limits = [one.top_k if 0 < one.top_k < vocab_size else 0 for one in samplings]
        rows = [
            (one.temperature, one.min_p, limit or vocab_size, one.top_p, draw.point)
            for draw, one, limit in zip(draws, samplings, limits, strict=True)
        ]
        columns = put(np.array(rows, dtype=np.float64).T.copy())
        temperatures, min_ps, top_ks, top_ps, there = columns.unbind()
        return cls(
            temperatures.float(),
            min_ps.float(),
            top_ks.long(),
            top_ps,
            there,
            has_top_k=any(limits),
            has_top_p=any(one.top_p < 1 for one in samplings),
        )


@dataclass(frozen=True, slots=True)
class DeviceSampling(TorchSampling):
    """Samples on the device; parameters get there by `put`, in one copy."""

    put: Put
    kernel: SampleKernel

    def sample(self, logits: Tensor, draws: Sequence[Draw]) -> Tensor:
        params = SamplingTensors.of(draws, logits.shape[1], self.put)
        if len(draws) < len(logits):
            rows = np.array([draw.row for draw in draws], dtype=np.int64)
            logits = logits.index_select(0, self.put(rows))
        top_ks = params.top_ks if params.has_top_k else None
        top_ps = params.top_ps if params.has_top_p else None
        return self.kernel(
            logits, params.temperatures, params.min_ps, top_ks, top_ps, params.points
        )
