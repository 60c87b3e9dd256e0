"""The tokens that a worker sampled last, for entries planned before the scheduler knew them.

An entry whose token is `LAST_TOKEN` continues from the token that an earlier step sampled. Steps
run in order, so the token is here by then. If that step or its entry failed, the scheduler discards
the result of this entry too; with `FAILED_TOKEN` the rest of the batch runs.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from engine.step import LAST_TOKEN, Fault, RequestId, Step, StepEntry, StepId
from engine.worker.ports import RaggedLayout

FAILED_TOKEN = 0  # of a row whose request has failed; a valid id, whose result is discarded


class LastTokens:
    """Tokens of the last `num_steps` steps; `open` is called before anything in a step can fail."""

    def __init__(self, num_steps: int) -> None:
        self._steps: deque[tuple[StepId, dict[RequestId, int]]] = deque(maxlen=num_steps + 1)

    def open(self, step: Step) -> None:
        """The step is about to run: until `keep` is called its tokens are `FAILED_TOKEN`."""
        specs = [entry.request_id for entry in step.entries if entry.sample is not None]
        self._steps.append((step.step_id, dict.fromkeys(specs, FAILED_TOKEN)))

    def complete(self, step: Step, layout: RaggedLayout) -> Step:
        """The step and its layout with the tokens that were not known when it was planned.

        Raises `ValueError` if no token of a request is known.
        """
        if not len(layout.last_token_rows):
            return step
        entries = tuple([self._completed(entry) for entry in step.entries])
        layout.token_ids[layout.last_token_rows] = [
            entry.tokens[0]
            for entry, planned in zip(entries, step.entries, strict=True)
            if entry is not planned
        ]
        return replace(step, entries=entries)

    def keep(self, step: Step, tokens: Sequence[int], faults: Sequence[Fault]) -> None:
        """The step has run: one token per sampled row, `FAILED_TOKEN` for rows in `faults`."""
        if not tokens:
            return
        _, held = self._steps[-1]
        held.update(zip(held, tokens, strict=True))
        for fault in faults:
            held[step.entries[fault.entry].request_id] = FAILED_TOKEN

    def fill(self, step_id: StepId, tokens: Sequence[int]) -> None:
        """Set the tokens of a step, one per sampled row, unless it is too old."""
        for opened, held in self._steps:
            if opened == step_id:
                held.update(zip(held, tokens, strict=True))

    def _completed(self, entry: StepEntry) -> StepEntry:
        if entry.tokens[0] != LAST_TOKEN:
            return entry
        token = self._token(entry.request_id)
        return entry._replace(tokens=(token,))

    def _token(self, request_id: RequestId) -> int:
        for _, held in list(self._steps)[-2::-1]:  # the last is the current step
            if request_id in held:
                return held[request_id]
        raise ValueError(f"request {request_id}: its last token is not on this worker")
