"""Forecast: when a request's tokens will be produced, from the cost model and the queue before it.

It is optimistic on purpose, because requests are rejected or postponed by it: it assumes that
requests share iterations without loss, and that outputs are as long as recent ones, or
`max_tokens` if that is less.
"""

from collections.abc import Sequence

from engine.cost.live import NEWS_SHARE
from engine.ports import Cost
from engine.request import Request, RequestSpec

MAX_SAMPLED = 64  # requests whose work is predicted one by one; swept in results/constants


class Forecast:
    """Keeps moving averages of iteration times and output lengths. `seats`: requests in a batch."""

    def __init__(self, cost: Cost, seats: int) -> None:
        self._cost = cost
        self._seats = seats
        self._pace: float | None = None  # recent seconds between two tokens of a request
        self._paced_at: float | None = None
        self._output_len: float | None = None

    def observe(self, seconds: float, now: float) -> None:
        """An iteration of `seconds` returned. Called once per request in it; counted once."""
        if now == self._paced_at:
            return
        self._paced_at = now
        before = seconds if self._pace is None else self._pace
        self._pace = before + NEWS_SHARE * (seconds - before)

    def rest(self) -> None:
        """No request is left: forget the pace, which was measured under load."""
        self._pace = None

    def ended(self, request: Request) -> None:
        """Learn from the length of an output that was not cut by a cancel or an error."""
        if request.finish is not None and request.output:
            before = self._output_len or request.produced
            self._output_len = before + NEWS_SHARE * (request.produced - before)

    def first_token(self, request: Request) -> float:
        """Seconds to the request's next token if it is the most urgent from now on."""
        return self._cost.compute(max(1, request.remaining), request.num_computed)

    def decodes_left(self, spec: RequestSpec, produced: int) -> float:
        """Expected number of output tokens after those `produced`."""
        output_len = max(min(spec.max_tokens, self._output_len or 1.0), spec.min_tokens)
        return max(0.0, output_len - produced)

    def pace_alone(self, spec: RequestSpec) -> float:
        """Seconds between two tokens if no other request is in its iterations."""
        return self._cost.compute(1, len(spec.prompt))

    def pace(self, spec: RequestSpec) -> float:
        """Seconds between two tokens in batches like recent ones."""
        return self.pace_alone(spec) if self._pace is None else self._pace

    def wait(self, ahead: Sequence[Request], count: int) -> float:
        """Seconds until a request behind `count` others is in a batch, of which `ahead` are a
        sample (`spread`) that stands for all."""
        if not ahead:
            return 0.0
        seconds, decodes = 0.0, 0.0
        for request in ahead:
            spec = request.spec
            decodes += self.decodes_left(spec, request.produced) * self.pace(spec)
            if request.remaining > 1:
                start = request.num_computed
                alone = self._cost.compute(request.remaining, start)
                seconds += alone - self._cost.compute(1, start)
        seconds *= count / len(ahead)
        if count < self._seats:
            return seconds
        return seconds + decodes / len(ahead) * (count - self._seats + 1) / self._seats


def spread(count: int) -> range:
    """Up to `MAX_SAMPLED` indices below `count`, evenly spaced."""
    return range(0, count, -(-count // MAX_SAMPLED) or 1)
