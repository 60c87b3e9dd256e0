"""FcfsEstimate: the latencies that the same requests would have under first come, first served.

The work that waits, in seconds of the machine, is the same under every policy that keeps the batch
full. Under FCFS a request waits for the work that is before it when it arrives, and then runs until
it ends. So its JCT under FCFS is about that work, plus the seconds that it has spent in iterations.
Another policy can compare its own tail with the tail of these.
"""

from bisect import bisect_left, insort
from collections import deque

MEMORY = 0.999  # of work and seconds, per iteration
SMOOTHING = 0.01  # of the mean seconds of an iteration
LEAST_SHARE = 0.1  # of the seconds of iterations that decodes are assumed to take
TAIL = 0.99  # quantile of JCT
WINDOW = 1000  # ended requests of which the quantile is taken


class FcfsEstimate:
    """Work is what it adds to iterations: seconds of prefill, and decodes at the recent rate."""

    def __init__(self) -> None:
        self.wait = 0.0  # seconds that a request arriving now would wait
        self.tail = 0.0  # seconds: the p99 of JCT under FCFS
        self.pace = 0.0  # seconds between two tokens of a running request
        self.returned_at: float | None = None  # when the latest iteration returned
        self._seconds = self._prefill = self._decodes = 0.0  # of recent iterations
        self._sorted: list[float] = []
        self._latest: deque[float] = deque()

    @property
    def decode_seconds(self) -> float:
        """What a decode adds to an iteration: the time of recent ones without prefill, by the
        number of decodes."""
        if not self._decodes:
            return self.pace
        return max(self._seconds - self._prefill, LEAST_SHARE * self._seconds) / self._decodes

    def ran(self, prefill: float, seconds: float, now: float) -> None:
        """One request of an iteration got `prefill` seconds of prefill done, or 0 and a decode. An
        iteration of `seconds` returned at `now`; this is called once for each request in it."""
        if now != self.returned_at:
            self.returned_at = now
            self._seconds = self._seconds * MEMORY + seconds
            self._prefill *= MEMORY
            self._decodes *= MEMORY
            self.pace += (SMOOTHING if self.pace else 1.0) * (seconds - self.pace)
        self._prefill += prefill
        self._decodes += 1.0

    def ended(self, wait: float, seconds: float) -> None:
        """A request ended which would have waited `wait` seconds, and was in iterations of
        `seconds` in all."""
        jct = wait + seconds
        insort(self._sorted, jct)
        self._latest.append(jct)
        if len(self._latest) > WINDOW:
            del self._sorted[bisect_left(self._sorted, self._latest.popleft())]

    def update(self, prefill: float, decodes: float, mean: float) -> None:
        """So many seconds of prefill and so many decodes wait now; a new request has `mean`
        decodes."""
        self.wait = prefill + decodes * self.decode_seconds
        self.tail = self.wait + mean * self.pace
        if self._sorted:
            last = len(self._sorted) - 1
            self.tail = max(self.tail, self._sorted[min(last, int(TAIL * len(self._sorted)))])
