"""Admission control: which requests get KV blocks, and which are preempted for it.

A request starts when the blocks it needs are available: with `RESERVE`, blocks for the prompt and
`max_tokens`; with `GROW`, blocks for the tokens it has so far. In the second case it grows block
by block, and when blocks run short the last started request in the policy's order is preempted:
swapped out if the host tier has room, else its KV is dropped and recomputed later. A request that
was preempted `max_preemptions` times, or swapped out `max_swaps` times, starts again only with
blocks for all its `max_tokens` and is not preempted any more. So preemptions are bounded, and a
deadlock is impossible. No request is preempted unless the blocks gained are enough.
"""

from dataclasses import dataclass
from enum import Enum
from math import inf
from typing import TYPE_CHECKING

from engine.request import Move, Request, State

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engine.events import Observer
    from engine.kv.manager import KVManager
    from engine.pool import RequestPool

READY, SWAPPING_IN = State.READY, State.SWAPPING_IN  # bound once (see engine.pool)


class Admission(Enum):
    """Which blocks must be available before a request starts, and when it may join the batch."""

    GROW = "grow"  # blocks for the tokens so far; more are allocated as needed
    RESERVE = "reserve"  # blocks for prompt + max_tokens (Orca)
    REQUEST = "request"  # as RESERVE, and none joins before the whole batch has ended


class SwapMode(Enum):
    """What happens to the KV of a preempted request if there is a host tier."""

    OFF = "off"  # dropped and recomputed
    REACTIVE = "reactive"  # swapped out when blocks are short, swapped in when the request may run
    PROACTIVE = "proactive"  # both also ahead of need, under a policy that preempts (FastServe)


@dataclass(frozen=True, slots=True)
class AdmissionSettings:
    """When requests are started and preempted."""

    admission: Admission
    max_preemptions: int
    max_swaps: int
    swap: SwapMode = SwapMode.OFF
    min_run: int = 1  # tokens that a started request produces before a waiting one may preempt it

    @property
    def swaps(self) -> bool:
        """Whether KV is swapped; with reserving admission no request is ever preempted."""
        return self.swap is not SwapMode.OFF and self.admission is Admission.GROW


class AdmissionControl:
    """Starts, grows and preempts requests; a decision changes the ledger at once."""

    def __init__(
        self,
        settings: AdmissionSettings,
        kv: "KVManager",
        pool: "RequestPool",
        observer: "Observer",
    ) -> None:
        self._settings = settings
        self._kv = kv
        self._pool = pool
        self._observer = observer
        # Of the plan being made:
        self._rank: dict[Request, int] = {}  # position in the policy's order; filled when needed
        self._started: list[Request] = []  # ready requests, the least urgent first
        self._reclaimable = inf  # most blocks that preemption can gain, as far as is known

    def begin_plan(self) -> None:
        """Discard what was computed for the last plan."""
        self._rank.clear()
        self._started.clear()
        self._reclaimable = inf

    def admit(self, request: Request, now: float) -> bool:
        """Start a waiting or swapped request if its blocks are available, or can be made available
        by preemption. KV on the host is swapped in before the request runs."""
        if self.num_missing(request) > 0 and not self._make_room(request, now):
            return False
        self.start(request, now, is_awaited=True)
        return True

    def secure(self, request: Request, num_slots: int, now: float) -> bool:
        """Make a started request hold so many slots, if need be by preempting less urgent ones."""
        if self._kv.reserve(request, num_slots):
            return True
        missing = self._kv.num_missing(request, num_slots)
        victims: list[Request] = []
        for victim in self._victims(request, now):
            victims.append(victim)
            missing -= self._kv.num_gained(victim)
            if missing <= 0:
                break
        if missing > 0:
            return False
        for victim in victims:
            self._preempt(victim, now)
        return self._kv.reserve(request, num_slots)

    def start(self, request: Request, now: float, *, is_awaited: bool) -> None:
        """Give a request its KV, for which there is room (`num_missing` is 0 or less). If it is
        swapped, the move is awaited by the step being planned, or runs beside it."""
        self._kv.start(request, self._slots_to_start(request), now, is_awaited=is_awaited)
        request.num_step_overs = 0
        request.produced_at_start = request.produced
        if request.state is SWAPPING_IN:  # ahead of need, so it may be preempted at once
            request.produced_at_start -= self._settings.min_run
        if request.admitted_at is None:
            request.admitted_at = now
            request.num_cached = request.num_computed

    def num_missing(self, request: Request) -> int:
        """Blocks that lack for the request to start; with `GROW` one block is left free for each
        admitted request to grow into."""
        headroom = self._pool.num_admitted if self._settings.admission is Admission.GROW else 0
        return self._kv.num_missing_to_start(request, self._slots_to_start(request)) + headroom

    def is_reserved(self, request: Request) -> bool:
        """Whether a started request holds blocks for all its `max_tokens`, so that it is never
        preempted (except by a request that is not in the background)."""
        settings = self._settings
        if settings.admission is not Admission.GROW:
            return True
        if settings.swaps and request.num_swaps >= settings.max_swaps:
            return True
        return request.num_preemptions >= settings.max_preemptions

    def has_run(self, request: Request) -> bool:
        """Whether it has produced `min_run` tokens since it started, so that a waiting request may
        preempt it."""
        return request.produced >= request.produced_at_start + self._settings.min_run

    def _make_room(self, request: Request, now: float) -> bool:
        """Preempt less urgent requests until this one fits; none if all together gain too few."""
        missing = self.num_missing(request)
        preempts = self._pool.policy.preempts or self._pool.background
        if not preempts or missing > self._reclaimable:
            return False
        victims: list[Request] = []
        needed, prefix = missing, self._kv.prefix(request)
        headroom = int(self._settings.admission is Admission.GROW)
        for victim in self._victims(request, now):
            if self._may_start_for(victim, request):
                victims.append(victim)
                missing -= self._kv.num_gained(victim, exclude=prefix) + headroom
                if missing <= 0:
                    break
        if missing > 0:
            self._reclaimable = needed - missing  # requests further back have fewer victims
            return False
        for victim in victims:
            self._preempt(victim, now)
        assert self.num_missing(request) <= 0, "preemption gained fewer blocks than counted"
        return True

    def _slots_to_start(self, request: Request) -> int:
        return request.max_slots if self.is_reserved(request) else request.num_tokens

    def _victims(self, request: Request, now: float) -> "Iterator[Request]":
        """Requests that may be preempted for `request`, the least urgent first."""
        if not self._rank:
            order = self._pool.policy.order(now)
            self._rank.update((other, position) for position, other in enumerate(order))
            self._started += [r for r in self._rank if r.state is READY]
            self._started.reverse()
        for other in self._started:
            if self._rank[other] <= self._rank[request]:
                return
            is_protected = self.is_reserved(other) and not _is_background_for(other, request)
            if other.state is READY and not is_protected:
                yield other

    def _may_start_for(self, victim: Request, request: Request) -> bool:
        """Whether a started request may be preempted so that a waiting one can start."""
        if _is_background_for(victim, request):
            return True
        return self._pool.policy.preempts and self.has_run(victim)

    def _preempt(self, victim: Request, now: float) -> None:
        """Swap the victim out, or drop its KV if that is off or the host tier is full."""
        if self._settings.swaps and self._kv.swap_out(victim, now, is_awaited=True):
            return
        self._kv.release(victim)
        victim.reset_to(0)
        victim.num_preemptions += 1
        self._pool.move(victim, Move.PREEMPT)
        self._observer.preempted(victim, now)


def _is_background_for(victim: Request, request: Request) -> bool:
    """A background request can always be preempted for one that is not in the background."""
    return victim.spec.is_background and not request.spec.is_background
