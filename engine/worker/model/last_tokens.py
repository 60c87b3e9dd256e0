"""The tokens that this worker sampled last, for entries planned before anybody else knew them.

An entry whose token is `LAST_TOKEN` goes on from the token of an earlier step. The steps are run
in order, so by then it is here. Where that step failed, or the entry in it, the loop will drop
whatever comes of it; a stand-in keeps batch mates from harm.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from engine.step import LAST_TOKEN, Fault, RequestId, Step, StepEntry, StepId
from engine.worker.ports import RaggedLayout

STAND_IN = 0


class LastTokens:
    """Tokens of the last `num_steps` steps; a step is opened before anything can fail in it."""

    def __init__(self, num_steps: int) -> None:
        self._steps: deque[tuple[StepId, dict[RequestId, int]]] = deque(maxlen=num_steps + 1)

    def open(self, step: Step) -> None:
        """The step is about to run: until `keep` it has stand-ins for all that it samples."""
        draws = [entry.request_id for entry in step.entries if entry.sample is not None]
        self._steps.append((step.step_id, dict.fromkeys(draws, STAND_IN)))

    def complete(self, step: Step, layout: RaggedLayout) -> Step:
        """The step and its layout with the tokens that were not known when it was planned.

        Raises `ValueError` where no token is held.
        """
        if not len(layout.held_rows):
            return step
        entries = tuple([self._completed(entry) for entry in step.entries])
        layout.token_ids[layout.held_rows] = [
            entry.tokens[0]
            for entry, asked in zip(entries, step.entries, strict=True)
            if entry is not asked
        ]
        return replace(step, entries=entries)

    def keep(self, step: Step, tokens: Sequence[int], faults: Sequence[Fault]) -> None:
        """The step has run; `tokens` are one per draw, and those of `faults` mean nothing."""
        if not tokens:
            return
        _, held = self._steps[-1]
        held.update(zip(held, tokens, strict=True))
        for fault in faults:
            held[step.entries[fault.entry].request_id] = STAND_IN

    def fill(self, step_id: StepId, tokens: Sequence[int]) -> None:
        """The tokens of a step, one per draw, if it is not forgotten by now."""
        for opened, held in self._steps:
            if opened == step_id:
                held.update(zip(held, tokens, strict=True))

    def _completed(self, entry: StepEntry) -> StepEntry:
        if entry.tokens[0] != LAST_TOKEN:
            return entry
        token = self._token(entry.request_id)
        return entry._replace(tokens=(token,))

    def _token(self, request_id: RequestId) -> int:
        for _, held in list(self._steps)[-2::-1]:  # the last is the step that asks
            if request_id in held:
                return held[request_id]
        raise ValueError(f"request {request_id}: no token of it is held")
