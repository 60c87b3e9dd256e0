"""What an entry reads must be the KV, the state and the output of the tokens before it."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from engine.step import NO_STATE, Page, PageKind, ProposalSpec, StepEntry
from tests.fuzz.engine.language import UNREADABLE, Text, extend
from tests.fuzz.engine.step_checks import tables_of
from tests.fuzz.engine.wrong import Wrong

if TYPE_CHECKING:
    from collections import Counter

    from tests.fuzz.engine.memory import Memory


class Table(NamedTuple):
    """The blocks of an entry in one layer group, without its first `first` ones."""

    first: int
    blocks: "array[int]"


class Row(NamedTuple):
    """An entry whose tokens are known. `digests` are those after each of its tokens; `is_right`
    unless its result will be dropped, or a move could not fill what it reads."""

    entry: StepEntry
    text: Text
    tables: list[Table]
    digests: list[int]
    is_right: bool

    def known(self, stop: int) -> list[int]:
        """The digests after the tokens before a position; drafts of the entry count as output."""
        return self.text.digests[: self.entry.start] + self.digests[: stop - self.entry.start]


@dataclass(frozen=True, slots=True)
class Reader:
    """`windows` are those of the layer groups."""

    memory: "Memory"
    windows: tuple[int | None, ...]
    counts: "Counter[str]"

    def read(
        self, entry: StepEntry, text: Text, unread: Sequence[Page], *, is_dropped: bool
    ) -> Row:
        """Check what an entry reads, unless its result will be dropped."""
        stop = entry.start + len(entry.tokens)
        text.reach(stop)
        tables = [Table(one.first, array("i", one.blocks)) for one in tables_of(entry)]
        is_unread = _is_unread(entry, tables, unread)
        is_right = not is_dropped and not is_unread
        if is_right:
            self._check(entry, text, tables)
        digests = text.digests[entry.start : stop]
        if is_unread or text.tokens[entry.start : stop] != list(entry.tokens):
            before = UNREADABLE if is_unread else text.digest_before(entry.start)
            digests = extend(before, entry.tokens)
        return Row(entry, text, tables, digests, is_right)

    def _check(self, entry: StepEntry, text: Text, tables: list[Table]) -> None:
        name, start = f"request {entry.request_id} at {entry.start}", entry.start
        num_known = len(entry.tokens) - entry.num_drafts
        if list(entry.tokens[:num_known]) != text.tokens[start : start + num_known]:
            raise Wrong(f"{name} computes other tokens than its own: {entry.tokens}")
        lora = text.spec.lora
        if entry.lora_id != (0 if lora is None else lora.lora_id):
            raise Wrong(f"{name} is computed with LoRA {entry.lora_id}")
        for group, window in enumerate(self.windows):
            first = 0 if window is None else max(0, start - window + 1)
            self._check_kv(name, range(first, start), text.in_group[group], tables[group])
        if entry.state is not None:
            self._check_state(name, entry, text)
        sample = entry.sample
        if sample is not None and sample.reads_output:
            output = text.output(start + num_known - len(text.spec.prompt))
            self.counts["outputs read"] += 1
            if list(sample.output) != output:
                raise Wrong(f"{name} samples with the output {sample.output}, not {output}")

    def _check_kv(self, name: str, span: range, digests: list[int], table: Table) -> None:
        size, (first, blocks) = self.memory.block_size, table
        self.counts["slots read"] += len(span)
        if not span:
            return
        for number in range(span.start // size, -(-span.stop // size)):
            if number < first:
                raise Wrong(f"{name}: block {number} in the window was given back")
            begin, end = max(span.start, number * size), min(span.stop, (number + 1) * size)
            held = self.memory.block(blocks[number - first])
            if held[begin - number * size : end - number * size] != digests[begin:end]:
                raise Wrong(f"{name} reads other KV than its own in [{begin}, {end})")

    def _check_state(self, name: str, entry: StepEntry, text: Text) -> None:
        assert entry.state is not None
        self.counts["states read"] += 1
        if entry.state.source == NO_STATE:
            if entry.start:
                raise Wrong(f"{name} reads zeros as its state")
        elif self.memory.states.get(entry.state.source) != text.digest_before(entry.start):
            raise Wrong(f"{name} reads another state than its own")

    def check_draft_model(self, row: Row, spec: ProposalSpec) -> None:
        """The draft model has the KV before `spec.start`, and computes the request's tokens."""
        name, size = f"request {row.entry.request_id} at {row.entry.start}", self.memory.block_size
        if list(spec.tokens) != row.text.tokens[spec.start : spec.start + len(spec.tokens)]:
            raise Wrong(f"{name}: the draft model computes other tokens than its own")
        if spec.num_tokens and spec.start + len(spec.tokens) != row.entry.start:
            raise Wrong(f"{name}: the draft model does not reach the entry")
        first, blocks = row.tables[0]
        for position in range(spec.start):
            held = self.memory.drafted(blocks[position // size - first])[position % size]
            if held != row.text.digests[position]:
                raise Wrong(f"{name}: the draft model reads other KV at {position}")
        self.counts["draft model slots read"] += spec.start


def _is_unread(entry: StepEntry, tables: list[Table], unread: Sequence[Page]) -> bool:
    """Whether a move of this step could not fill what the entry reads."""
    state = entry.state
    slots = () if state is None else (state.source, state.slot)
    pages = {Page(PageKind.SNAPSHOT, slot) for slot in slots}
    pages.update(Page(PageKind.BLOCK, block) for table in tables for block in table.blocks)
    return not pages.isdisjoint(unread)
