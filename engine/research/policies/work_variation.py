"""WorkVariation: whether the work of requests varies so much that its order matters.

If sizes are alike, first come, first served is the best order. In an M/G/1 queue it equals
processor sharing in the mean if the squared coefficient of variation C2 of sizes is 1, and is
better below (Kleinrock 1976, section 4.4). The Gittins index also knows prompts and ages, and gains
from somewhat less.
"""

LEAST = 0.9  # C2 from which on the variation is large
HYSTERESIS = 0.1  # below `LEAST`, until it is small again
DECAY = 0.9995  # factor of the weight of earlier requests, per ended request


class WorkVariation:
    """Recent requests count more, so that `is_large` follows a change of load. Not saved: after a
    restart the first requests have to end."""

    def __init__(self, min_requests: int) -> None:
        """No variation is large before so many requests have ended."""
        self._min_requests = min_requests
        self._num_ended = 0
        self.is_large = False
        self._count = self._sum = self._squares = 0.0

    @property
    def squared(self) -> float:
        """C2: the variance over the square of the mean; 0 before a request has ended."""
        if not self._sum:
            return 0.0
        return max(0.0, self._squares * self._count / self._sum**2 - 1.0)

    def ended(self, work: float) -> None:
        """A request ended after so much work, in seconds of the machine."""
        self._count = self._count * DECAY + 1.0
        self._sum = self._sum * DECAY + work
        self._squares = self._squares * DECAY + work * work
        self._num_ended += 1
        needed = LEAST - HYSTERESIS * self.is_large
        self.is_large = self._num_ended >= self._min_requests and self.squared >= needed
