"""RequestPool: every live request, with the counts that plan and admission need."""

from collections import Counter
from typing import TYPE_CHECKING

from engine.request import Move, Request, State

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engine.step import RequestId


class RequestPool:
    """Holds requests from arrival to their terminal state. All moves go through `move`, so
    that the counts are never wrong."""

    def __init__(self) -> None:
        self._live: dict[RequestId, Request] = {}
        self._counts: Counter[State] = Counter()
        self.waiting_tokens = 0  # prompt and output tokens that waiting requests need computed

    def __repr__(self) -> str:
        counts = ", ".join(f"{state.value}={self._counts[state]}" for state in State)
        return f"RequestPool({counts})"

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> "Iterator[Request]":
        return iter(self._live.values())

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._live

    def count(self, state: State) -> int:
        """Live requests in this state."""
        return self._counts[state]

    @property
    def num_admitted(self) -> int:
        """Requests that hold KV."""
        return len(self._live) - self._counts[State.WAITING]

    def add(self, request: Request) -> None:
        assert request.request_id not in self._live, "a request arrives once"
        self._live[request.request_id] = request
        self._enter(request)

    def move(self, request: Request, move: Move) -> None:
        """Make a move of `TRANSITIONS`; a request that ends leaves the pool."""
        assert request.request_id in self._live, "only live requests move"
        before = request.state
        if before is State.WAITING:
            self.waiting_tokens -= request.num_tokens
        request.move(move)
        self._counts[before] -= 1
        if request.state.is_terminal:
            del self._live[request.request_id]
        else:
            self._enter(request)

    def _enter(self, request: Request) -> None:
        self._counts[request.state] += 1
        if request.state is State.WAITING:
            self.waiting_tokens += request.num_tokens

    def check(self) -> None:
        """Assert that the counts say what the requests say."""
        counts = Counter(request.state for request in self)
        assert counts == +self._counts, f"counts drifted: {self!r}"
        waiting = sum(r.num_tokens for r in self if r.state is State.WAITING)
        assert waiting == self.waiting_tokens, "waiting tokens drifted"
