"""Draft: the iteration in the making, with the seats and tokens that are left in it."""

from typing import TYPE_CHECKING

from engine.iteration import Iteration
from engine.step import Draw, Step, StepEntry, StepId

if TYPE_CHECKING:
    from engine.kv import KVLedger
    from engine.request import Request


class Draft:
    """Collects entries up to `seats` requests and `tokens_left` tokens; decodes go first."""

    def __init__(self, seats: int, tokens: int) -> None:
        self.seats = seats
        self.tokens_left = tokens
        self.passed: list[Request] = []  # wanted to be admitted and did not fit
        self.num_skipped = 0  # ready, looked at and not taken
        self.has_suspect = False
        self._decodes: list[tuple[Request, StepEntry]] = []
        self._prefills: list[tuple[Request, StepEntry]] = []

    def add(self, request: "Request", num_tokens: int, ledger: "KVLedger") -> None:
        """Take the next `num_tokens` tokens of a request whose slots are reserved."""
        start = request.num_computed
        stop = start + num_tokens
        is_last = stop == request.num_tokens
        is_decode = num_tokens == 1 and is_last and bool(request.output)
        tokens = (request.output[-1],) if is_decode else request.tokens(start, stop)
        draw = (request.draw or _draw(request)) if is_last else None
        blocks = ledger.table(request.request_id)
        entry = StepEntry(request.request_id, start, tokens, blocks, draw)
        (self._decodes if is_decode else self._prefills).append((request, entry))
        self.seats -= 1
        self.tokens_left -= num_tokens
        if request.num_crashes:
            self.has_suspect = True

    def iteration(self, step_id: StepId) -> Iteration | None:
        """What was collected, or None if that is nothing."""
        parts = self._decodes + self._prefills
        if not parts:
            return None
        entries = tuple(entry for _, entry in parts)
        return Iteration(Step(step_id, entries), tuple(request for request, _ in parts))


def _draw(request: "Request") -> Draw:
    ask = request.ask
    sampling = ask.sampling
    return Draw(
        sampling=sampling,
        banned=tuple(sorted(ask.end_ids)) if request.produced < ask.min_tokens else (),
        prompt=ask.prompt if sampling.repetition_penalty != 1.0 else (),
        output=tuple(request.output) if sampling.reads_output else (),
    )
