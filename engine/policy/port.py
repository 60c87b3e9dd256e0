"""Policy: the port of a scheduling policy. `engine.policy.table` has all policies by name."""

from collections.abc import Collection, Iterator, Sequence
from enum import Enum
from typing import Protocol, runtime_checkable

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
        ...

    def arrive(self, request: Request, now: float) -> None: ...

    def ran(self, request: Request, num_tokens: int, seconds: float, now: float) -> None:
        """`num_tokens` tokens of the request were computed in an iteration of `seconds`."""
        ...

    def found(self, request: Request, num_tokens: int) -> bool:
        """The cache was searched for a waiting request: `num_tokens` tokens are to be computed.
        Returns whether it may start; if not, others have come before it."""
        ...

    def start(self, request: Request) -> None: ...

    def leave(self, request: Request, now: float) -> None: ...

    def order(self, now: float) -> Iterator[Request]:
        """All live requests, most urgent first; the last one is the first to be preempted.

        The scheduler takes a batch from the front, so the cost must depend on how many requests
        are taken, not on how many are live. Requests are taken before any other method is called.
        """
        ...

    def started_order(
        self, started: Collection[Request], now: float, *, reverse: bool = False
    ) -> Iterator[Request]:
        """The requests with KV on the device, which are `started`, as they are in `order`, or the
        last one first. Live requests that had KV before may be among them.

        Requests may start, stop and run during the walk, which does not change it.
        """
        ...

    def sort_keys(self, requests: Sequence[Request], now: float) -> list[SortKey]:
        """One key for each of these live requests; `order` is ascending in them."""
        ...

    def next_scheduled_times(self, requests: Sequence[Request], now: float) -> list[float]:
        """How soon each of these live requests is expected to run next (FastServe's ENST). The unit
        is the policy's own; values are only compared with each other."""
        ...


@runtime_checkable
class MultiLevel(Protocol):
    """A policy that keeps requests in several queues; level 0 is the most urgent one."""

    @property
    def level_sizes(self) -> list[int]:
        """The number of live requests in each queue."""
        ...

    def level(self, request: Request) -> int:
        """The queue that a live request is in."""
        ...
