"""Drafts of a step: each draft is computed as a row of its own, and verified by sampling.

An entry `(last, d1, …, dk)` becomes k + 1 decodes of one token each over the same block table. The
KV of all rows is written before any row attends, so row i reads the KV of the drafts before it. Row
i is sampled with the parameters, the penalties, the mask and the random number that it would have
if d1 … di were the output. So the tokens are those of decoding one by one, whatever the drafts are:

    input    last   d1     d2     d3
    sampled  s0     s1     s2     s3      accepted: while s0 = d1, s1 = d2, …
             └─────output─────┘           here s0 = d1, s1 = d2, s2 ≠ d3: output s0, s1, s2

The KV of rejected drafts lies behind the request's last token, where the next step overwrites it.
Recurrent layers compute the rows one after the other, and keep the state after each of them.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import repeat
from typing import Protocol

from torch import Tensor

from engine.step import Snapshot, StateSlots, Step, StepEntry
from engine.worker.process.stage_kv import StageKV
from engine.worker.sampling.logits_output import LogitsOutput


class Drafter(Protocol):
    """Proposes tokens that may follow those of a step."""

    @property
    def reads_hidden(self) -> bool:
        """Whether it needs the hidden states of all rows, behind the model's last layer."""

    def propose(
        self, step: Step, output: LogitsOutput, hidden: Tensor | None
    ) -> tuple[tuple[int, ...], ...]:
        """The proposals of each entry of `step` with a `ProposalSpec`. `output` has its tokens."""


class LoadedDrafter(Protocol):
    """The weights of what proposes drafts; its KV cache is allocated once its size is known."""

    @property
    def kv(self) -> StageKV: ...

    @property
    def num_bytes(self) -> int:
        """Bytes of its weights, about."""

    @property
    def num_parameters(self) -> int: ...

    def open(self, num_blocks: int) -> Drafter:
        """The drafter over a KV cache of so many blocks."""


def split_drafts(step: Step) -> Step:
    """The step with one entry for each row of an entry with drafts; the same step if it has none.

    Where sampling reads the output, each row's spec has the output with the drafts up to the row.
    """
    if not step.has_drafts:
        return step
    return replace(step, entries=tuple([row for entry in step.entries for row in _rows(entry)]))


def _rows(entry: StepEntry) -> Iterator[StepEntry]:
    spec = entry.sample
    if not entry.num_drafts:
        yield entry
        return
    if spec is None or not entry.is_decode or entry.prompt_logprobs is not None:
        raise ValueError(f"request {entry.request_id}: drafts in an entry that is not a decode")
    states: list[StateSlots | None] = [None] * len(entry.tokens)
    if entry.state is not None:
        states = _row_states(entry.state, entry)
    for index, (token, state) in enumerate(zip(entry.tokens, states, strict=True)):
        drafts = entry.tokens[1 : 1 + index] if spec.reads_output else ()
        yield entry._replace(
            start=entry.start + index,
            tokens=(token,),
            sample=spec._replace(output=spec.output + drafts) if drafts else spec,
            num_drafts=0,
            state=state,
        )


def _row_states(state: StateSlots, entry: StepEntry) -> list[StateSlots | None]:
    """The slots of each row: it reads what the row before it has written."""
    written, source = dict(state.snapshots), state.source
    rows: list[StateSlots | None] = []
    for count in range(1, len(entry.tokens)):
        if count not in written:
            raise ValueError(f"request {entry.request_id}: no state slot behind row {count - 1}")
        rows.append(StateSlots(written[count], source))
        source = written[count]
    last = written.get(len(entry.tokens))
    snapshots = () if last is None else (Snapshot(1, last),)
    return [*rows, StateSlots(state.slot, source, snapshots)]


def accept_drafts(step: Step, output: LogitsOutput) -> LogitsOutput:
    """The output of `step`, from that of `split_drafts(step)`.

    A row that is late or has a fault ends the entry's tokens before it: the next step computes the
    row again, unless it is the first one, whose fault is the entry's.
    """
    if not step.has_drafts:
        return output
    faults = {fault.entry: fault for fault in output.faults}
    without_token = faults.keys() | set(output.late)
    tokens, scores = iter(output.tokens), iter(output.logprobs or repeat(None))
    kept, kept_scores, num_accepted, first_rows = [], [], [], []
    row = 0
    for entry in step.entries:
        first_rows.append(row)
        row += 1 + entry.num_drafts
        if entry.sample is None:
            continue
        sampled = [next(tokens) for _ in range(1 + entry.num_drafts)]
        their_scores = [next(scores) for _ in sampled]
        accepted = 0
        for draft, token in zip(entry.tokens[1:], sampled, strict=False):
            if token != draft or not without_token.isdisjoint(
                (first_rows[-1] + accepted, first_rows[-1] + accepted + 1)
            ):
                break
            accepted += 1
        kept += sampled[: 1 + accepted]
        kept_scores += their_scores[: 1 + accepted]
        if entry.num_drafts:
            num_accepted.append(accepted)
    entries = {row: at for at, row in enumerate(first_rows)}
    return LogitsOutput(
        tokens=tuple(kept),
        logprobs=tuple(kept_scores) if output.logprobs else (),
        prompt_logprobs=tuple(output.prompt_logprobs[row] for row in first_rows)
        if output.prompt_logprobs
        else (),
        faults=tuple(f._replace(entry=entries[r]) for r, f in faults.items() if r in entries),
        late=tuple(entries[row] for row in output.late if row in entries),
        num_accepted=tuple(num_accepted),
        vectors=output.vectors,
    )


def last_tokens(step: Step, output: LogitsOutput) -> tuple[int, ...]:
    """The last token of each entry that samples, from the output of `accept_drafts`."""
    if not output.num_accepted:
        return output.tokens
    found, place, num_accepted = [], -1, iter(output.num_accepted)
    for entry in step.entries:
        if entry.sample is not None:
            place += 1 + (next(num_accepted) if entry.num_drafts else 0)
            found.append(output.tokens[place])
    return tuple(found)
