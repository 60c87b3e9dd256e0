"""Policy: the port of a scheduling policy (`engine.policy.table` has all policies by name), the
answers that most policies do not change, and background requests behind all."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from enum import Enum
from itertools import chain
from math import inf
from typing import Protocol, runtime_checkable

from engine.policy.settings import PolicySettings
from engine.request import Request, RequestSpec

SortKey = tuple[float, ...]


class Preemption(Enum):
    """Whether a started request may be preempted so that a more urgent waiting one can start."""

    NEVER = "never"
    IF_SWAPPED = "if_swapped"  # only if its KV fits into the host tier: no work is lost
    ALWAYS = "always"  # if the host tier is full its KV is dropped, and recomputed later


class Policy(Protocol):
    """Orders the live requests. It holds no KV, reads no clock and drops no request.

    The scheduler calls `validate` before a request is accepted; `arrive` once per request, in any
    state of it when policies are switched; `ran` after each iteration that the request was part
    of, before the sampled token is counted; `found` before a waiting request gets KV, which may be
    in several plans; `start` whenever it gets KV on the device, and when
    policies are switched while it has; `leave` when it ends.
    """

    @property
    def preemption(self) -> Preemption: ...

    def validate(self, spec: RequestSpec, num_tokens: int, now: float) -> None:
        """Raise `DeadlineUnmeetable` or `InvalidRequest` if the request cannot meet its deadline;
        `num_tokens` tokens of its prompt have to be computed."""

    def arrive(self, request: Request, now: float) -> None: ...

    def ran(self, request: Request, num_tokens: int, seconds: float, now: float) -> None:
        """`num_tokens` tokens of the request were computed in an iteration of `seconds`."""

    def found(self, request: Request, num_tokens: int) -> bool:
        """The cache was searched for a waiting request: `num_tokens` tokens are to be computed.
        Returns whether it may start; if not, others have come before it."""

    def start(self, request: Request) -> None: ...

    def leave(self, request: Request, now: float) -> None: ...

    def order(self, now: float) -> Iterator[Request]:
        """All live requests, most urgent first; the last one is the first to be preempted.

        The scheduler takes a batch from the front, so the cost must depend on how many requests
        are taken, not on how many are live. Requests are taken before any other method is called.
        """

    def started_order(
        self, started: Collection[Request], now: float, *, reverse: bool = False
    ) -> Iterator[Request]:
        """The requests with KV on the device, which are `started`, as they are in `order`, or the
        last one first. Live requests that had KV before may be among them.

        Requests may start, stop and run during the walk, which does not change it.
        """

    def sort_keys(self, requests: Sequence[Request], now: float) -> list[SortKey]:
        """One key for each of these live requests; `order` is ascending in them."""

    def next_scheduled_times(self, requests: Sequence[Request], now: float) -> list[float]:
        """How soon each of these live requests is expected to run next (FastServe's ENST). The unit
        is the policy's own; values are only compared with each other."""


@runtime_checkable
class MultiLevel(Protocol):
    """A policy that keeps requests in several queues; level 0 is the most urgent one."""

    @property
    def level_sizes(self) -> list[int]:
        """The number of live requests in each queue."""

    def level(self, request: Request) -> int:
        """The queue that a live request is in."""


class PolicyBase(ABC):
    """A policy that rejects nothing and keeps no queue of started requests. It derives the
    answers to rare questions from `sort_keys`. A policy under which thousands of
    requests may be started overrides `started_order`."""

    def validate(self, spec: RequestSpec, num_tokens: int, now: float) -> None:
        return None

    def found(self, request: Request, num_tokens: int) -> bool:
        return True

    def start(self, request: Request) -> None:
        return None

    def ran(self, request: Request, num_tokens: int, seconds: float, now: float) -> None:
        return None

    @abstractmethod
    def sort_keys(self, requests: Sequence[Request], now: float) -> list[SortKey]:
        """One key for each request; the policy's order is ascending in them."""

    def started_order(
        self, started: Collection[Request], now: float, *, reverse: bool = False
    ) -> Iterator[Request]:
        requests = [*started]
        keys = dict(zip(requests, self.sort_keys(requests, now), strict=True))
        return iter(sorted(requests, key=keys.__getitem__, reverse=reverse))

    def next_scheduled_times(self, requests: Sequence[Request], now: float) -> list[float]:
        """The position of each request among all of them in the order, from 0."""
        keys = self.sort_keys(requests, now)
        positions = [0.0] * len(keys)
        for position, index in enumerate(sorted(range(len(keys)), key=keys.__getitem__)):
            positions[index] = float(position)
        return positions


class BackgroundLast:
    """Any policy for foreground requests, and all background requests behind them.

    A request with `RequestSpec.is_background` (a line of a batch) uses what is left of an
    iteration. It is ordered behind every foreground request and is preempted first. The scheduler
    bounds the time that it adds to an iteration (`max_background_slowdown`). Among themselves
    background requests are served in order of arrival. Under steady foreground load they may
    starve, which is what `is_background` means.

    Wraps every policy made by `engine.policy.build`; `inner` orders the foreground requests. It
    is `base`, the policy of the name, or is made of instances of it.
    """

    def __init__(self, inner: Policy, settings: PolicySettings, base: Policy | None = None) -> None:
        self.inner = inner
        self.base = base or inner
        self.settings = settings  # the settings that `inner` was made with
        self._background: dict[Request, SortKey] = {}
        self._num_arrived = 0

    @property
    def preemption(self) -> Preemption:
        return self.inner.preemption

    def validate(self, spec: RequestSpec, num_tokens: int, now: float) -> None:
        """A background request is never rejected for its deadlines."""
        if not spec.is_background:
            self.inner.validate(spec, num_tokens, now)

    def arrive(self, request: Request, now: float) -> None:
        if request.spec.is_background:
            self._background[request] = (1, self._num_arrived)
            self._num_arrived += 1
        else:
            self.inner.arrive(request, now)

    def ran(self, request: Request, num_tokens: int, seconds: float, now: float) -> None:
        if not request.spec.is_background:
            self.inner.ran(request, num_tokens, seconds, now)

    def found(self, request: Request, num_tokens: int) -> bool:
        return request.spec.is_background or self.inner.found(request, num_tokens)

    def start(self, request: Request) -> None:
        if not request.spec.is_background:
            self.inner.start(request)

    def leave(self, request: Request, now: float) -> None:
        if request.spec.is_background:
            del self._background[request]
        else:
            self.inner.leave(request, now)

    def order(self, now: float) -> Iterator[Request]:
        order = self.inner.order(now)
        return chain(order, self._background) if self._background else order

    def started_order(
        self, started: Collection[Request], now: float, *, reverse: bool = False
    ) -> Iterator[Request]:
        if not self._background:
            return self.inner.started_order(started, now, reverse=reverse)
        foreground = [request for request in started if not request.spec.is_background]
        behind = [request for request in started if request.spec.is_background]
        behind.sort(key=self._background.__getitem__, reverse=reverse)
        order = self.inner.started_order(foreground, now, reverse=reverse)
        return chain(behind, order) if reverse else chain(order, behind)

    def sort_keys(self, requests: Sequence[Request], now: float) -> list[SortKey]:
        if not self._background:
            return self.inner.sort_keys(requests, now)
        foreground = [request for request in requests if not request.spec.is_background]
        keys = iter(self.inner.sort_keys(foreground, now))
        behind = self._background
        return [behind[r] if r.spec.is_background else (0, *next(keys)) for r in requests]

    def next_scheduled_times(self, requests: Sequence[Request], now: float) -> list[float]:
        foreground = [request for request in requests if not request.spec.is_background]
        times = iter(self.inner.next_scheduled_times(foreground, now))
        return [inf if request.spec.is_background else next(times) for request in requests]
