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
from engine.worker.cuda.sampling.sampling_kernels import Put, SampleKernel, SamplingTensors, sample
from engine.worker.sampling.logprobs import RowLogprobs, row_logprobs, to_token_logprobs
from engine.worker.sampling.sampler import (
    NO_MASKS,
    Masks,
    RowFault,
    SampledBatch,
    all_banned_fault,
    invalid_id_faults,
    is_greedy,
    is_plain,
    not_finite_fault,
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
    specs: tuple[SampleSpec, ...]
    processed: tuple[int, ...]  # rows with processed logits, which may have no token left
    faults: Mapping[int, RowFault]  # found by the host

    def finish(self, copied: Sequence[Tensor]) -> SampledBatch:
        """The sampled batch; `copied` are `sources` on the host."""
        ids, are_fine, are_left, *likely = copied
        tokens: list[int] = ids.tolist()
        faults = {
            row: not_finite_fault() for row, is_fine in enumerate(are_fine.tolist()) if not is_fine
        }
        for row, fault in self.faults.items():
            faults.setdefault(row, fault)
        for row, is_left in zip(self.processed, are_left.tolist(), strict=True):
            if not is_left:
                faults.setdefault(row, all_banned_fault())
        if not likely:
            return SampledBatch(tuple(tokens), (), tuple(faults.items()))
        tops = [spec.logprobs for spec in self.specs if spec.logprobs is not None]
        found = iter(to_token_logprobs(RowLogprobs(*likely), tops))
        logprobs = [None if spec.logprobs is None else next(found) for spec in self.specs]
        return SampledBatch(tuple(tokens), tuple(logprobs), tuple(faults.items()))


class _Work(NamedTuple):
    """Rows whose logits are processed before sampling, and the ids that grammars allow."""

    specs: dict[int, SampleSpec]
    allowed: dict[int, Bools]
    faults: dict[int, RowFault]


@dataclass(frozen=True, slots=True)
class DeviceSampler:
    """Samples one token per row; `put` copies a host array to the logits' device."""

    vocab_size: int
    put: Put
    kernel: SampleKernel | None = None  # samples filtered rows in one launch

    def sample(
        self,
        logits: Tensor,
        specs: Sequence[SampleSpec],
        positions: Sequence[int],
        masks: Masks = NO_MASKS,
    ) -> SampledBatch:
        """Sample and wait for the result, as the CPU's `HostSampler` does."""
        pending = self.begin(logits, specs, positions, masks)
        return pending.finish([source.cpu() for source in pending.sources])

    def begin(
        self,
        logits: Tensor,
        specs: Sequence[SampleSpec],
        positions: Sequence[int],
        masks: Masks = NO_MASKS,
    ) -> Pending:
        """Submit sampling of one id per row of `[rows, vocab]` float32; may overwrite `logits`."""
        asking = [row for row, spec in enumerate(specs) if spec.logprobs is not None]
        untouched = self._rows(logits, asking).clone() if asking else None
        largest = logits.max(dim=-1)
        are_fine = largest.values.isfinite()
        ids, are_left = largest.indices, are_fine[:0]
        work = self._prepare(specs, masks)
        if work.specs:
            ids, are_left = self._process(logits, ids, work)
        ids = self._sample(logits, ids, specs, positions, idle={*work.faults, *masks.late})
        ids = ids.masked_fill(~are_fine, 0)
        sources = [ids, are_fine, are_left]
        if untouched is not None:
            most = max(spec.logprobs or 0 for spec in specs)
            sources += row_logprobs(untouched, self._rows(ids, asking), most)
        return Pending(ids, tuple(sources), tuple(specs), tuple(work.specs), work.faults)

    def _prepare(self, specs: Sequence[SampleSpec], masks: Masks) -> _Work:
        """The part that the host decides, without logits."""
        faults = dict(masks.faults)
        rows = {
            row: spec
            for row, spec in enumerate(specs)
            if not (is_plain(spec) or row in faults or row in masks.late)
        }
        faults.update(invalid_id_faults(rows, self.vocab_size))
        work = _Work({}, {}, faults)
        for row, one in rows.items():
            if row in faults:
                continue
            if (mask := masks.allowed.get(row)) is None:
                work.specs[row] = one
                continue
            try:
                work.allowed[row], work.specs[row] = permitted(mask, one, self.vocab_size)
            except RowFault as fault:
                faults[row] = fault
        return work

    def _process(self, logits: Tensor, ids: Tensor, work: _Work) -> tuple[Tensor, Tensor]:
        """Process logits: all rows' argmax afterwards, and whether processed rows have a finite
        logit."""
        edit(logits, work.specs, work.allowed, self.put)
        rows = self.put(np.array(list(work.specs), dtype=np.int64))
        largest = logits.index_select(0, rows).max(dim=-1)
        return ids.index_copy(0, rows, largest.indices), largest.values.isfinite()

    def _sample(
        self,
        logits: Tensor,
        ids: Tensor,
        specs: Sequence[SampleSpec],
        positions: Sequence[int],
        idle: set[int],
    ) -> Tensor:
        """Replace the ids of rows that are not greedy by sampled ones."""
        rows = [row for row, spec in enumerate(specs) if not (is_greedy(spec) or row in idle)]
        if not rows:
            return ids
        samplings = [specs[row].sampling for row in rows]
        points = [uniform(specs[row].sampling.seed, positions[row]) for row in rows]
        params = SamplingTensors.of(samplings, points, self.vocab_size, self.put)
        if len(rows) == len(specs):
            return sample(logits, params, self.kernel)
        places = self.put(np.array(rows, dtype=np.int64))
        chosen = sample(logits.index_select(0, places), params, self.kernel)
        return ids.index_copy(0, places, chosen)

    def _rows(self, tensor: Tensor, rows: list[int]) -> Tensor:
        if len(rows) == len(tensor):
            return tensor
        return tensor.index_select(0, self.put(np.array(rows, dtype=np.int64)))
