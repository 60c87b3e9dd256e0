"""From hidden states to the `LogitsOutput` of a step, in two parts: work submitted to the device,
and results read once their copies arrived. See `engine.worker.sampling.logits_output` for the
CPU."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

from engine.step import Fault, Step, TokenLogprobs
from engine.worker.cuda.sampling.sampler import DeviceSampler, Pending
from engine.worker.cuda.transfers import CopyToHost, HostTransfer
from engine.worker.ports import AllReduce, RaggedLayout
from engine.worker.sampling.constraints import Constraints
from engine.worker.sampling.logits_output import Head, LogitsOutput, fault_of, slices
from engine.worker.sampling.logprobs import RowLogprobs, row_logprobs, to_token_logprobs
from engine.worker.sampling.sampler import SampledBatch


class _PendingTokens(NamedTuple):
    """Tokens that the device samples, and their copy to the host."""

    pending: Pending
    copy: CopyToHost
    late: frozenset[int]  # rows


class _PendingScores(NamedTuple):
    """Log-probabilities of prompt tokens, and their copy to the host."""

    copy: CopyToHost
    tops: list[int]

    def read(self) -> list[TokenLogprobs | None]:
        return to_token_logprobs(RowLogprobs(*self.copy.wait()), self.tops)


@dataclass(frozen=True, slots=True)
class PendingOutput:
    """The submitted work of a step; `read` waits for it."""

    step: Step
    tokens: _PendingTokens | None  # None if the step samples nothing
    scoring: tuple[_PendingScores, ...]

    @property
    def ids(self) -> Tensor | None:
        """One token per sampled row, int64 on the device; any token where a row failed."""
        return None if self.tokens is None else self.tokens.pending.ids

    def known(self) -> list[int]:
        """The same on the host; waits for the copy."""
        if self.tokens is None:
            return []
        ids: list[int] = self.tokens.copy.wait()[0].numpy().tolist()
        return ids

    def read(self) -> LogitsOutput:
        """The result; waits for the copies."""
        sampled, late_rows = SampledBatch(()), frozenset[int]()
        if self.tokens is not None:
            pending, copy, late_rows = self.tokens
            sampled = pending.finish(copy.wait())
        entries = [at for at, entry in enumerate(self.step.entries) if entry.sample is not None]
        faults = [fault_of(entries[row], fault) for row, fault in sampled.faults]
        logprobs = self._prompt_logprobs()
        line = "the model computed NaN or infinite logits for the prompt"
        faults += [Fault(at, line) for at, found in enumerate(logprobs) if None in found]
        scores = tuple(tuple(one for one in found if one is not None) for found in logprobs)
        late = tuple(entries[row] for row in late_rows)
        return LogitsOutput(sampled.tokens, sampled.logprobs, scores, tuple(faults), late)

    def _prompt_logprobs(self) -> list[list[TokenLogprobs | None]]:
        if not self.scoring:
            return []
        logprobs = iter([one for part in self.scoring for one in part.read()])
        orders = [entry.prompt_logprobs for entry in self.step.entries]
        return [[next(logprobs) for _ in order.ids] if order else [] for order in orders]


@dataclass(frozen=True, slots=True)
class DeviceOutputReader:
    """`head` computes logits `[rows, vocab]` in float32 from hidden states. With `all_reduce` other
    ranks have zeros where this one has the sampled ids."""

    head: Head
    sampler: DeviceSampler
    constraints: Constraints
    transfer: HostTransfer
    all_reduce: AllReduce | None = None
    samples = True

    def begin(self, step: Step, layout: RaggedLayout, hidden: Tensor) -> PendingOutput:
        """Submit the part of a step that follows its layers.

        `hidden` `[sampled rows, then scored rows, hidden]`. Waits for grammar masks, which host
        threads compute while the layers run.
        """
        num_samples = len(layout.sampled_rows)
        tokens = self._sample(step, layout, hidden[:num_samples]) if num_samples else None
        scoring = self._score(step, hidden[num_samples:]) if len(layout.scored_rows) else ()
        return PendingOutput(step, tokens, scoring)

    def _sample(self, step: Step, layout: RaggedLayout, hidden: Tensor) -> _PendingTokens:
        wanted = self.constraints.begin(step)
        specs = [entry.sample for entry in step.entries if entry.sample is not None]
        positions = (layout.positions[layout.sampled_rows] + 1).tolist()
        logits = self._logits(hidden)
        masks = self.constraints.collect(wanted)
        pending = self.sampler.begin(logits, specs, positions, masks)
        if self.all_reduce is not None:
            self.all_reduce(pending.ids)
        return _PendingTokens(pending, self.transfer.start(*pending.sources), masks.late)

    def _score(self, step: Step, hidden: Tensor) -> tuple[_PendingScores, ...]:
        orders = [entry.prompt_logprobs for entry in step.entries]
        targets = [target for order in orders if order is not None for target in order.ids]
        tops = [order.top for order in orders if order is not None for _ in order.ids]
        ids = self.sampler.put(np.array(targets, dtype=np.int64))
        found = []
        for part in slices(len(targets), self.sampler.vocab_size):
            likely = row_logprobs(self._logits(hidden[part]), ids[part], max(tops[part]))
            found.append(_PendingScores(self.transfer.start(*likely), tops[part]))
        return tuple(found)

    def _logits(self, hidden: Tensor) -> Tensor:
        logits = self.head(hidden)
        assert logits is not None, "only rank 0 has logits"
        return logits
