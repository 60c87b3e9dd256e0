"""SwapPlanner: swaps KV before it has to be swapped (FastServe, section 4.3).

Swapping only when blocks are short puts the link to the host on the critical path. So with each
planned iteration some blocks are kept free for requests that are about to arrive, by swapping out
early the request that will run last; and a request that will run soon is swapped in early. "Soon"
is the policy's estimate of the next scheduled time (ENST). These moves are not awaited: they run in
parallel with the compute of the iteration.

Against thrashing: a request is swapped out only if it has run since it last got its KV, and
swapped in only if it is among the next batch; and it is not swapped out for a request whose next
scheduled time is not earlier.
"""

from engine.control.admission import AdmissionControl
from engine.kv.cache import KVCache
from engine.policy.base import Preemption
from engine.pool import RequestPool
from engine.request import Request, State

READY, SWAPPED = State.READY, State.SWAPPED  # bound once (see engine.pool)
# Swept in results/constants
DECAY = 0.98  # per plan, of the largest recent burst
MAX_SPARE = 0.25  # a share of all blocks


class SwapPlanner:
    """Decides moves for requests that are not in the iteration just planned; `seats` is the
    largest number of requests in an iteration."""

    def __init__(
        self, kv: KVCache, pool: RequestPool, admission: AdmissionControl, seats: int
    ) -> None:
        self._kv = kv
        self._pool = pool
        self._admission = admission
        self._seats = seats
        self._arrived = 0  # blocks of prompts that arrived since the last plan
        self._burst = 0.0  # most blocks that arrived between two plans, decaying

    def arrive(self, request: Request) -> None:
        """Count the blocks of a new prompt."""
        num_blocks = -(-request.prompt_len // self._kv.block_size)
        self._arrived += self._kv.groups.num_behind(0, num_blocks)

    def order_moves(self, now: float) -> None:
        """Order moves that are not awaited, to be part of the iteration being planned."""
        if self._pool.policy.preemption is Preemption.NEVER:
            return
        spare = self._spare()
        if self._num_short(spare) <= 0 and not self._pool.count(SWAPPED):
            return
        policy = self._pool.policy
        idle = [r for r in self._pool.started if r.state is READY]
        idle += self._pool.swapped
        keys = dict(zip(idle, policy.sort_keys(idle, now), strict=True))
        idle.sort(key=keys.__getitem__)
        times = dict(zip(idle, policy.next_scheduled_times(idle, now), strict=True))
        idle.sort(key=times.__getitem__)
        movable = [r for r in idle if r.state is READY and self._may_swap_out(r)]  # soonest first
        for request in [r for r in idle[: self._seats] if r.state is SWAPPED]:
            blocks, states = self._admission.missing(request)
            short = blocks + spare
            if short <= 0 and states <= 0:
                self._admission.start(request, now, is_awaited=False)
                continue
            self._swap_out([r for r in movable if times[r] > times[request]], max(short, 1), now)
            break  # requests behind it can wait for blocks to become free
        self._swap_out(movable, self._num_short(spare), now)

    def _spare(self) -> int:
        """Blocks to keep free: for a burst like recent ones and for the batch to grow into."""
        self._burst = max(self._arrived, self._burst * DECAY)
        self._arrived = 0
        growth = self._pool.count(State.RUNNING) // self._kv.block_size + 1
        growth *= len(self._kv.groups)
        return min(int(self._burst) + growth, int(MAX_SPARE * self._kv.shape.num_blocks))

    def _num_short(self, spare: int) -> int:
        """Blocks that lack for so many free ones, when the moves in flight have ended."""
        room = self._kv.room
        return spare - room.blocks - room.blocks_coming

    def _may_swap_out(self, request: Request) -> bool:
        return self._admission.has_run(request) and not self._admission.is_protected(request)

    def _swap_out(self, movable: list[Request], num_blocks: int, now: float) -> None:
        """Swap requests out, the last first, until so many blocks are to be freed in all."""
        for request in reversed(movable):
            if self._kv.room.blocks_coming >= num_blocks:
                return
            is_ready = request.state is READY
            if is_ready and not self._kv.swap_out(request, now, is_awaited=False):
                return  # the host tier is full
