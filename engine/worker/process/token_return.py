"""Sends sampled tokens back from the worker that samples to the ranks of the first stage.

Used with lookahead only: then a step may continue from tokens that the scheduler does not know yet,
and only the first stage reads tokens. For every step that samples, exactly one message is sent,
even if the step failed. The first stage receives the messages that it needs for the next step, and
those that are so old that they must have been sent, so neither side waits unnecessarily.
"""

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from engine.step import LAST_TOKEN, RequestId, Step, StepId
from engine.worker.model.kv.data_plane import DataPlane
from engine.worker.sampling.last_tokens import FAILED_TOKEN, LastTokens
from engine.worker_settings import Placement


@dataclass(slots=True)
class _Unsent:
    """A step that samples; `tokens` are known once it has run or failed."""

    step: Step
    tokens: Sequence[int] | None = None


class TokenReturn:
    """One worker's end; workers that neither sample nor embed do nothing."""

    def __init__(self, placement: Placement, plane: DataPlane | None, held: LastTokens) -> None:
        """`plane` is None if no tokens are sent back."""
        self._plane = plane
        self._last_tokens = held
        self._samples = placement.returns_results
        self._peers = [rank for rank in range(placement.num_ranks) if rank != placement.index]
        self._reads = placement.stage == 0 and not placement.returns_results
        self._sampler = placement.num_workers - placement.num_ranks
        self._max_due = placement.num_stages
        self._due: deque[tuple[StepId, frozenset[RequestId]]] = deque()
        self._unsent: dict[StepId, _Unsent] = {}  # in flight, of those that sample
        self._lock = threading.Lock()  # a step may fail in one thread while another one ends

    def expect(self, step: Step) -> None:
        """The step is about to run: receive the tokens that it continues from."""
        if self._plane is None:
            return
        sampled = frozenset(entry.request_id for entry in step.entries if entry.sample is not None)
        if self._samples and sampled:
            self._unsent[step.step_id] = _Unsent(step)
        if not self._reads:
            return
        needed = {entry.request_id for entry in step.entries if entry.tokens[0] == LAST_TOKEN}
        while self._due and (
            len(self._due) > self._max_due or any(needed & sampled for _, sampled in self._due)
        ):
            step_id, before = self._due.popleft()
            tokens = self._plane.receive_tokens(step_id, len(before), self._sampler)
            self._last_tokens.fill(step_id, tokens)
        if sampled:
            self._due.append((step.step_id, sampled))

    def send(self, step: Step, tokens: Sequence[int]) -> None:
        """Send the tokens of the step that has run, none if it failed, after those of all earlier
        steps."""
        if self._plane is None or step.step_id not in self._unsent:
            return
        with self._lock:
            self._unsent[step.step_id].tokens = tokens
            while self._unsent and (first := next(iter(self._unsent.values()))).tokens is not None:
                del self._unsent[first.step.step_id]
                self._send(self._plane, first.step, first.tokens)

    def _send(self, plane: DataPlane, step: Step, tokens: Sequence[int]) -> None:
        num_samples = sum(entry.sample is not None for entry in step.entries)
        missing = [FAILED_TOKEN] * (num_samples - len(tokens))
        plane.send_tokens(step.step_id, [*tokens, *missing], self._peers)
