"""WaitingTimes: since when each request waits for its next iteration, and which ones starve."""

from engine.request import Request, State

# Swept in results/constants
STARVATION_SECONDS = 60.0  # the limit of policies whose paper names none
MAX_AT_ONCE = 64  # so that one plan does not promote, or postpone, a whole queue
IN_FLIGHT = frozenset({State.RUNNING, State.LEAVING})


class WaitingTimes:
    """Keeps requests by the length of their wait, the longest first, so that `starving` costs no
    more than the number of requests that starve or are in flight."""

    def __init__(self, limit: float) -> None:
        """A request starves after it has waited `limit` seconds."""
        self._limit = limit
        self._since: dict[Request, float] = {}
        self._reported_at: float | None = None

    def restart(self, request: Request, now: float) -> None:
        """The request arrived or was just in an iteration: its wait starts now."""
        self._since.pop(request, None)
        self._since[request] = now

    def remove(self, request: Request) -> None:
        """The request has ended, or its wait is not watched any more."""
        self._since.pop(request, None)

    def seconds_left(self, request: Request, now: float) -> float:
        """Seconds until the request starves."""
        return self._since[request] + self._limit - now

    def starving(self, now: float, most: int = MAX_AT_ONCE) -> list[Request]:
        """Requests that have waited for the limit or longer, at most `most`, the longest wait
        first. Their wait restarts, so that each is reported once per limit. None at a time for
        which this was called before: a second walk of an order changes nothing."""
        if now == self._reported_at:
            return []
        self._reported_at = now
        starving: list[Request] = []
        for request, since in self._since.items():
            if now - since < self._limit:
                break
            if request.state not in IN_FLIGHT:
                starving.append(request)
                if len(starving) == most:
                    break
        for request in starving:
            self.restart(request, now)
        return starving
