"""A worker that computes nothing, and remembers for each slot which tokens were written to it."""

from dataclasses import dataclass, field, replace
from random import Random
from typing import TYPE_CHECKING

from engine.step import LAST_TOKEN, Page, ProposalSpec, RequestId, Step, StepEntry, StepResult
from engine.worker.sampling.outputs import OutputMemory
from tests.fuzz.engine.answers import Answers, RowRates
from tests.fuzz.engine.language import UNREADABLE, Text
from tests.fuzz.engine.memory import Memory
from tests.fuzz.engine.reading import Reader, Row
from tests.fuzz.engine.wrong import Wrong

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Mapping


@dataclass(slots=True)
class Device:
    """Runs steps in their order. `texts` has the text of every request so far."""

    reader: Reader
    texts: "Mapping[RequestId, Text]"
    rates: RowRates
    random: Random
    counts: "Counter[str]"
    _failed: set[RequestId] = field(default_factory=set)  # by a fault, or with their step
    _last: dict[RequestId, int] = field(default_factory=dict)
    _outputs: OutputMemory = field(default_factory=OutputMemory)

    @property
    def memory(self) -> Memory:
        return self.reader.memory

    def lose(self) -> None:
        """The worker died."""
        self.memory.lose()
        self._failed.clear()
        self._last.clear()
        self._outputs = OutputMemory()

    def fail(self, step: Step, *, has_moved: bool) -> None:
        """The step raises an error, before or after its awaited moves."""
        self._outputs.open(step)
        if has_moved:
            self._move(step, [], is_awaited=True)
        self._failed.update(entry.request_id for entry in step.entries)

    def run(self, step: Step) -> StepResult:
        """Make the moves and compute the entries; moves that are not awaited come at any time."""
        unread: list[Page] = []
        self._outputs.open(step)
        order = [True, False] if self.random.random() < 0.5 else [False, True]
        self._move(step, unread, is_awaited=True)
        if order[0]:
            self._move(step, unread, is_awaited=False)
        answers = Answers(self.rates, self.random, self.counts, self._last, self._failed)
        entries = tuple([self._with_last(entry) for entry in step.entries])
        for number, entry in enumerate(
            self._outputs.complete(replace(step, entries=entries)).entries
        ):
            is_dropped = entry.request_id in self._failed
            row = self.reader.read(
                entry, self.texts[entry.request_id], unread, is_dropped=is_dropped
            )
            self._write(row)
            answers.add(number, row)
            if entry.proposal is not None:
                self._propose(row, entry.proposal, answers)
        if not order[0]:
            self._move(step, unread, is_awaited=False)
        return answers.result(step, unread)

    def _move(self, step: Step, unread: list[Page], *, is_awaited: bool) -> None:
        for move in step.moves:
            if move.is_awaited is is_awaited:
                self.memory.move(move, unread)

    def _with_last(self, entry: StepEntry) -> StepEntry:
        """The entry with the token that was sampled last, if it was planned before."""
        if entry.tokens != (LAST_TOKEN,):
            return entry
        self.counts["ahead"] += 1
        last = self._last.get(entry.request_id)
        if last is None and entry.request_id not in self._failed:
            raise Wrong(f"request {entry.request_id} goes on from a token that was not sampled")
        return entry._replace(tokens=(last or 0,))

    def _write(self, row: Row) -> None:
        entry, size = row.entry, self.memory.block_size
        stop = entry.start + len(entry.tokens)
        for group, (first, blocks) in enumerate(row.tables):
            held = [digest and digest + group for digest in row.digests]
            for number in range(max(first, entry.start // size), -(-stop // size)):
                begin, end = max(entry.start, number * size), min(stop, (number + 1) * size)
                slots = slice(begin - number * size, end - number * size)
                block = self.memory.block(blocks[number - first])
                block[slots] = held[begin - entry.start : end - entry.start]
        if (state := entry.state) is not None:
            for num_tokens, slot in state.snapshots:
                if not 0 < num_tokens <= len(entry.tokens):
                    raise Wrong(f"a snapshot after {num_tokens} of {len(entry.tokens)} tokens")
                self.memory.states[slot] = row.digests[num_tokens - 1]
            self.memory.states[state.slot] = row.digests[-1]
            self.counts["snapshots"] += len(state.snapshots)

    def _propose(self, row: Row, spec: ProposalSpec, answers: Answers) -> None:
        """The draft model computes what it has not, then proposes tokens."""
        if row.is_right:
            self.reader.check_draft_model(row, spec)
        end = spec.start + len(spec.tokens)
        self._write_drafted(row, spec.start, row.known(end)[spec.start : end])
        if not spec.num_tokens:
            answers.proposals.append(())
            return
        proposed = answers.propose(row, spec.num_tokens)
        num_accepted = answers.num_accepted[-1] if row.entry.num_drafts else 0
        computed = row.digests[: 1 + num_accepted]
        guesses = [UNREADABLE] * (len(proposed) - 1)
        self._write_drafted(row, row.entry.start, computed + guesses)

    def _write_drafted(self, row: Row, start: int, digests: list[int]) -> None:
        size, (first, blocks) = self.memory.block_size, row.tables[0]
        for position, digest in enumerate(digests, start):
            self.memory.drafted(blocks[position // size - first])[position % size] = digest
