"""Autoscaler: how many replicas take requests, from waiting tokens and the use of KV memory.

The rule of Kubernetes' HorizontalPodAutoscaler on two metrics, waiting tokens per replica and the
share of KV slots in use: if one is above its target, the number grows in proportion, at most by
half at a time. A new replica takes requests after its start-up delay. Once nothing has waited for
`calm_seconds`, a twentieth of the replicas stops taking requests in each interval, as long as the
use of KV memory stays below its target without them; they finish those that they have.
"""

from collections import deque
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from engine.errors import InvalidRequest

MAX_GROWTH = 1.5  # at a time
SHRINK = 0.05
CALM = 0.1  # the fleet may shrink below this share of the target of waiting tokens
MARGIN = 0.9  # the fleet may reach this share of the target of KV usage by shrinking


@dataclass(frozen=True, slots=True)
class AutoscaleSettings:
    """Bounds and pace of autoscaling. Seconds; tokens per replica."""

    least: int
    most: int
    target_tokens: float = 2_000.0
    target_usage: float = 0.6  # the share of the KV slots in use
    start_seconds: float = 60.0  # from the decision until a new replica takes requests
    interval: float = 15.0
    calm_seconds: float = 120.0

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise InvalidRequest(
                f"autoscaling needs 1 <= least <= most replicas, not {self.least} and {self.most}"
            )


class Scale(NamedTuple):
    """The replicas at one time: those that take requests, and those that start."""

    active: int
    starting: int


class Autoscaler:
    """Decides once per interval. Replica numbers are reused: the lowest ones are active."""

    def __init__(self, settings: AutoscaleSettings) -> None:
        self._settings = settings
        self._active = settings.least
        self._starting: deque[float] = deque()  # when each one takes requests
        self._decide_at = settings.interval
        self._calm_since = 0.0

    def update(self, now: float, waiting_tokens: float, usage: float = 0.0) -> Scale:
        """The replicas from `now` on; `waiting_tokens` of all replicas, and the mean `usage` of
        the KV slots of those that take requests."""
        while self._starting and self._starting[0] <= now:
            self._starting.popleft()
            self._active += 1
        if now >= self._decide_at:
            self._decide_at = now + self._settings.interval
            self._decide(now, waiting_tokens, usage)
        return Scale(self._active, len(self._starting))

    def _decide(self, now: float, waiting_tokens: float, usage: float) -> None:
        settings = self._settings
        waiting = waiting_tokens / self._active / settings.target_tokens
        used = usage / settings.target_usage
        total = self._active + len(self._starting)
        if waiting > CALM:
            self._calm_since = now
        if (ratio := max(waiting, used)) > 1.0:
            wanted = ceil(self._active * min(ratio, MAX_GROWTH))
            for _ in range(min(wanted, settings.most) - total):
                self._starting.append(now + settings.start_seconds)
        elif now - self._calm_since >= settings.calm_seconds and not self._starting:
            fewest = max(settings.least, self._active - ceil(SHRINK * self._active))
            self._active = max(fewest, min(self._active, ceil(self._active * used / MARGIN)))
