"""Memory: who may hold KV, and who must give it back. Plain functions over ledger and policy.

A request starts when the ledger has what it needs to start: all that it may ever need, or just
its tokens so far. In the second case it grows block by block, and when blocks run short the
policy's last request is preempted: swapped out if the host tier has room, else computed again.
One that was preempted `max_preemptions` times, or swapped out `max_swaps` times, comes back with
all it may ever need, so both are bounded and nobody deadlocks. Nobody is preempted in vain.
"""

from dataclasses import dataclass
from enum import Enum
from math import inf
from typing import TYPE_CHECKING

from engine.kv.prefix import extend_hashes
from engine.kv.swapper import KVSwapper
from engine.request import Move, Request, State

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from engine.control.pool import RequestPool
    from engine.events import Observer
    from engine.kv.ledger import KVLedger
    from engine.ports import Policy

READY, SWAPPED, SWAPPING_IN = State.READY, State.SWAPPED, State.SWAPPING_IN  # bound once (see pool)


class Admission(Enum):
    """What a request must find free before it starts, and who may join a running batch."""

    GROW = "grow"  # blocks as needed
    RESERVE = "reserve"  # prompt + max_tokens at once (Orca)
    REQUEST = "request"  # as reserve, and nobody joins before the whole batch is done


class SwapMode(Enum):
    """What happens to the KV of the preempted, where there is a host tier."""

    OFF = "off"  # it is given up and computed again
    REACTIVE = "reactive"  # it is swapped out when blocks are short, and in when it may run
    PROACTIVE = "proactive"  # ahead of both, under a policy that preempts (FastServe)


@dataclass(frozen=True, slots=True)
class AdmissionSettings:
    """On which terms KV is lent."""

    admission: Admission
    max_preemptions: int
    max_swaps: int
    reuses_prefixes: bool
    swap: SwapMode = SwapMode.OFF
    min_run: int = 1  # tokens that a request produces before it gives way to one that waits

    @property
    def swaps(self) -> bool:
        """Whether KV may go to the host; who has reserved its slots is never preempted."""
        return self.swap is not SwapMode.OFF and self.admission is Admission.GROW


class AdmissionControl:
    """Admission, growth and preemption; what it decides it carries out in the ledger at once."""

    def __init__(
        self,
        terms: AdmissionSettings,
        ledger: "KVLedger",
        pool: "RequestPool",
        policy: "Policy",
        observer: "Observer",
    ) -> None:
        self.policy = policy
        self.tiers = KVSwapper(ledger, pool, observer)
        self._terms = terms
        self._ledger = ledger
        self._pool = pool
        self._observer = observer
        self._rank: dict[Request, int] = {}  # in the plan in the making; made when needed
        self._started: list[Request] = []  # who may be preempted in it, least urgent first
        self._reclaimable = inf  # blocks that preemption was found to yield at most, in it

    def begin(self) -> None:
        """A plan begins: what was found for the last one is void."""
        self._rank.clear()
        self._started.clear()
        self._reclaimable = inf

    def arrive(self, request: Request) -> None:
        """Name the blocks of a prompt, so that it can be found in the cache."""
        if self._terms.reuses_prefixes:
            extend_hashes(request, self._ledger.block_size)

    def num_to_compute(self, request: Request) -> int:
        """Its tokens that are not in the cache now."""
        return request.num_tokens - len(self._prefix(request)) * self._ledger.block_size

    def publish(self, request: Request, start: int) -> None:
        """Let others reuse the blocks that it has filled from position `start` on."""
        size = self._ledger.block_size
        num_full = request.num_computed // size
        if num_full > start // size and self._terms.reuses_prefixes:
            extend_hashes(request, size)
            self._ledger.publish(request.request_id, request.block_hashes[:num_full])

    def admit(self, request: Request, now: float) -> bool:
        """Start a waiting or swapped request if it fits, or if a policy that preempts can make
        it fit. What it has on the host comes in before it runs."""
        if self.num_missing(request) > 0 and not self._make_room(request, now):
            return False
        self.start(request, now, is_awaited=True)
        return True

    def secure(self, request: Request, num_slots: int, now: float) -> bool:
        """Reserve the slots, at the expense of less urgent requests if need be."""
        if self._ledger.reserve(request.request_id, num_slots):
            return True
        missing = self._ledger.num_missing(request.request_id, num_slots)
        victims: list[Request] = []
        for victim in self._victims(request, now):
            victims.append(victim)
            missing -= self._ledger.num_private(victim.request_id)
            if missing <= 0:
                break
        if missing > 0:
            return False
        for victim in victims:
            self._preempt(victim, now)
        return self._ledger.reserve(request.request_id, num_slots)

    def start(self, request: Request, now: float, *, is_awaited: bool) -> None:
        """Give a request that fits its KV; if it is swapped, by a move that is awaited or not."""
        prefix, num_slots = self._prefix(request), self._slots_to_start(request)
        if request.state is SWAPPED:
            self.tiers.swap_in(request, prefix, num_slots, now, is_awaited=is_awaited)
        else:
            self._ledger.adopt(request.request_id, prefix)
            reserved = self._ledger.reserve(request.request_id, num_slots)
            assert reserved, "admission found room that the ledger does not have"
            self._pool.move(request, Move.ADMIT)
            request.land(len(prefix) * self._ledger.block_size)
        request.num_step_overs = 0
        request.produced_at_start = request.produced
        if request.state is SWAPPING_IN:  # ahead of its turn, so it holds nobody else up
            request.produced_at_start -= self._terms.min_run
        if request.admitted_at is None:
            request.admitted_at = now
            request.num_cached = request.num_computed

    def num_missing(self, request: Request) -> int:
        """Blocks short for it to start; growing neighbours keep one each to grow into."""
        prefix = self._prefix(request)
        need = self._ledger.blocks_for(self._slots_to_start(request))
        need -= len(prefix) - self._ledger.num_idle(prefix)
        headroom = self._pool.num_admitted if self._terms.admission is Admission.GROW else 0
        return need + headroom - self._ledger.num_free

    def is_reserved(self, request: Request) -> bool:
        """Whether it holds all it may ever need, and so is never preempted."""
        if self._terms.admission is not Admission.GROW:
            return True
        terms = self._terms
        if terms.swaps and request.num_swaps >= terms.max_swaps:
            return True
        return request.num_preemptions >= terms.max_preemptions

    def has_run(self, request: Request) -> bool:
        """Whether it ran for long enough to give way to one that waits."""
        return request.produced >= request.produced_at_start + self._terms.min_run

    def _prefix(self, request: Request) -> "Sequence[bytes]":
        """Names of the leading blocks that are on the device; one token is always computed.

        Cached blocks do not tell how likely their tokens were; so who asks computes them.
        """
        most = request.num_tokens - 1
        if request.state is SWAPPED:
            most = request.num_computed
        elif request.wants_prompt_logprobs:
            most = len(request.prompt_logprobs)
        hashes = request.block_hashes[: most // self._ledger.block_size]
        return hashes[: self._ledger.match(hashes)]

    def _make_room(self, request: Request, now: float) -> bool:
        """Preempt less urgent requests until it fits; none, if all together are too few."""
        missing = self.num_missing(request)
        if not (self.policy.preempts or self._pool.background) or missing > self._reclaimable:
            return False
        victims: list[Request] = []
        wanted, prefix = missing, self._prefix(request)
        room_to_grow = int(self._terms.admission is Admission.GROW)
        for victim in self._victims(request, now):
            if self._may_start_for(victim, request):
                victims.append(victim)
                missing -= self._ledger.num_private(victim.request_id, but=prefix) + room_to_grow
                if missing <= 0:
                    break
        if missing > 0:
            self._reclaimable = wanted - missing  # and who comes later has fewer victims
            return False
        for victim in victims:
            self._preempt(victim, now)
        assert self.num_missing(request) <= 0, "room was made, and it is not there"
        return True

    def _slots_to_start(self, request: Request) -> int:
        return request.max_slots if self.is_reserved(request) else request.num_tokens

    def _victims(self, request: Request, now: float) -> "Iterator[Request]":
        """Who may give KV up for `request`, the least urgent first."""
        if not self._rank:
            self._rank.update((other, at) for at, other in enumerate(self.policy.order(now)))
            self._started += [r for r in self._rank if r.state is READY]
            self._started.reverse()
        for other in self._started:
            if self._rank[other] <= self._rank[request]:
                return
            is_held = self.is_reserved(other) and not _steps_aside(other, request)
            if other.state is READY and not is_held:
                yield other

    def _may_start_for(self, victim: Request, request: Request) -> bool:
        """Whether a started request gives up its KV so that a waiting one may start."""
        return _steps_aside(victim, request) or (self.policy.preempts and self.has_run(victim))

    def _preempt(self, victim: Request, now: float) -> None:
        if self._terms.swaps and self.tiers.swap_out(victim, now, is_awaited=True):
            return
        self._ledger.release(victim.request_id)
        victim.land(0)
        victim.num_preemptions += 1
        self._pool.move(victim, Move.PREEMPT)
        self._observer.preempted(victim, now)


def _steps_aside(victim: Request, request: Request) -> bool:
    """What runs in the background makes room for what does not, whatever it was promised."""
    return victim.spec.is_background and not request.spec.is_background
