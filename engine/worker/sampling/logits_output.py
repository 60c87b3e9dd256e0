"""From hidden states to the contents of a step's result: tokens, log-probabilities, faults.

Only on the last stage, where ranks other than 0 only `follow`. The logits of a prompt are computed
in slices, because those of a long prompt would be larger than the model.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from engine.step import Fault, Step, TokenLogprobs
from engine.worker.ports import RaggedLayout
from engine.worker.sampling.constraints import Constraints, MaskRequest
from engine.worker.sampling.logprobs import log_probabilities
from engine.worker.sampling.sampler import RowFault, SampledBatch, Sampler

SLICE_BYTES = 32 << 20  # of float32 logits at most, but at least one row


class LogitsOutput(NamedTuple):
    """The fields of a `StepResult` that are computed from hidden states."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    prompt_logprobs: tuple[tuple[TokenLogprobs, ...], ...] = ()
    faults: tuple[Fault, ...] = ()
    late: tuple[int, ...] = ()
    num_accepted: tuple[int, ...] = ()  # of steps with drafts
    vectors: tuple[bytes, ...] = ()  # of pooling requests


Head = Callable[[Tensor], Tensor | None]


@dataclass(frozen=True, slots=True)
class OutputReader:
    """`head` computes logits `[rows, vocab]` in float32; it returns None except on rank 0."""

    head: Head
    sampler: Sampler
    constraints: Constraints

    def begin(self, step: Step) -> MaskRequest:
        """Start computing the masks that `read` will need."""
        return self.constraints.begin(step)

    def read(
        self, step: Step, layout: RaggedLayout, hidden: Tensor, wanted: MaskRequest
    ) -> LogitsOutput:
        """`hidden` has the layout's sampled rows, then its scored rows."""
        num_samples = len(layout.sampled_rows)
        sampled, late_rows = self._sample(step, layout, hidden[:num_samples], wanted)
        entries = [at for at, entry in enumerate(step.entries) if entry.sample is not None]
        faults = [fault_of(entries[row], fault) for row, fault in sampled.faults]
        late = tuple(entries[row] for row in late_rows)
        if not len(layout.scored_rows):
            return LogitsOutput(sampled.tokens, sampled.logprobs, (), tuple(faults), late)
        found = self._score(step, hidden[num_samples:])
        line = "the model computed NaN or infinite logits in its prompt"
        faults += [Fault(at, line) for at, row in enumerate(found) if None in row]
        scores = tuple(tuple(one for one in row if one is not None) for row in found)
        return LogitsOutput(sampled.tokens, sampled.logprobs, scores, tuple(faults), late)

    def follow(self, layout: RaggedLayout, hidden: Tensor) -> None:
        """On other ranks: take part in each computation of logits that `read` does on rank 0."""
        num_samples = len(layout.sampled_rows)
        if num_samples:
            self.head(hidden[:num_samples])
        for part in slices(len(layout.scored_rows), self.sampler.vocab_size):
            self.head(hidden[num_samples:][part])

    def _sample(
        self, step: Step, layout: RaggedLayout, hidden: Tensor, wanted: MaskRequest
    ) -> tuple[SampledBatch, frozenset[int]]:
        """The sampled tokens, and the late rows, which have to be sampled again."""
        if not len(layout.sampled_rows):
            return SampledBatch(()), frozenset()
        specs = [entry.sample for entry in step.entries if entry.sample is not None]
        positions = [e.start + len(e.tokens) for e in step.entries if e.sample is not None]
        logits = self._logits(hidden)
        masks = self.constraints.collect(wanted)
        return self.sampler.sample(logits, specs, positions, masks), masks.late

    def _score(self, step: Step, hidden: Tensor) -> list[list[TokenLogprobs | None]]:
        """Log-probabilities of each entry's targets; an empty list for entries without targets."""
        targets = [entry.prompt_logprobs for entry in step.entries]
        ids = [token for order in targets if order is not None for token in order.ids]
        tops = [order.top for order in targets if order is not None for _ in order.ids]
        found: list[TokenLogprobs | None] = []
        for part in slices(len(ids), self.sampler.vocab_size):
            found += log_probabilities(self._logits(hidden[part]), ids[part], tops[part])
        found_logprobs = iter(found)
        return [[next(found_logprobs) for _ in order.ids] if order else [] for order in targets]

    def _logits(self, hidden: Tensor) -> Tensor:
        logits = self.head(hidden)
        assert logits is not None, "only rank 0 has logits"
        return logits


def fault_of(entry: int, fault: RowFault) -> Fault:
    """The fault of a row as the fault of its entry."""
    return Fault(entry, str(fault), fault.is_caller_error)


def slices(num_rows: int, vocab_size: int) -> Iterator[slice]:
    """Slices of `num_rows` rows, each with at most `SLICE_BYTES` of logits."""
    size = max(1, SLICE_BYTES // (4 * vocab_size))
    return (slice(first, first + size) for first in range(0, num_rows, size))
