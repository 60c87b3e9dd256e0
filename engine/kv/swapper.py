"""Tiers: KV moves between device and host, from the order in a step to the step's return.

A move is part of the next step. Until that step is back, both ends of it are moving: what leaves
the device is coming, neither free nor missing, and nobody may run whose KV is on its way. Only an
*awaited* move is quicker, since its step computes after it: what it frees on the device is free
in that very plan, and whoever it brings in may run in it.
"""

from array import array
from typing import TYPE_CHECKING

from engine.iteration import NO_SWAPS, Iteration, Swaps
from engine.request import Move, Request, State
from engine.step import BlockMove, Direction

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.control.pool import RequestPool
    from engine.events import Observer
    from engine.kv.ledger import BlockPairs, KVLedger


class KVSwapper:
    """Carries out in the ledger what memory and swap planner decide, and collects the moves."""

    def __init__(self, ledger: "KVLedger", pool: "RequestPool", observer: "Observer") -> None:
        self._ledger = ledger
        self._pool = pool
        self._observer = observer
        self._moves: list[BlockMove] = []  # of the plan in the making
        self._riders: list[Request] = []
        self._coming: dict[Request, int] = {}  # device blocks that each leaves when it settles

    @property
    def num_coming(self) -> int:
        """Device blocks that steps in flight make free."""
        return sum(self._coming.values())

    def swap_out(self, request: Request, now: float, *, is_awaited: bool) -> bool:
        """Order a ready request's KV to the host; False, and no change, if there is no room."""
        if not request.num_computed:
            return False
        num_private = self._ledger.num_private(request.request_id)
        pairs = self._ledger.copy_out(request.request_id, request.num_computed)
        if pairs is None:
            return False
        if is_awaited:
            self._ledger.leave_device(request.request_id)
        else:
            self._coming[request] = num_private
        request.num_swaps += 1
        self._pool.move(request, Move.SWAP_OUT)
        self._ride(request)
        self._order(request, Direction.OUT, pairs, is_awaited, now)
        return True

    def swap_in(
        self,
        request: Request,
        prefix: "Sequence[bytes]",
        num_slots: int,
        now: float,
        *,
        is_awaited: bool,
    ) -> None:
        """Order the KV back into `num_slots` slots, for which there is room; what `prefix` names
        is still on the device. It is ready at once if the move is awaited."""
        self._ledger.adopt(request.request_id, prefix)
        reserved = self._ledger.reserve(request.request_id, num_slots)
        assert reserved, "a request is swapped in where there is room"
        pairs = self._ledger.copy_in(request.request_id, len(prefix))
        if pairs.device:
            self._order(request, Direction.IN, pairs, is_awaited, now)
        if is_awaited or not pairs.device:
            self._ledger.settle(request.request_id)
            self._pool.move(request, Move.ADMIT)
        else:
            self._pool.move(request, Move.SWAP_IN)
            self._ride(request)

    def collect(self) -> Swaps:
        """What was ordered since the last call; it has to go with the step being made."""
        if not self._moves:
            return NO_SWAPS
        self._moves.sort(key=lambda move: not move.is_awaited)  # stable: out before in, as ordered
        swaps = Swaps(tuple(self._moves), tuple(self._riders))
        self._moves.clear()
        self._riders.clear()
        return swaps

    def settle(self, iteration: Iteration) -> list[Request]:
        """A step is back, so its moves have ended. The riders whose end was decided meanwhile."""
        self._put_back(iteration)
        for rider in iteration.riders:
            self._alight(rider)
            if rider.state is State.SWAPPING_OUT:
                self._ledger.host.complete(rider.request_id)
                self._ledger.leave_device(rider.request_id)
                self._pool.move(rider, Move.SETTLE)
            elif rider.state is State.SWAPPING_IN:
                self._ledger.settle(rider.request_id)
                self._pool.move(rider, Move.SETTLE)
        return [rider for rider in iteration.riders if rider.state is State.LEAVING]

    def void(self, iteration: Iteration) -> list[Request]:
        """A step failed, or will not return, and perhaps its moves were not made: riders have no
        KV any more. Those whose end was decided meanwhile."""
        self._put_back(iteration)
        for rider in iteration.riders:
            self._alight(rider)
            if rider.state is not State.LEAVING:
                self._ledger.release(rider.request_id)
                rider.land(0)
                self._pool.move(rider, Move.LOSE)
        return [rider for rider in iteration.riders if rider.state is State.LEAVING]

    def _ride(self, request: Request) -> None:
        self._riders.append(request)
        request.num_in_flight += 1

    def _alight(self, rider: Request) -> None:
        rider.num_in_flight -= 1
        self._coming.pop(rider, None)

    def _put_back(self, iteration: Iteration) -> None:
        """Host blocks that the step has read are free."""
        for move in iteration.step.moves:
            if move.direction is Direction.IN:
                blocks = array("i")
                blocks.frombytes(move.host)
                self._ledger.host.put(blocks)

    def _order(
        self,
        request: Request,
        direction: Direction,
        pairs: "BlockPairs",
        is_awaited: bool,
        now: float,
    ) -> None:
        move = BlockMove(direction, pairs.device.tobytes(), pairs.host.tobytes(), is_awaited)
        self._moves.append(move)
        self._observer.swapped(request, move, now)
