"""RequestPool: every live request, with the counts that plan and admission need."""

from collections import Counter
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from engine.request import TERMINAL, Move, Request, State

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engine.step import RequestId


# Bound once: Python 3.11 looks a member up in a quarter of a microsecond.
WAITING, SWAPPED, SWAPPING_OUT = State.WAITING, State.SWAPPED, State.SWAPPING_OUT


class RequestPool:
    """Holds requests from arrival to their terminal state. All moves go through `move`, so
    that the counts are never wrong."""

    def __init__(self) -> None:
        self._live: dict[RequestId, Request] = {}
        self._deadlines: list[tuple[float, RequestId]] = []  # a heap; perhaps of the ended
        self._counts = dict.fromkeys(State, 0)  # of the living, and of the ended so far
        self.background: set[Request] = set()  # those who use what the others leave
        self.waiting_tokens = 0  # prompt and output tokens that waiting requests need computed

    def __repr__(self) -> str:
        counts = ", ".join(f"{state}={self._counts[state]}" for state in State)
        return f"RequestPool({counts})"

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> "Iterator[Request]":
        return iter(self._live.values())

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._live

    def count(self, state: State) -> int:
        """Requests in this state; for a terminal state, all that ever ended so."""
        return self._counts[state]

    @property
    def num_admitted(self) -> int:
        """Requests that hold KV on the device, and are not about to give it up."""
        counts = self._counts
        return len(self._live) - counts[WAITING] - counts[SWAPPED] - counts[SWAPPING_OUT]

    def add(self, request: Request) -> None:
        assert request.request_id not in self._live, "a request arrives once"
        self._live[request.request_id] = request
        self._counts[request.state] += 1
        self.waiting_tokens += request.num_tokens
        if request.spec.is_background:
            self.background.add(request)
        if request.spec.deadline is not None:
            heappush(
                self._deadlines, (request.arrived_at + request.spec.deadline, request.request_id)
            )

    def overdue(self, now: float) -> list[Request]:
        """Live requests whose deadline has passed; each is told once."""
        found: list[Request] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            request = self._live.get(heappop(self._deadlines)[1])
            if request is not None:
                found.append(request)
        return found

    def move(self, request: Request, move: Move) -> None:
        """Make a move of `TRANSITIONS`; a request that ends leaves the pool."""
        before = request.state
        after = request.move(move)
        self._counts[before] -= 1
        self._counts[after] += 1
        if before is WAITING:
            self.waiting_tokens -= request.num_tokens
        elif after is WAITING:
            self.waiting_tokens += request.num_tokens
        if after in TERMINAL:
            del self._live[request.request_id]
            self.background.discard(request)

    def check(self) -> None:
        """Assert that the counts say what the requests say."""
        counts = Counter(request.state for request in self)
        for state in State:
            drifted = state not in TERMINAL and counts[state] != self._counts[state]
            assert not drifted, f"counts drifted: {self!r}"
        waiting = sum(r.num_tokens for r in self if r.state is State.WAITING)
        assert waiting == self.waiting_tokens, "waiting tokens drifted"
        background = {request for request in self if request.spec.is_background}
        assert background == self.background, "background requests drifted"
