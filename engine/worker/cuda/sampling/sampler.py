"""SamplingParams on a GPU, in two halves.

`begin` submits all work and reads nothing back, so the next step can use the ids before the host
knows them. `finish` converts the copied results to plain Python values.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

from engine.step import SampleSpec
from engine.worker.cuda.sampling.logits_processors import Bools, edit, permitted
from engine.worker.cuda.sampling.sampling_kernels import Put, SamplingTensors, sample
from engine.worker.sampling.logprobs import Likelihoods, likelihoods, tell
from engine.worker.sampling.sampler import (
    NO_MASKS,
    Masks,
    RowFault,
    SampledToken,
    blemish,
    foreign,
    is_greedy,
    is_plain,
    nothing_left,
    uniform,
)


@dataclass(frozen=True, slots=True)
class Pending:
    """A batch whose tokens the device is sampling.

    `sources` are the device tensors that `finish` needs on the host. `ids` is one of them; it is 0
    in rows that have no token.
    """

    ids: Tensor  # int64 [rows]
    sources: tuple[Tensor, ...]
    draws: tuple[SampleSpec, ...]
    processed: tuple[int, ...]  # rows with processed logits, which may have no token left
    faults: Mapping[int, RowFault]  # found by the host

    def finish(self, copied: Sequence[Tensor]) -> SampledToken:
        """The sampled batch; `copied` are `sources` on the host."""
        ids, are_fine, are_left, *likely = copied
        tokens: list[int] = ids.tolist()
        faults = {row: blemish() for row, is_fine in enumerate(are_fine.tolist()) if not is_fine}
        for row, fault in self.faults.items():
            faults.setdefault(row, fault)
        for row, is_left in zip(self.processed, are_left.tolist(), strict=True):
            if not is_left:
                faults.setdefault(row, nothing_left())
        if not likely:
            return SampledToken(tuple(tokens), (), tuple(faults.items()))
        tops = [draw.logprobs for draw in self.draws if draw.logprobs is not None]
        told = iter(tell(Likelihoods(*likely), tops))
        logprobs = [None if draw.logprobs is None else next(told) for draw in self.draws]
        return SampledToken(tuple(tokens), tuple(logprobs), tuple(faults.items()))


class _Work(NamedTuple):
    """Rows whose logits are processed before sampling, and the ids that grammars allow."""

    draws: dict[int, SampleSpec]
    allowed: dict[int, Bools]
    faults: dict[int, RowFault]


@dataclass(frozen=True, slots=True)
class DeviceSampler:
    """Samples one token per row; `put` copies a host array to the logits' device."""

    vocab_size: int
    put: Put

    def draw(
        self,
        logits: Tensor,
        draws: Sequence[SampleSpec],
        positions: Sequence[int],
        masks: Masks = NO_MASKS,
    ) -> SampledToken:
        """Sample and wait for the result, as the CPU's `Sampler` does."""
        pending = self.begin(logits, draws, positions, masks)
        return pending.finish([source.cpu() for source in pending.sources])

    def begin(
        self,
        logits: Tensor,
        draws: Sequence[SampleSpec],
        positions: Sequence[int],
        masks: Masks = NO_MASKS,
    ) -> Pending:
        """Submit sampling of one id per row of `[rows, vocab]` float32; may overwrite `logits`."""
        asking = [row for row, draw in enumerate(draws) if draw.logprobs is not None]
        untouched = self._rows(logits, asking).clone() if asking else None
        largest = logits.max(dim=-1)
        are_fine = largest.values.isfinite()
        ids, are_left = largest.indices, are_fine[:0]
        work = self._prepare(draws, masks)
        if work.draws:
            ids, are_left = self._process(logits, ids, work)
        ids = self._draw(logits, ids, draws, positions, idle={*work.faults, *masks.late})
        ids = ids.masked_fill(~are_fine, 0)
        sources = [ids, are_fine, are_left]
        if untouched is not None:
            most = max(draw.logprobs or 0 for draw in draws)
            sources += likelihoods(untouched, self._rows(ids, asking), most)
        return Pending(ids, tuple(sources), tuple(draws), tuple(work.draws), work.faults)

    def _prepare(self, draws: Sequence[SampleSpec], masks: Masks) -> _Work:
        """The part that the host decides, without logits."""
        faults = dict(masks.faults)
        rows = {
            row: draw
            for row, draw in enumerate(draws)
            if not (is_plain(draw) or row in faults or row in masks.late)
        }
        faults.update(foreign(rows, self.vocab_size))
        work = _Work({}, {}, faults)
        for row, one in rows.items():
            if row in faults:
                continue
            if (mask := masks.allowed.get(row)) is None:
                work.draws[row] = one
                continue
            try:
                work.allowed[row], work.draws[row] = permitted(mask, one, self.vocab_size)
            except RowFault as fault:
                faults[row] = fault
        return work

    def _process(self, logits: Tensor, ids: Tensor, work: _Work) -> tuple[Tensor, Tensor]:
        """Process logits: all rows' argmax afterwards, and whether processed rows have a finite
        logit."""
        edit(logits, work.draws, work.allowed, self.put)
        rows = self.put(np.array(list(work.draws), dtype=np.int64))
        largest = logits.index_select(0, rows).max(dim=-1)
        return ids.index_copy(0, rows, largest.indices), largest.values.isfinite()

    def _draw(
        self,
        logits: Tensor,
        ids: Tensor,
        draws: Sequence[SampleSpec],
        positions: Sequence[int],
        idle: set[int],
    ) -> Tensor:
        """Replace the ids of rows that are not greedy by sampled ones."""
        rows = [row for row, draw in enumerate(draws) if not (is_greedy(draw) or row in idle)]
        if not rows:
            return ids
        samplings = [draws[row].sampling for row in rows]
        points = [uniform(draws[row].sampling.seed, positions[row]) for row in rows]
        params = SamplingTensors.of(samplings, points, self.vocab_size, self.put)
        if len(rows) == len(draws):
            return sample(logits, params)
        places = self.put(np.array(rows, dtype=np.int64))
        return ids.index_copy(0, places, sample(logits.index_select(0, places), params))

    def _rows(self, tensor: Tensor, rows: list[int]) -> Tensor:
        if len(rows) == len(tensor):
            return tensor
        return tensor.index_select(0, self.put(np.array(rows, dtype=np.int64)))
