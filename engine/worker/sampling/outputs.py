"""The outputs of requests that penalties or a grammar read, remembered from step to step.

The first entry that samples for a request carries its prompt, output and grammar; later entries
carry only their one input token (`SampleSpec.continues`). Drafts are remembered with the output;
the `start` of the request's next entry says how many of them were accepted. Only the worker that
samples needs this.
An output is dropped `OUTPUT_KEPT_STEPS` steps after it was last used; the scheduler counts the same
steps, and sends everything again after them, or when a request has lost its KV.
"""

from collections import OrderedDict
from dataclasses import replace
from typing import NamedTuple

from engine.step import (
    OUTPUT_KEPT_STEPS,
    Grammar,
    RequestId,
    SampleSpec,
    SamplingParams,
    Step,
    StepEntry,
    StepId,
)
from engine.worker.sampling.token_counts import PenaltyCounts


class _Output(NamedTuple):
    """What is remembered of one request. `first` is the position of the first output token."""

    used_at: StepId
    first: int
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    grammar: Grammar | None
    counts: PenaltyCounts | None = None  # if a penalty reads them


class OutputMemory:
    """Fills in the sample specs of steps, which come in order.

    The requests of a step that fails have failed with it, but steps planned ahead may still have
    entries of theirs: these are sampled as if without an output, and fail no other request.
    """

    def __init__(self) -> None:
        self._outputs: OrderedDict[RequestId, _Output] = OrderedDict()  # least recently used first
        # Requests of the step that is not complete yet
        self._opened: frozenset[RequestId] = frozenset()
        self._failed: dict[RequestId, StepId] = {}  # by the failed step

    def __len__(self) -> int:
        return len(self._outputs)

    def open(self, step: Step) -> None:
        """The step is about to run; nothing in it can have failed yet."""
        self._failed.update(dict.fromkeys(self._opened, step.step_id))
        kept = step.step_id - OUTPUT_KEPT_STEPS
        self._failed = {each: at for each, at in self._failed.items() if at >= kept}
        reading = [e for e in step.entries if e.sample is not None and e.sample.reads_output]
        self._opened = frozenset(entry.request_id for entry in reading)

    def complete(self, step: Step) -> Step:
        """The step, in which every token is known, with prompt, output and grammar in each sample
        spec that reads the output.

        Raises `ValueError` for an entry that continues an output which is not remembered.
        """
        self._opened = frozenset()
        while self._outputs:
            oldest = next(iter(self._outputs.values()))
            if step.step_id - oldest.used_at <= OUTPUT_KEPT_STEPS:
                break
            self._outputs.popitem(last=False)
        if not any(
            entry.sample is not None and entry.sample.reads_output for entry in step.entries
        ):
            return step
        entries = tuple([self._completed(step.step_id, entry) for entry in step.entries])
        return replace(step, entries=entries)

    def _completed(self, step_id: StepId, entry: StepEntry) -> StepEntry:
        spec = entry.sample
        if spec is None or not spec.reads_output:
            return entry
        found, length = self._outputs.pop(entry.request_id, None), 0
        if not spec.continues:
            self._failed.pop(entry.request_id, None)
            found = _first(step_id, entry, spec)
        elif entry.request_id in self._failed:
            found = _Output(step_id, entry.start, (), entry.tokens, None)
        else:
            length = -1 if found is None else entry.start - found.first
            if found is None or not 0 <= length <= len(found.tokens):
                raise ValueError(f"request {entry.request_id}: its output is not on this worker")
            tokens = (*found.tokens[:length], *entry.tokens)
            found = found._replace(used_at=step_id, tokens=tokens)
        self._outputs[entry.request_id] = found
        output = found.tokens[: len(found.tokens) - entry.num_drafts]
        if found.counts is not None:
            output = found.counts.follow(output, length)
        sample = spec._replace(prompt=found.prompt, output=output, grammar=found.grammar)
        return entry._replace(sample=sample)


def _first(step_id: StepId, entry: StepEntry, spec: SampleSpec) -> _Output:
    """The output of an entry that carries everything: its tokens, without drafts, end where the
    output does."""
    num_known = len(entry.tokens) - entry.num_drafts
    first = entry.start + num_known - len(spec.output)
    tokens = spec.output + entry.tokens[num_known:]
    return _Output(step_id, first, spec.prompt, tokens, spec.grammar, _counts(spec))


def _counts(spec: SampleSpec) -> PenaltyCounts | None:
    sampling: SamplingParams = spec.sampling
    if not sampling.reads_output:
        return None
    return PenaltyCounts(spec.prompt, counts_prompt=sampling.repetition_penalty != 1.0)
