"""From hidden states to the contents of a step's result: tokens, log-probabilities, faults.

Only on the last stage. `begin` submits the work that follows the layers, and `read` of its result
waits for what was copied to the host. Ranks other than 0 compute their part of the logits. The
logits of a prompt are computed in slices, because those of a long prompt would be larger than the
model.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor

from engine.step import Fault, Step, TokenLogprobs
from engine.worker.ports import AllReduce, RaggedLayout
from engine.worker.sampling.constraints import Constraints, MaskRequest
from engine.worker.sampling.filters import (
    RowLogprobs,
    logprobs_of,
    row_logprobs,
    to_token_logprobs,
)
from engine.worker.sampling.last_tokens import SampledTokens
from engine.worker.sampling.sampler import PendingSample, RowFault, SampledBatch, Sampler
from engine.worker.transfers import Fetched, Transfers

SLICE_BYTES = 32 << 20  # float32 logits at once at most, but at least one row


class LogitsOutput(NamedTuple):
    """The fields of a `StepResult` that are computed from hidden states."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    prompt_logprobs: tuple[tuple[TokenLogprobs, ...], ...] = ()
    faults: tuple[Fault, ...] = ()
    late: tuple[int, ...] = ()
    num_accepted: tuple[int, ...] = ()  # accepted drafts by entry, in steps with drafts
    vectors: tuple[bytes, ...] = ()  # one vector for each entry with `pooling`


class PendingOutput(SampledTokens, Protocol):
    """The submitted work of a step that follows its layers."""

    def read(self) -> LogitsOutput:
        """The result; waits for its copies."""


class ReadsOutput(Protocol):
    """Submits what follows the layers of a step."""

    @property
    def reads_tokens(self) -> bool:
        """Whether it needs the output of requests on the host."""

    def prepare(self, step: Step) -> MaskRequest:
        """Start computing the masks that `begin` will need; all tokens of the step are known."""

    def has_collectives(self, layout: RaggedLayout) -> bool:
        """Whether the ranks wait for each other after the first rows of logits."""

    def begin(
        self, step: Step, layout: RaggedLayout, hidden: Tensor, masks: MaskRequest
    ) -> PendingOutput:
        """`hidden` has the layout's sampled rows, then its scored or pooled rows."""


Head = Callable[[Tensor], Tensor | None]


class _PendingTokens(NamedTuple):
    """Tokens that are being sampled, and their copy to the host."""

    pending: PendingSample
    fetched: Fetched
    late: frozenset[int]  # rows


class _PendingScores(NamedTuple):
    """Log-probabilities of prompt tokens, and their copy to the host."""

    fetched: Fetched
    tops: list[int]

    def read(self) -> list[TokenLogprobs | None]:
        return to_token_logprobs(RowLogprobs(*self.fetched.wait()), self.tops)


@dataclass(frozen=True, slots=True, eq=False)
class _PendingVectors:
    """Log-probabilities of the `token_ids` of entries with `pooling`, and their copies to the
    host; each copy has as many columns as its longest row needs."""

    step: Step
    fetched: tuple[Fetched, ...]

    def read(self) -> tuple[tuple[bytes, ...], list[Fault]]:
        """A vector for each entry with `pooling`; an entry whose logits are not finite gets a
        fault."""
        rows = (row for part in self.fetched for row in part.wait()[0].numpy())
        vectors: list[bytes] = []
        faults: list[Fault] = []
        for at, entry in enumerate(self.step.entries):
            if entry.pooling is None:
                continue
            vector = np.zeros(0, dtype="<f4")
            if entry.pooling.token_ids:
                vector = next(rows)[: len(entry.pooling.token_ids)].astype("<f4")
            if not np.isfinite(vector).all():
                faults.append(Fault(at, "the model computed NaN or infinite logits"))
            vectors.append(vector.tobytes())
        return tuple(vectors), faults


@dataclass(frozen=True, slots=True, eq=False)
class _LogitsPending:
    """The submitted work of a step on rank 0."""

    step: Step
    sampled: _PendingTokens | None  # None if the step samples nothing
    scoring: tuple[_PendingScores, ...]
    pooling: _PendingVectors | None = None  # None if the step pools nothing

    @property
    def ids(self) -> Tensor | None:
        return None if self.sampled is None else self.sampled.pending.ids

    @property
    def is_known(self) -> bool:
        return self.sampled is None or self.sampled.fetched.is_here

    def known(self) -> list[int]:
        if self.sampled is None:
            return []
        tokens: list[int] = self.sampled.fetched.wait()[0].numpy().tolist()
        return tokens

    def read(self) -> LogitsOutput:
        sampled, late_rows = SampledBatch(()), frozenset[int]()
        if self.sampled is not None:
            pending, fetched, late_rows = self.sampled
            sampled = pending.finish(fetched.wait())
        entries = [at for at, entry in enumerate(self.step.entries) if entry.sample is not None]
        faults = [fault_of(entries[row], fault) for row, fault in sampled.faults]
        late = tuple(entries[row] for row in late_rows)
        vectors: tuple[bytes, ...] = ()
        if self.pooling is not None:
            vectors, more = self.pooling.read()
            faults += more
        scores: tuple[tuple[TokenLogprobs, ...], ...] = ()
        if self.scoring:
            logprobs = self._prompt_logprobs()
            line = "the model computed NaN or infinite logits in its prompt"
            faults += [Fault(at, line) for at, row in enumerate(logprobs) if None in row]
            scores = tuple(tuple(one for one in row if one is not None) for row in logprobs)
        return LogitsOutput(
            sampled.tokens, sampled.logprobs, scores, tuple(faults), late, vectors=vectors
        )

    def _prompt_logprobs(self) -> list[list[TokenLogprobs | None]]:
        """Log-probabilities of each entry's targets; an empty list for entries without targets."""
        logprobs = iter([score for part in self.scoring for score in part.read()])
        orders = [entry.prompt_logprobs for entry in self.step.entries]
        return [[next(logprobs) for _ in order.ids] if order else [] for order in orders]


@dataclass(frozen=True, slots=True)
class OutputReader:
    """Rank 0 of the last stage, which samples. `head` computes logits `[rows, vocab]` in float32.

    With `share`, other ranks have zeros where this one has the sampled ids.
    """

    head: Head
    sampler: Sampler
    constraints: Constraints
    transfers: Transfers
    share: AllReduce | None = None
    reads_tokens = True

    def prepare(self, step: Step) -> MaskRequest:
        return self.constraints.begin(step)

    def has_collectives(self, layout: RaggedLayout) -> bool:
        num_more = len(layout.scored_rows) + len(layout.pooled.rows)
        return self.share is not None or num_more > 0

    def begin(
        self, step: Step, layout: RaggedLayout, hidden: Tensor, masks: MaskRequest
    ) -> PendingOutput:
        num_samples, num_scored = len(layout.sampled_rows), len(layout.scored_rows)
        sampled = self._sample(step, hidden[:num_samples], masks) if num_samples else None
        scoring = self._score(step, hidden[num_samples:][:num_scored]) if num_scored else ()
        pooling = self._pool(step, hidden[num_samples + num_scored :])
        return _LogitsPending(step, sampled, scoring, pooling)

    def _sample(self, step: Step, hidden: Tensor, wanted: MaskRequest) -> _PendingTokens:
        sampled = [entry for entry in step.entries if entry.sample is not None]
        specs = [entry.sample for entry in sampled if entry.sample is not None]
        positions = [entry.start + len(entry.tokens) for entry in sampled]
        logits = self._logits(hidden)
        masks = self.constraints.collect(wanted)
        pending = self.sampler.begin(logits, specs, positions, masks)
        if self.share is not None:
            self.share(pending.ids)
        return _PendingTokens(pending, self.transfers.fetch(*pending.sources), masks.late)

    def _score(self, step: Step, hidden: Tensor) -> tuple[_PendingScores, ...]:
        orders = [entry.prompt_logprobs for entry in step.entries]
        targets = [target for order in orders if order is not None for target in order.ids]
        tops = [order.top for order in orders if order is not None for _ in order.ids]
        ids = self.transfers.put(np.array(targets, dtype=np.int64))
        scores = []
        for part in slices(len(targets), self.sampler.vocab_size):
            likely = row_logprobs(self._logits(hidden[part]), ids[part], max(tops[part]))
            scores.append(_PendingScores(self.transfers.fetch(*likely), tops[part]))
        return tuple(scores)

    def _pool(self, step: Step, hidden: Tensor) -> _PendingVectors | None:
        """Compute the log-probabilities of `token_ids`, one row for each entry that has any."""
        specs = [entry.pooling for entry in step.entries if entry.pooling is not None]
        if not specs:
            return None
        rows = [spec.token_ids for spec in specs if spec.token_ids]
        fetched = []
        for part in slices(len(rows), self.sampler.vocab_size):
            ids = np.zeros((len(rows[part]), max(map(len, rows[part]))), dtype=np.int64)
            for row, token_ids in zip(ids, rows[part], strict=True):
                row[: len(token_ids)] = token_ids
            logprobs = logprobs_of(self._logits(hidden[part]), self.transfers.put(ids))
            fetched.append(self.transfers.fetch(logprobs))
        return _PendingVectors(step, tuple(fetched))

    def _logits(self, hidden: Tensor) -> Tensor:
        logits = self.head(hidden)
        assert logits is not None, "only rank 0 has logits"
        return logits


@dataclass(frozen=True, slots=True, eq=False)
class _Followed:
    """Tokens that rank 0 sampled; the result of a step is rank 0's."""

    ids: Tensor | None  # None if the ranks do not share them
    is_known = False

    def known(self) -> Sequence[int]:
        raise AssertionError("only rank 0 samples rows that read their own output")

    def read(self) -> LogitsOutput:
        return LogitsOutput()


@dataclass(frozen=True, slots=True)
class FollowingReader:
    """The other ranks of the last stage: takes part in each computation of logits that rank 0's
    `OutputReader` submits, and with `share` in each exchange of tokens."""

    head: Head
    vocab_size: int
    transfers: Transfers
    share: AllReduce | None
    reads_tokens = False

    def prepare(self, step: Step) -> MaskRequest:
        """None: rank 0 masks its logits."""
        return MaskRequest()

    def has_collectives(self, layout: RaggedLayout) -> bool:
        return True

    def begin(
        self, step: Step, layout: RaggedLayout, hidden: Tensor, masks: MaskRequest
    ) -> PendingOutput:
        num_samples, ids = len(layout.sampled_rows), None
        if num_samples:
            self.head(hidden[:num_samples])
        if num_samples and self.share is not None:
            ids = self.transfers.put(np.zeros(num_samples, dtype=np.int64))
            self.share(ids)
        num_scored, num_pooled = len(layout.scored_rows), len(layout.pooled.rows)
        for part in slices(num_scored, self.vocab_size):
            self.head(hidden[num_samples:][part])
        for part in slices(num_pooled, self.vocab_size):
            self.head(hidden[num_samples + num_scored :][part])
        return _Followed(ids)


def fault_of(entry: int, fault: RowFault) -> Fault:
    """The fault of a row as the fault of its entry."""
    return Fault(entry, str(fault), fault.is_caller_error)


def slices(num_rows: int, vocab_size: int) -> Iterator[slice]:
    """Slices of `num_rows` rows, each with at most `SLICE_BYTES` of logits."""
    size = max(1, SLICE_BYTES // (4 * vocab_size))
    return (slice(first, first + size) for first in range(0, num_rows, size))
