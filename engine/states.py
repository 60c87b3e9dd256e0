"""The states of a request, and its legal moves between them.

Theory of operation. A request waits until the ledger has enough blocks, is admitted (it holds KV),
runs in one iteration after another, and ends exactly once. Only the control plane moves it, and
only along `TRANSITIONS`; an illegal move is a bug, raises AssertionError and changes nothing.

    WAITING ──admit──▶ READY ──plan──▶ RUNNING ──finish, fail──▶ FINISHED, FAILED
       ▲  ◀──preempt────┘ ▲             │    │
       │                  └───commit────┘    └──leave──▶ LEAVING ──finish, fail, cancel, expire──▶
       └───────────lose (worker gone)──── all but LEAVING

With a host tier the KV of a preempted request may be kept there. A move takes one iteration. A
request that is to run in that very iteration is admitted at once; its entry waits for the move:

    READY ──swap_out──▶ SWAPPING_OUT ──settle──▶ SWAPPED ──admit──▶ READY
      ▲                       └─────leave─────▶ LEAVING ◀──leave─┐  │
      └───────────────────────settle───────────────── SWAPPING_IN ◀─┘ swap_in

(A request whose entry does not fit into that iteration after all, and whose blocks its moves fill,
goes on from READY to SWAPPING_IN.)

Requests that are WAITING, READY or SWAPPED can be cancelled at once; a request whose deadline
passes goes the same ways and ends EXPIRED. With lookahead a RUNNING request may be planned again
before the token of its first iteration is known; it is READY when it is in no iteration any more.
A request whose end is decided while it is in flight is LEAVING: workers may write to its KV until
its last iteration has returned, and tokens sampled by then are dropped.
"""

from enum import StrEnum


class State(StrEnum):
    """State of a request. (A `StrEnum` hashes in C, and this is the most used dictionary key.)"""

    WAITING = "waiting"  # holds no KV
    READY = "ready"  # holds KV, in no iteration
    RUNNING = "running"  # in an iteration in flight, or in two
    SWAPPING_OUT = "swapping_out"  # an iteration in flight copies its KV to the host
    SWAPPED = "swapped"  # holds KV on the host only
    SWAPPING_IN = "swapping_in"  # an iteration in flight copies its KV to the device
    LEAVING = "leaving"  # its end is decided; its KV is freed when its last iteration returns
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"
    EXPIRED = "expired"

    @property
    def is_terminal(self) -> bool:
        return self in TERMINAL


TERMINAL = frozenset({State.FINISHED, State.CANCELLED, State.FAILED, State.EXPIRED})


class Move(StrEnum):
    """An event that changes a request's state."""

    ADMIT = "admit"
    PLAN = "plan"
    COMMIT = "commit"
    FINISH = "finish"
    PREEMPT = "preempt"
    SWAP_OUT = "swap_out"
    SWAP_IN = "swap_in"
    SETTLE = "settle"
    LEAVE = "leave"
    CANCEL = "cancel"
    EXPIRE = "expire"
    FAIL = "fail"
    LOSE = "lose"


TRANSITIONS: dict[tuple[State, Move], State] = {
    (State.WAITING, Move.ADMIT): State.READY,
    (State.WAITING, Move.CANCEL): State.CANCELLED,
    (State.WAITING, Move.EXPIRE): State.EXPIRED,
    (State.WAITING, Move.FAIL): State.FAILED,
    (State.READY, Move.PLAN): State.RUNNING,
    (State.READY, Move.PREEMPT): State.WAITING,
    (State.READY, Move.CANCEL): State.CANCELLED,
    (State.READY, Move.EXPIRE): State.EXPIRED,
    (State.READY, Move.FAIL): State.FAILED,
    (State.READY, Move.LOSE): State.WAITING,
    (State.READY, Move.SWAP_OUT): State.SWAPPING_OUT,
    (State.READY, Move.SWAP_IN): State.SWAPPING_IN,
    (State.SWAPPING_OUT, Move.SETTLE): State.SWAPPED,
    (State.SWAPPING_OUT, Move.LEAVE): State.LEAVING,
    (State.SWAPPING_OUT, Move.LOSE): State.WAITING,
    (State.SWAPPED, Move.ADMIT): State.READY,
    (State.SWAPPED, Move.SWAP_IN): State.SWAPPING_IN,
    (State.SWAPPED, Move.CANCEL): State.CANCELLED,
    (State.SWAPPED, Move.EXPIRE): State.EXPIRED,
    (State.SWAPPED, Move.FAIL): State.FAILED,
    (State.SWAPPED, Move.LOSE): State.WAITING,
    (State.SWAPPING_IN, Move.SETTLE): State.READY,
    (State.SWAPPING_IN, Move.LEAVE): State.LEAVING,
    (State.SWAPPING_IN, Move.LOSE): State.WAITING,
    (State.RUNNING, Move.PLAN): State.RUNNING,
    (State.RUNNING, Move.COMMIT): State.READY,
    (State.RUNNING, Move.LEAVE): State.LEAVING,
    (State.RUNNING, Move.FINISH): State.FINISHED,
    (State.RUNNING, Move.FAIL): State.FAILED,
    (State.RUNNING, Move.LOSE): State.WAITING,
    (State.LEAVING, Move.FINISH): State.FINISHED,
    (State.LEAVING, Move.FAIL): State.FAILED,
    (State.LEAVING, Move.CANCEL): State.CANCELLED,
    (State.LEAVING, Move.EXPIRE): State.EXPIRED,
}
