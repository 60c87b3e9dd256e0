"""Admission control: which requests get KV blocks, and which are preempted for it.

A request starts when the blocks it needs are available: with `RESERVE`, blocks for the prompt and
`max_tokens`; with `GROW`, blocks for the tokens it has so far. In the second case it grows block
by block, and when blocks run short the last started request in the policy's order is preempted:
swapped out if the host tier has room, else its KV is dropped and recomputed later. No request is
preempted unless the blocks gained are enough.

Protection. A request whose KV was dropped `max_preemptions` times is *protected*. It reserves
nothing, so others can use the blocks that it does not need yet; instead it comes first when blocks
run short. To grow, it may preempt every unprotected request, whatever the policy's order, and the
protected requests that arrived after it; it is preempted only by a protected request that arrived
before it. (A background request never preempts one that is not, which may always preempt it.)

No deadlock: let P be the earliest protected request that has started; without one, the policy's
most urgent started request takes the role of P. No request may preempt P, and each started request
that is in no iteration can be preempted by P. Every request fits alone (`check_fits`), so P gets
its blocks. If no other request runs, P is planned and produces a token. No starvation: a protected
request loses its KV only to the growth of an earlier one, which keeps the blocks that it gained
until it ends. The requests before it are finitely many and need finitely many blocks, so it is
preempted finitely often, and unprotected requests at most `max_preemptions` times. Swapping out
loses no work and is not bounded. Which started request runs next is up to the policy.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from math import inf

from engine.iteration import Observer
from engine.kv.cache import KVCache, Shortage
from engine.policy.base import Preemption, SortKey
from engine.pool import RequestPool
from engine.request import Move, Request, State

READY, SWAPPING_IN = State.READY, State.SWAPPING_IN  # bound once (see engine.pool)
CHUNK = 64  # fixed: no decision depends on it; requests whose keys are computed at a time


class Admission(Enum):
    """The blocks that must be available before a request starts, and when it may join the batch."""

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
    swap: SwapMode = SwapMode.OFF

    @property
    def swaps(self) -> bool:
        """Whether KV is swapped; with reserving admission no request is ever preempted."""
        return self.swap is not SwapMode.OFF and self.admission is Admission.GROW


class AdmissionControl:
    """Starts, grows and preempts requests; a decision changes the ledger at once."""

    def __init__(
        self, settings: AdmissionSettings, kv: KVCache, pool: RequestPool, observer: Observer
    ) -> None:
        self._settings = settings
        self._grows = settings.admission is Admission.GROW
        self._kv = kv
        self._pool = pool
        self._observer = observer
        # Of the plan being made:
        self._least_urgent: list[Request] = []  # started requests, as far as they were needed
        self._more: Iterator[Request] | None = None  # those behind them
        self._keys: dict[Request, SortKey] = {}  # in the policy's order
        self._reclaimable = inf  # most blocks that preemption can gain, as far as is known

    def begin_plan(self) -> None:
        """Discard what was computed for the last plan."""
        self._least_urgent.clear()
        self._more = None
        self._keys.clear()
        self._reclaimable = inf

    def admit(self, request: Request, now: float) -> bool:
        """Start a waiting or swapped request if its blocks are available, or can be made available
        by preemption. KV on the host is swapped in before the request runs."""
        short = self.missing(request)
        if short.is_any and not self._make_room_to_start(request, short, now):
            return False
        self.start(request, now, is_awaited=True)
        return True

    def make_room_to_grow(self, request: Request, num_slots: int, now: float) -> bool:
        """Make a started request hold so many slots, for which blocks lack, by preempting other
        requests. Returns False, and preempts none, if that gains too few blocks."""
        missing = self._kv.missing(request, num_slots).blocks
        victims: list[Request] = []
        comes_first = self._grows and self.is_protected(request)
        candidates = self._victims_of_protected if comes_first else self._victims
        for victim in candidates(request, now):
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
        """Give a request its KV, for which there is room (`missing`). If it is
        swapped, the move is awaited by the step being planned, or runs beside it."""
        self._kv.start(request, self._slots_to_start(request), now, is_awaited=is_awaited)
        request.setbacks.num_step_overs = 0
        request.samples.produced_at_start = request.produced
        if request.state is SWAPPING_IN:  # ahead of need, so it may be preempted at once
            request.samples.produced_at_start -= 1
        if request.times.admitted_at is None:
            request.times.admitted_at = now
            request.num_cached = request.num_computed

    def missing(self, request: Request) -> Shortage:
        """Pages that lack for the request to start; with `GROW` one block of each layer group is
        left free for each admitted request to grow into."""
        headroom = self._pool.num_admitted * len(self._kv.groups) if self._grows else 0
        blocks, states = self._kv.missing(request, self._slots_to_start(request))
        return Shortage(blocks + headroom, states)

    @property
    def may_preempt_to_start(self) -> bool:
        """Whether a waiting request may preempt any started one."""
        preemption, swaps = self._pool.policy.preemption, self._settings.swaps
        is_allowed = preemption is Preemption.ALWAYS or (
            preemption is Preemption.IF_SWAPPED and swaps
        )
        return is_allowed or bool(self._pool.background)

    def is_protected(self, request: Request) -> bool:
        """Whether a started request is preempted only by earlier protected requests, or, with
        reserving admission, never."""
        if not self._grows:
            return True
        return request.setbacks.num_preemptions >= self._settings.max_preemptions

    def has_run(self, request: Request) -> bool:
        """Whether it has produced a token since it started, so that a waiting request may preempt
        it."""
        return request.produced > request.samples.produced_at_start

    def _make_room_to_start(self, request: Request, short: Shortage, now: float) -> bool:
        """Preempt less urgent requests until this one fits, for which pages lack; none if all
        together gain too few. It may still not fit: a victim's copy on the host may take the place
        of the request's prefix there."""
        missing, fewest = short  # each victim has one state, or more
        if not self.may_preempt_to_start or missing > self._reclaimable:
            return False
        if not self._pool.count(READY):  # all started requests are in the iteration, or in flight
            return False
        victims: list[Request] = []
        needed = missing
        headroom = len(self._kv.groups) if self._grows else 0
        host_left = self._kv.room.host_blocks if self._settings.swaps else 0
        for victim in self._victims(request, now):
            num_swapped = self._kv.num_to_swap(victim)
            if self._may_start_for(victim, request, is_kept=num_swapped <= host_left):
                victims.append(victim)
                host_left -= num_swapped
                missing -= self._kv.num_gained(victim, request) + headroom
                if missing <= 0 and len(victims) >= fewest:
                    break
        if missing > 0 or len(victims) < fewest:
            if missing > 0:
                self._reclaimable = needed - missing  # requests further back have fewer victims
            return False
        for victim in victims:
            self._preempt(victim, now)
        fits = self.missing(request).blocks <= 0
        assert fits or self._settings.swaps, "preemption gained fewer blocks than counted"
        return fits

    def _slots_to_start(self, request: Request) -> int:
        return request.num_tokens if self._grows else request.spec.max_slots

    def _ready_requests(self, now: float) -> Iterator[Request]:
        """Ready requests, the least urgent first, with their keys in `_keys`."""
        policy = self._pool.policy
        if self._more is None:
            self._more = policy.started_order(self._pool.started, now, reverse=True)
        at = 0
        while True:
            if at == len(self._least_urgent):
                chunk = [*islice(self._more, CHUNK)]
                self._keys.update(zip(chunk, policy.sort_keys(chunk, now), strict=True))
                self._least_urgent += chunk
                if not chunk:
                    return
            request = self._least_urgent[at]
            at += 1
            if request.state is READY:
                yield request

    def _key(self, request: Request, now: float) -> SortKey:
        """The request's position in the policy's order."""
        if request not in self._keys:
            (self._keys[request],) = self._pool.policy.sort_keys([request], now)
        return self._keys[request]

    def _victims(self, request: Request, now: float) -> Iterator[Request]:
        """Less urgent requests that may be preempted for `request`, the least urgent first."""
        key = self._key(request, now)
        for other in self._ready_requests(now):
            if self._keys[other] <= key:
                return
            if not self.is_protected(other) or _is_background_for(other, request):
                yield other

    def _victims_of_protected(self, request: Request, now: float) -> Iterator[Request]:
        """Requests that may be preempted so that a protected one can grow: unprotected requests,
        the least urgent first, then protected requests, the last arrived first."""
        later: list[Request] = []
        for other in self._ready_requests(now):
            if other is request or _is_background_for(request, other):
                continue
            if not self.is_protected(other) or _is_background_for(other, request):
                yield other
            elif other.request_id > request.request_id:
                later.append(other)
        yield from sorted(later, key=lambda other: -other.request_id)

    def _may_start_for(self, victim: Request, request: Request, *, is_kept: bool) -> bool:
        """Whether a started request, whose KV is kept on the host or is not, may be preempted so
        that a waiting one can start."""
        if _is_background_for(victim, request):
            return True
        preemption = self._pool.policy.preemption
        is_allowed = preemption is Preemption.ALWAYS or (
            preemption is Preemption.IF_SWAPPED and is_kept
        )
        return is_allowed and self.has_run(victim)

    def _preempt(self, victim: Request, now: float) -> None:
        """Swap the victim out, or drop its KV if that is off or the host tier is full."""
        if self._settings.swaps and self._kv.swap_out(victim, now, is_awaited=True):
            return
        self._kv.release(victim)
        victim.reset_to(0)
        victim.setbacks.num_preemptions += 1
        self._pool.move(victim, Move.PREEMPT)
        self._observer.preempted(victim, now)


def _is_background_for(victim: Request, request: Request) -> bool:
    """A background request can always be preempted for one that is not in the background."""
    return victim.spec.is_background and not request.spec.is_background
