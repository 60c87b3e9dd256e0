"""RequestPool: every live request, the policy that orders them, and counts for planning."""

from collections import Counter
from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush

from engine.policy.base import Policy
from engine.request import TERMINAL, Move, Request, State
from engine.step import RequestId

# Bound once: Python 3.11 takes a quarter of a microsecond to look a member up.
WAITING, READY, RUNNING, SWAPPED = State.WAITING, State.READY, State.RUNNING, State.SWAPPED
SWAPPING_OUT, PLAN, COMMIT = State.SWAPPING_OUT, Move.PLAN, Move.COMMIT
MIN_DEADLINES = 64  # entries of ended requests that are kept in any case


class BackgroundCounts:
    """The live background requests (`RequestSpec.is_background`), which the pool counts apart."""

    def __init__(self) -> None:
        self.num_live = 0
        self.num_ready = 0
        self.num_waiting = 0
        self.waiting_tokens = 0  # their prompt and output tokens

    def __bool__(self) -> bool:
        return self.num_live > 0

    def moved(self, request: Request, before: State | None, after: State) -> None:
        """A background request has changed its state; it had none before it was added."""
        self.num_live += (before is None) - (after in TERMINAL)
        self.num_ready += (after is READY) - (before is READY)
        change = (after is WAITING) - (before is WAITING)
        self.num_waiting += change
        self.waiting_tokens += change * request.num_queued

    def check(self, live: Iterable[Request]) -> None:
        """Assert that the counts agree with these requests."""
        counted = BackgroundCounts()
        for request in live:
            if request.spec.is_background:
                counted.moved(request, None, request.state)
        assert vars(counted) == vars(self), "background requests drifted"


class RequestPool:
    """Holds requests from arrival to their terminal state. Every state change goes through `move`,
    so that the counts are always right.

    `policy` is the one place where the policy in force is stored. Its caller reports arrivals and
    ends to it: pool and policy hold the same requests.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._live: dict[RequestId, Request] = {}
        self._deadlines: list[tuple[float, RequestId]] = []  # a heap; may name ended requests
        self._num_deadlines = 0  # live requests with a deadline
        self._counts = dict.fromkeys(State, 0)  # live requests by state; for terminal states all
        self.started: dict[Request, None] = {}  # hold KV on the device: not waiting, not swapped
        self.swapped: dict[Request, None] = {}
        self.background = BackgroundCounts()
        self.waiting_tokens = 0  # prompt and output tokens of waiting requests
        self.clients = Counter[str]()  # live requests of each client, without background requests

    def __repr__(self) -> str:
        counts = ", ".join(f"{state}={self._counts[state]}" for state in State)
        return f"RequestPool({counts})"

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._live.values())

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._live

    def get(self, request_id: RequestId | None) -> Request | None:
        """The live request with this id, if there is one."""
        return None if request_id is None else self._live.get(request_id)

    def count(self, state: State) -> int:
        """Requests in this state; for a terminal state, all that ever ended in it."""
        return self._counts[state]

    @property
    def num_admitted(self) -> int:
        """Requests that hold KV on the device, except those being swapped out."""
        return len(self.started) - self._counts[SWAPPING_OUT]

    def add(self, request: Request) -> None:
        """Add a new request, which is waiting."""
        assert request.request_id not in self._live, "a request is added once"
        self._live[request.request_id] = request
        self._counts[request.state] += 1
        self.waiting_tokens += request.num_queued
        if request.spec.is_background:
            self.background.moved(request, None, WAITING)
        else:
            self.clients[request.spec.client] += 1
        if request.spec.deadline is not None:
            self._num_deadlines += 1
            due = request.times.arrived_at + request.spec.deadline
            heappush(self._deadlines, (due, request.request_id))

    def has_others(self, client: str) -> bool:
        """Whether requests of other clients are live, beside those in the background."""
        return len(self.clients) > (client in self.clients)

    @property
    def next_deadline(self) -> float | None:
        """When `overdue` will next report a request, or earlier; None if no deadline is left."""
        return self._deadlines[0][0] if self._deadlines else None

    def overdue(self, now: float, most: int) -> list[Request]:
        """Live requests whose deadline has passed, at most so many; each is named once."""
        overdue: list[Request] = []
        while self._deadlines and self._deadlines[0][0] <= now and len(overdue) < most:
            request = self._live.get(heappop(self._deadlines)[1])
            if request is not None:
                overdue.append(request)
        return overdue

    def move(self, request: Request, move: Move) -> None:
        """Make a move of `TRANSITIONS`; a request that reaches a terminal state is removed."""
        before, counts = request.state, self._counts
        if before is READY and move is PLAN:  # this move and COMMIT are made for every token, so
            after = request.state = RUNNING  # they do without the table
        elif before is RUNNING and move is COMMIT:
            after = request.state = READY
        else:
            after = request.move(move)
            if move is not PLAN and move is not COMMIT:  # else it is started before and after
                self._update_sets(request, before, after)
        counts[before] -= 1
        counts[after] += 1
        if self.background.num_live and request.spec.is_background:
            self.background.moved(request, before, after)

    def _update_sets(self, request: Request, before: State, after: State) -> None:
        if before is WAITING:
            self.waiting_tokens -= request.num_queued
            self.started[request] = None
        elif after is WAITING:
            self.waiting_tokens += request.num_queued
        if before is SWAPPED:
            del self.swapped[request]
            self.started[request] = None
        elif after is SWAPPED:
            self.swapped[request] = None
        if after is WAITING or after is SWAPPED or after in TERMINAL:
            self.started.pop(request, None)
        elif before is WAITING or before is SWAPPED:
            self.policy.start(request)
        if after in TERMINAL:
            self._remove(request)

    def withdraw(self, request: Request) -> None:
        """Forget a waiting request, which does not end: another pool gets it."""
        assert request.state is WAITING, f"request {request.request_id} has started"
        self._counts[WAITING] -= 1
        self.waiting_tokens -= request.num_queued
        if request.spec.is_background:
            self.background.moved(request, WAITING, State.CANCELLED)
        self._remove(request)

    def _remove(self, request: Request) -> None:
        """Forget a request that has left, and its deadline when half of those kept are stale."""
        del self._live[request.request_id]
        client = request.spec.client
        if not request.spec.is_background:
            self.clients[client] -= 1
            if not self.clients[client]:
                del self.clients[client]
        if request.spec.deadline is not None:
            self._num_deadlines -= 1
            if len(self._deadlines) > 2 * self._num_deadlines + MIN_DEADLINES:
                self._deadlines = [item for item in self._deadlines if item[1] in self._live]
                heapify(self._deadlines)

    def check(self) -> None:
        """Assert that the counts agree with the requests."""
        counts = Counter(request.state for request in self)
        for state in State:
            drifted = state not in TERMINAL and counts[state] != self._counts[state]
            assert not drifted, f"counts drifted: {self!r}"
        waiting = sum(r.num_queued for r in self if r.state is State.WAITING)
        assert waiting == self.waiting_tokens, "waiting tokens drifted"
        self.background.check(self)
        clients = Counter(r.spec.client for r in self if not r.spec.is_background)
        assert clients == self.clients, "requests of clients drifted"
        started = {r for r in self if r.state not in (WAITING, SWAPPED)}
        assert started == self.started.keys(), "started requests drifted"
        assert {r for r in self if r.state is SWAPPED} == self.swapped.keys(), "swapped drifted"
