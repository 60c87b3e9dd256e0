"""The answers of a device: samples the rows of a step into the fields of its result."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from struct import pack
from typing import TYPE_CHECKING

from engine.step import Fault, Page, RequestId, Step, StepResult, TokenLogprobs
from tests.fuzz.engine.language import NUM_TOKENS, next_token
from tests.fuzz.engine.wrong import Wrong

if TYPE_CHECKING:
    from collections import Counter

    from tests.fuzz.engine.reading import Row


@dataclass(frozen=True, slots=True)
class RowRates:
    """How often a row that may be late is late, a row has a fault, and a proposal is a guess."""

    late: float = 0.0
    fault: float = 0.0
    guess: float = 0.2


@dataclass(slots=True)
class Answers:
    """What a step has sampled so far; `last` is kept from step to step."""

    rates: RowRates
    random: Random
    counts: "Counter[str]"
    last: dict[RequestId, int]  # the last sampled token
    failed: set[RequestId]  # requests whose rows are dropped from now on
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    prompt_logprobs: list[tuple[TokenLogprobs, ...]] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    late: list[int] = field(default_factory=list)
    num_accepted: list[int] = field(default_factory=list)
    vectors: list[bytes] = field(default_factory=list)
    proposals: list[tuple[int, ...]] = field(default_factory=list)

    def add(self, number: int, row: "Row") -> None:
        """Answer entry number `number`."""
        entry, spec = row.entry, row.text.spec
        targets = entry.prompt_logprobs
        self.prompt_logprobs.append(())
        if targets is not None:
            first = targets.offset
            ids = spec.prompt[entry.start + first + 1 : entry.start + first + 1 + len(targets.ids)]
            if row.is_right and targets.ids != ids:
                raise Wrong(f"request {entry.request_id}: log-probabilities of {targets.ids}")
            digests = row.digests[first : first + len(ids)]
            self.prompt_logprobs[-1] = tuple([logprob_of(digest) for digest in digests])
        if entry.pooling is not None:
            self.counts["vectors"] += 1
            self.vectors.append(vector_of(row.digests[-1]))
        if entry.sample is not None:
            self._sample(number, row)

    def _sample(self, number: int, row: "Row") -> None:
        entry, sample = row.entry, row.entry.sample
        assert sample is not None
        sampled = self._rows(row, sample.banned)
        is_late = sample.may_be_late and self.random.random() < self.rates.late
        is_faulty = not is_late and self.random.random() < self.rates.fault
        is_faulty = is_faulty and row.is_right  # else it is computed again, whatever its result is
        if is_late or is_faulty:
            sampled = sampled[:1]
        if is_late:
            self.counts["late"] += 1
            self.late.append(number)
        if is_faulty:
            self.counts["faults"] += 1
            self.faults.append(Fault(number, "drawn", self.random.random() < 0.5))
            self.failed.add(entry.request_id)
        if entry.num_drafts:
            self.counts["drafts"] += entry.num_drafts
            self.counts["accepted"] += len(sampled) - 1
            self.num_accepted.append(len(sampled) - 1)
        self.tokens += sampled
        wants = sample.logprobs is not None
        self.logprobs += [TokenLogprobs(-float(one), 1) if wants else None for one in sampled]
        if is_late or is_faulty or not row.is_right:
            self.last.pop(entry.request_id, None)
        else:
            self.last[entry.request_id] = sampled[-1]

    def _rows(self, row: "Row", banned: tuple[int, ...]) -> list[int]:
        """The token after the entry, and one more for each draft that was right."""
        drafts = row.entry.tokens[len(row.entry.tokens) - row.entry.num_drafts :]
        first, sampled = len(row.digests) - 1 - len(drafts), list[int]()
        for place, draft in enumerate((*drafts, None), first):
            sampled.append(next_token(row.digests[place], row.entry.tokens[place], banned))
            if sampled[-1] != draft:
                break
        return sampled

    def propose(self, row: "Row", count: int) -> list[int]:
        """Add tokens that may follow the row's last one; most are right."""
        num_accepted = self.num_accepted[-1] if row.entry.num_drafts else 0
        place = len(row.entry.tokens) - 1 - row.entry.num_drafts + num_accepted
        digest, proposed = row.digests[place], [self.tokens[-1]]
        for _ in range(count):
            digest = hash((digest, proposed[-1])) & -16
            is_guess = self.random.random() < self.rates.guess
            guess = self.random.randrange(NUM_TOKENS)
            proposed.append(guess if is_guess else next_token(digest, proposed[-1]))
        self.counts["proposed"] += count
        self.proposals.append(tuple(proposed[1:]))
        return proposed

    def result(self, step: Step, unread: Sequence[Page]) -> StepResult:
        """The result of the step, whose moves could not read `unread`."""
        return StepResult(
            step.step_id,
            tuple(self.tokens),
            0.0,
            tuple(self.logprobs) if any(self.logprobs) else (),
            tuple(self.prompt_logprobs) if any(self.prompt_logprobs) else (),
            tuple(self.faults),
            tuple(self.late),
            tuple(self.num_accepted),
            tuple(unread),
            tuple(self.vectors),
            tuple(self.proposals),
        )


def logprob_of(digest: int) -> TokenLogprobs:
    """The log-probability of a prompt's token, which is a function of those before it."""
    return TokenLogprobs(-float(digest >> 8 & 0xFFFF), 1)


def vector_of(digest: int) -> bytes:
    """The vector into which a prompt with this digest is pooled."""
    return pack("<q", digest)
