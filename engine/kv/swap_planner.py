"""SwapPlanner: whose KV moves before it has to (FastServe, section 4.3).

Waiting until blocks are short puts the link to the host on the critical path. So when an iteration
is planned, some blocks are kept free for what is about to arrive, by swapping out early the
request that will run last, and whoever will run soon is swapped in early. "Soon" is the policy's
estimate of the next scheduled time (ENST). These moves run beside the compute of the iteration.

Against thrashing: only who has run since it was last given KV goes, only who is among the next
batch comes, nobody is sent away for one whose turn is not clearly earlier, and `max_swaps`
(`engine.control.admission`) bounds it all.
"""

from typing import TYPE_CHECKING

from engine.control.admission import SwapMode
from engine.request import Request, State

if TYPE_CHECKING:
    from engine.control.admission import AdmissionControl, AdmissionSettings
    from engine.control.pool import RequestPool
    from engine.kv.ledger import KVLedger

READY, SWAPPED = State.READY, State.SWAPPED  # bound once (see pool)
DECAY = 0.98  # per plan, of the largest burst of late
MOST_SPARE = 0.25  # of all blocks
MOST_WAITS = 4  # iterations of others, before a swapped request is brought in at once
CLEARLY = 2.0  # times as long until its turn, and a request gives way to another


class SwapPlanner:
    """Looks at who is not in the iteration just planned; `seats` are those of an iteration."""

    def __init__(
        self,
        terms: "AdmissionSettings",
        ledger: "KVLedger",
        pool: "RequestPool",
        memory: "AdmissionControl",
        seats: int,
    ) -> None:
        self._is_on = terms.swaps and terms.swap is SwapMode.PROACTIVE
        self._ledger = ledger
        self._pool = pool
        self._memory = memory
        self._seats = seats
        self._arrived = 0  # blocks of prompts since the last plan
        self._burst = 0.0  # most blocks that arrived between two plans, of late

    def arrive(self, request: Request) -> None:
        """It will want blocks for its prompt at once."""
        self._arrived += self._ledger.blocks_for(request.prompt_len)

    def may_wait(self, request: Request, num_others: int) -> bool:
        """Whether a swapped request whose turn it is waits to be brought in beside an iteration:
        ready are all who are needed for that and `num_others` more. A few times in a row only."""
        if request.state is not SWAPPED or num_others < 0 or not self._looks_ahead:
            return False
        request.num_step_overs += 1
        return request.num_step_overs <= MOST_WAITS

    @property
    def _looks_ahead(self) -> bool:
        return self._is_on and self._memory.policy.preempts

    def look_ahead(self, now: float) -> None:
        """Order moves that are not awaited, to go with the iteration that has been planned."""
        if not self._looks_ahead:
            return
        spare = self._spare()
        if self._short(spare) <= 0 and not self._pool.count(SWAPPED):
            return
        idle = [r for r in self._memory.policy.order(now) if r.state is READY or r.state is SWAPPED]
        turns = dict(zip(idle, self._memory.policy.next_scheduled_times(idle, now), strict=True))
        idle.sort(key=turns.__getitem__)
        leaving = [r for r in idle if r.state is READY and self._may_go(r)]  # soonest first
        for request in [r for r in idle[: self._seats] if r.state is SWAPPED]:
            short = self._memory.num_missing(request) + spare
            if short <= 0:
                self._memory.start(request, now, is_awaited=False)
                continue
            later = CLEARLY * turns[request]
            self._send_away([r for r in leaving if turns[r] > later], short, now)
            break  # those behind it can wait for what comes
        self._send_away(leaving, self._short(spare), now)

    def _spare(self) -> int:
        """Blocks to keep free: for a burst like those of late, and for the batch to grow into."""
        self._burst = max(self._arrived, self._burst * DECAY)
        self._arrived = 0
        growth = self._pool.count(State.RUNNING) // self._ledger.block_size + 1
        return min(int(self._burst) + growth, int(MOST_SPARE * self._ledger.num_blocks))

    def _short(self, spare: int) -> int:
        """Blocks short of so many, with those that are coming."""
        return spare - self._ledger.num_free - self._memory.tiers.num_coming

    def _may_go(self, request: Request) -> bool:
        return self._memory.has_run(request) and not self._memory.is_reserved(request)

    def _send_away(self, leaving: list[Request], num_blocks: int, now: float) -> None:
        """Swap out, the last first, until so many blocks come."""
        tiers = self._memory.tiers
        missing = num_blocks - tiers.num_coming
        for request in reversed(leaving):
            if missing <= 0:
                return
            if request.state is READY:
                before = tiers.num_coming
                if not tiers.swap_out(request, now, is_awaited=False):
                    return  # no room on the host
                missing -= tiers.num_coming - before
