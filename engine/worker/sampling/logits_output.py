"""From hidden states to what a step's result says: tokens, log-probabilities, faults.

Only on the last stage, where other ranks than 0 only `follow`. The logits of a prompt are made in
slices, because a long prompt's at once would be larger than the model.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from engine.step import Fault, Step, TokenLogprobs
from engine.worker.ports import RaggedLayout
from engine.worker.sampling.constraints import Constraints, MaskRequest
from engine.worker.sampling.logprobs import log_probabilities
from engine.worker.sampling.sampler import Draws, RowFault, SampledToken

SLICE_BYTES = 32 << 20  # of logits in float32, at most (or one row)


class LogitsOutput(NamedTuple):
    """The fields of a `StepResult` that are read from hidden states."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    prompt_logprobs: tuple[tuple[TokenLogprobs, ...], ...] = ()
    faults: tuple[Fault, ...] = ()
    late: tuple[int, ...] = ()


Head = Callable[[Tensor], Tensor | None]


@dataclass(frozen=True, slots=True)
class OutputReader:
    """`head` makes logits `[rows, vocab]` in float32 of hidden states, on rank 0."""

    head: Head
    sampler: Draws
    constraints: Constraints

    def begin(self, step: Step) -> MaskRequest:
        """Start on what `read` will need besides hidden states."""
        return self.constraints.begin(step)

    def read(
        self, step: Step, layout: RaggedLayout, hidden: Tensor, wanted: MaskRequest
    ) -> LogitsOutput:
        """`hidden` are those of the layout's sampled rows, then of its scored rows."""
        num_draws = len(layout.sampled_rows)
        drawn, late_rows = self._draw(step, layout, hidden[:num_draws], wanted)
        entries = [at for at, entry in enumerate(step.entries) if entry.sample is not None]
        faults = [fault_of(entries[row], fault) for row, fault in drawn.faults]
        late = tuple(entries[row] for row in late_rows)
        if not len(layout.scored_rows):
            return LogitsOutput(drawn.tokens, drawn.logprobs, (), tuple(faults), late)
        told = self._score(step, hidden[num_draws:])
        line = "the model computed NaN or infinite logits in its prompt"
        faults += [Fault(at, line) for at, found in enumerate(told) if None in found]
        scores = tuple(tuple(one for one in found if one is not None) for found in told)
        return LogitsOutput(drawn.tokens, drawn.logprobs, scores, tuple(faults), late)

    def follow(self, layout: RaggedLayout, hidden: Tensor) -> None:
        """Be there, on another rank, for each time that `read` asks for logits on rank 0."""
        num_draws = len(layout.sampled_rows)
        if num_draws:
            self.head(hidden[:num_draws])
        for part in slices(len(layout.scored_rows), self.sampler.vocab_size):
            self.head(hidden[num_draws:][part])

    def _draw(
        self, step: Step, layout: RaggedLayout, hidden: Tensor, wanted: MaskRequest
    ) -> tuple[SampledToken, frozenset[int]]:
        """What was drawn, and the rows that have to be drawn again."""
        if not len(hidden):
            return SampledToken(()), frozenset()
        draws = [entry.sample for entry in step.entries if entry.sample is not None]
        positions = (layout.positions[layout.sampled_rows] + 1).tolist()
        logits = self._logits(hidden)
        masks = self.constraints.collect(wanted)
        return self.sampler.draw(logits, draws, positions, masks), masks.late

    def _score(self, step: Step, hidden: Tensor) -> list[list[TokenLogprobs | None]]:
        """Log-probabilities of each entry's targets, none for who does not ask."""
        orders = [entry.prompt_logprobs for entry in step.entries]
        ids = [target for order in orders if order is not None for target in order.ids]
        tops = [order.top for order in orders if order is not None for _ in order.ids]
        found: list[TokenLogprobs | None] = []
        for part in slices(len(ids), self.sampler.vocab_size):
            found += log_probabilities(self._logits(hidden[part]), ids[part], tops[part])
        told = iter(found)
        return [[next(told) for _ in order.ids] if order else [] for order in orders]

    def _logits(self, hidden: Tensor) -> Tensor:
        logits = self.head(hidden)
        assert logits is not None, "a rank that follows"
        return logits


def fault_of(entry: int, fault: RowFault) -> Fault:
    """What is wrong with a row, said of its entry."""
    return Fault(entry, str(fault), fault.is_caller_error)


def slices(num_rows: int, vocab_size: int) -> Iterator[slice]:
    """Runs of so many rows whose logits are not too large at once."""
    size = max(1, SLICE_BYTES // (4 * vocab_size))
    return (slice(first, first + size) for first in range(0, num_rows, size))
