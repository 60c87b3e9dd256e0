"""Forecast: when a request's tokens would come, from the cost model and what is ahead of it.

Optimistic on purpose, since it is used to give requests up: iterations are shared without loss,
and an answer will be as long as answers of late, or as the caller allows if that is less.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from engine.ports import Cost
    from engine.request import Request, RequestSpec

WEIGHT = 0.1  # of the latest iteration or answer in what is remembered


class Forecast:
    """Remembers the pace of iterations and the length of answers."""

    def __init__(self, cost: "Cost", seats: int) -> None:
        self._cost = cost
        self._seats = seats
        self._pace: float | None = None  # seconds between the tokens of a request, of late
        self._paced_at: float | None = None
        self._answer_len: float | None = None

    def observe(self, seconds: float, now: float) -> None:
        """An iteration that took `seconds` came back; told once for each of its requests."""
        if now == self._paced_at:
            return
        self._paced_at = now
        before = seconds if self._pace is None else self._pace
        self._pace = before + WEIGHT * (seconds - before)

    def rest(self) -> None:
        """Nobody is left: the pace under load says nothing about what comes."""
        self._pace = None

    def ended(self, request: "Request") -> None:
        """Learn from the length of an answer that the model ended."""
        if request.finish is not None:
            before = self._answer_len or request.produced
            self._answer_len = before + WEIGHT * (request.produced - before)

    def first_token(self, request: "Request") -> float:
        """Seconds to the request's next token if it goes first from now on."""
        return self._cost.compute(max(1, request.remaining), request.num_computed)

    def decodes_left(self, spec: "RequestSpec", produced: int) -> float:
        """Tokens to come after those `produced`."""
        answer_len = max(min(spec.max_tokens, self._answer_len or 1.0), spec.min_tokens)
        return max(0.0, answer_len - produced)

    def pace_alone(self, spec: "RequestSpec") -> float:
        """Seconds between its tokens with nobody else in its iterations."""
        return self._cost.compute(1, len(spec.prompt))

    def pace(self, spec: "RequestSpec") -> float:
        """Seconds between its tokens, in such company as there was of late."""
        return self.pace_alone(spec) if self._pace is None else self._pace

    def wait(self, ahead: "Iterable[Request]") -> float:
        """Seconds until whoever comes after all of `ahead` has a seat and is computed."""
        seconds, count, decodes = 0.0, 0, 0.0
        for request in ahead:
            count += 1
            spec = request.spec
            decodes += self.decodes_left(spec, request.produced) * self.pace(spec)
            if request.remaining > 1:
                start = request.num_computed
                alone = self._cost.compute(request.remaining, start)
                seconds += alone - self._cost.compute(1, start)
        if count < self._seats:
            return seconds
        return seconds + decodes / count * (count - self._seats + 1) / self._seats
