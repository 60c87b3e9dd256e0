"""Tokens on their way back from the worker that draws them to the ranks of the first stage.

Only with lookahead: then a step may go on from tokens that the loop does not know yet, and only
the first stage reads tokens. Every step that draws is answered so exactly once, failed or not.
The first stage takes what is needed for the step it is about to run, and whatever is so old that
the loop must have had it, so that neither side ever waits without need.
"""

from collections import deque
from collections.abc import Sequence

from engine.step import LAST_TOKEN, Placement, RequestId, Step, StepId
from engine.worker.model.data_plane import DataPlane
from engine.worker.model.last_tokens import LastTokens


class TokenReturn:
    """One worker's end, whatever its place: those that neither draw nor embed do nothing."""

    def __init__(
        self, placement: Placement, plane: DataPlane | None, held: LastTokens, lookahead: int
    ) -> None:
        self._plane = plane if lookahead else None
        self._held = held
        self._is_drawer = placement.returns_results
        self._peers = [rank for rank in range(placement.num_ranks) if rank != placement.index]
        self._reads = placement.stage == 0 and not placement.returns_results
        self._drawer = placement.num_workers - placement.num_ranks
        self._most = placement.num_stages
        self._due: deque[tuple[StepId, frozenset[RequestId]]] = deque()
        self._owed: Step | None = None

    def expect(self, step: Step) -> None:
        """The step is about to run: fetch the tokens that it goes on from."""
        if self._plane is None:
            return
        drawn = frozenset(entry.request_id for entry in step.entries if entry.sample is not None)
        if self._is_drawer:
            self._owed = step if drawn else None
        if not self._reads:
            return
        wanted = {entry.request_id for entry in step.entries if entry.tokens[0] == LAST_TOKEN}
        while self._due and (
            len(self._due) > self._most or any(wanted & drawn for _, drawn in self._due)
        ):
            step_id, before = self._due.popleft()
            tokens = self._plane.receive_tokens(step_id, len(before), self._drawer)
            self._held.fill(step_id, tokens)
        if drawn:
            self._due.append((step.step_id, drawn))

    def send(self, tokens: Sequence[int]) -> None:
        """The step has run, or failed and has no tokens."""
        step, self._owed = self._owed, None
        if step is None or self._plane is None:
            return
        num_draws = sum(entry.sample is not None for entry in step.entries)
        stand_ins = [0] * (num_draws - len(tokens))
        self._plane.send_tokens(step.step_id, [*tokens, *stand_ins], self._peers)
