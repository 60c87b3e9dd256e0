"""From hidden states to a step's result in two parts: what the device is given, and what is read
when it has come back. As `engine.worker.sampling.logits_output`, whose words are used."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

from engine.step import Fault, Step, TokenLogprobs
from engine.worker.cuda.sampling.sampler import DeviceSampler, Pending
from engine.worker.cuda.step.transfers import Carried, Outward
from engine.worker.model.layout import RaggedLayout
from engine.worker.sampling.constraints import Constraints
from engine.worker.sampling.logits_output import Head, LogitsOutput, fault_of, slices
from engine.worker.sampling.logprobs import Likelihoods, likelihoods, tell
from engine.worker.sampling.sampler import SampledToken


class _Drawing(NamedTuple):
    """Tokens that the device draws, and their way to the host."""

    pending: Pending
    carried: Carried
    late: frozenset[int]  # rows


class _Scoring(NamedTuple):
    """How likely some tokens of prompts are, on the way to the host."""

    carried: Carried
    tops: list[int]

    def read(self) -> list[TokenLogprobs | None]:
        return tell(Likelihoods(*self.carried.arrived()), self.tops)


@dataclass(frozen=True, slots=True)
class PendingOutput:
    """What was given to the device for a step; `read` waits for it."""

    step: Step
    drawing: _Drawing | None  # None where nobody draws
    scoring: tuple[_Scoring, ...]

    @property
    def ids(self) -> Tensor | None:
        """One token per draw, int64 on the device; stand-ins where a row failed."""
        return None if self.drawing is None else self.drawing.pending.ids

    def known(self) -> list[int]:
        """The same on the host, waited for."""
        if self.drawing is None:
            return []
        ids: list[int] = self.drawing.carried.arrived()[0].numpy().tolist()
        return ids

    def read(self) -> LogitsOutput:
        """The result, when it is there."""
        drawn, late_rows = SampledToken(()), frozenset[int]()
        if self.drawing is not None:
            pending, carried, late_rows = self.drawing
            drawn = pending.finish(carried.arrived())
        entries = [at for at, entry in enumerate(self.step.entries) if entry.sample is not None]
        faults = [fault_of(entries[row], fault) for row, fault in drawn.faults]
        told = self._prompt_logprobs()
        line = "the model computed NaN or infinite logits in its prompt"
        faults += [Fault(at, line) for at, found in enumerate(told) if None in found]
        scores = tuple(tuple(one for one in found if one is not None) for found in told)
        late = tuple(entries[row] for row in late_rows)
        return LogitsOutput(drawn.tokens, drawn.logprobs, scores, tuple(faults), late)

    def _prompt_logprobs(self) -> list[list[TokenLogprobs | None]]:
        if not self.scoring:
            return []
        told = iter([one for part in self.scoring for one in part.read()])
        orders = [entry.prompt_logprobs for entry in self.step.entries]
        return [[next(told) for _ in order.ids] if order else [] for order in orders]


@dataclass(frozen=True, slots=True)
class DeviceOutputReader:
    """`head` makes logits `[rows, vocab]` in float32 of hidden states; there is one rank."""

    head: Head
    sampler: DeviceSampler
    constraints: Constraints
    outward: Outward

    def begin(self, step: Step, layout: RaggedLayout, hidden: Tensor) -> PendingOutput:
        """Give the device what is left of a step after its layers.

        `hidden` are those of the layout's sampled rows, then of its scored rows. Masks of
        grammars are waited for: threads of the host compute them beside the layers.
        """
        num_draws = len(layout.sampled_rows)
        drawing = self._draw(step, layout, hidden[:num_draws]) if num_draws else None
        scoring = self._score(step, hidden[num_draws:]) if len(layout.scored_rows) else ()
        return PendingOutput(step, drawing, scoring)

    def _draw(self, step: Step, layout: RaggedLayout, hidden: Tensor) -> _Drawing:
        wanted = self.constraints.begin(step)
        draws = [entry.sample for entry in step.entries if entry.sample is not None]
        positions = (layout.positions[layout.sampled_rows] + 1).tolist()
        logits = self._logits(hidden)
        masks = self.constraints.collect(wanted)
        pending = self.sampler.begin(logits, draws, positions, masks)
        return _Drawing(pending, self.outward.carry(*pending.sources), masks.late)

    def _score(self, step: Step, hidden: Tensor) -> tuple[_Scoring, ...]:
        orders = [entry.prompt_logprobs for entry in step.entries]
        targets = [target for order in orders if order is not None for target in order.ids]
        tops = [order.top for order in orders if order is not None for _ in order.ids]
        ids = self.sampler.put(np.array(targets, dtype=np.int64))
        found = []
        for part in slices(len(targets), self.sampler.vocab_size):
            likely = likelihoods(self._logits(hidden[part]), ids[part], max(tops[part]))
            found.append(_Scoring(self.outward.carry(*likely), tops[part]))
        return tuple(found)

    def _logits(self, hidden: Tensor) -> Tensor:
        logits = self.head(hidden)
        assert logits is not None, "a rank that follows"
        return logits
