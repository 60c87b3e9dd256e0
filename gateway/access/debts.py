"""Debts: what each client owes of the event loop's time, repaid by all debtors at equal rates.

This is fair queueing of a resource whose use is known only afterwards: the time that is earned is
divided among the clients that owe, so that a client with a small debt is soon free of it, however
much another one owes. `_paid` is what a client would have repaid that has owed since the start; a
client's debt is repaid when `_paid` reaches its mark. So time passes for all debtors at once.
"""

from heapq import heapify, heappop, heappush

MAX_DEBTORS = 4096
_MIN_STALE = 64  # entries of the heap, before it is built anew


class Debts:
    """What each client owes, in seconds, and at most `max_debt` of them."""

    def __init__(self, max_debt: float) -> None:
        self._max_debt = max_debt
        self._paid = 0.0
        self._marks: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []  # the marks, and some that are no longer valid

    def __len__(self) -> int:
        """Clients that owe."""
        return len(self._marks)

    def of(self, client: str) -> float:
        return self._marks.get(client, self._paid) - self._paid

    def add(self, client: str, seconds: float) -> None:
        """The client owes so much more. Beyond `MAX_DEBTORS` the smallest debt is forgotten."""
        debt = min(self.of(client) + seconds, self._max_debt)
        if debt <= 0.0:
            return
        mark = self._marks[client] = self._paid + debt
        heappush(self._heap, (mark, client))
        if len(self._marks) > MAX_DEBTORS:
            del self._marks[self._next_free()[1]]
        if len(self._heap) > 2 * len(self._marks) + _MIN_STALE:
            self._heap = [(mark, client) for client, mark in self._marks.items()]
            heapify(self._heap)

    def repay(self, seconds: float) -> None:
        """Divide earned time equally among those who owe."""
        while self._marks:
            mark, client = self._next_free()
            rest = seconds - (mark - self._paid) * len(self._marks)
            if rest < 0.0:
                self._paid += seconds / len(self._marks)
                return
            self._paid, seconds = mark, rest
            del self._marks[client]

    def _next_free(self) -> tuple[float, str]:
        """The mark and the client of the smallest debt."""
        heap = self._heap
        while self._marks.get(heap[0][1]) != heap[0][0]:
            heappop(heap)
        return heap[0]
