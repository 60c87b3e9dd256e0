"""One request: what was asked (`RequestSpec`, never changes) and how far it is (`Request`).

Theory of operation. A request waits until the ledger has room, is admitted (it holds KV), runs
in one iteration after another, and ends exactly once. Only the scheduler moves it, and only
along `TRANSITIONS`; an illegal move is our bug and changes nothing.

    WAITING ──admit──▶ READY ──plan──▶ RUNNING ──finish, fail──▶ FINISHED, FAILED
       ▲  ◀──preempt────┘ ▲             │    │
       │                  └───commit────┘    └──leave──▶ LEAVING ──finish, fail, cancel, expire──▶
       └───────────lose (worker gone)──── all but LEAVING

With a host tier a preempted request may keep its KV there. Both moves take one iteration; who
is needed in that very iteration is admitted at once, and its entry waits for the move:

    READY ──swap_out──▶ SWAPPING_OUT ──settle──▶ SWAPPED ──admit──▶ READY
      ▲                       └─────leave─────▶ LEAVING ◀──leave─┐  │
      └───────────────────────settle───────────────── SWAPPING_IN ◀─┘ swap_in

WAITING, READY and SWAPPED are cancelled at once; whoever passes its deadline ends EXPIRED in
their way.
With lookahead a RUNNING request may be planned again before the token of its first iteration is
known, and is READY when it is in no iteration any more. Whoever's end is decided while it is in
flight is LEAVING: the workers may write to its KV until its last iteration has come back, and
what that iteration sampled is dropped.

Orca calls the phases initiation and increment; we say prefill and decode.
"""

from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.errors import EngineError
    from engine.step import Grammar, RequestId, SampleSpec, SamplingParams, TokenLogprobs


class State(StrEnum):
    """Where a request is in its life. (A `StrEnum` hashes in C; this is the hottest key.)"""

    WAITING = "waiting"  # holds no KV
    READY = "ready"  # holds KV, in no iteration
    RUNNING = "running"  # in an iteration in flight, or in two
    SWAPPING_OUT = "swapping_out"  # an iteration in flight copies its KV to the host
    SWAPPED = "swapped"  # holds KV on the host only
    SWAPPING_IN = "swapping_in"  # an iteration in flight copies its KV to the device
    LEAVING = "leaving"  # its end was decided in flight; its KV returns with its last iteration
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"
    EXPIRED = "expired"

    @property
    def is_terminal(self) -> bool:
        return self in TERMINAL


TERMINAL = frozenset({State.FINISHED, State.CANCELLED, State.FAILED, State.EXPIRED})


class Move(StrEnum):
    """What can happen to a request."""

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


class Phase(Enum):
    """What the next iteration computes for a request."""

    PREFILL = "prefill"
    DECODE = "decode"


class FinishReason(Enum):
    """Why the model stopped, in OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"


class Abort(Enum):
    """Why a request was ended from outside."""

    CLIENT_GONE = "client_gone"
    STOP_STRING = "stop_string"
    EXPLICIT = "explicit"
    SLOW_CLIENT = "slow_client"
    SHUTDOWN = "shutdown"
    DEADLINE = "deadline"


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """What a caller wants: at most `max_tokens` tokens after `prompt` (ids, at least one).

    `end_ids` end the answer; before `min_tokens` tokens they may not be drawn. `label` is the
    caller's name for the request, for logs and to cancel it by. Prefixes are shared only under
    equal `salt`.

    For policies: lower `priority` goes first; tokens are counted per `tenant` (an API key), whose
    share is in proportion to `weight`. Deadlines are seconds after arrival: the first token
    should come before `ttft_deadline`; past `deadline` the request ends, whatever it has produced.
    A background request uses what the others leave, under every policy.

    `logprobs` and `prompt_logprobs` spec for log-probabilities of the output and of the prompt
    after its first token, each with that many likeliest tokens. The output matches `grammar`;
    under one, `avoided_ids` (of the `end_ids`) are drawn only when it allows nothing else.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: "SamplingParams"
    end_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    label: str = ""
    salt: str = ""
    priority: int = 0
    tenant: str = ""
    weight: float = 1.0
    ttft_deadline: float | None = None
    deadline: float | None = None
    is_background: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: "Grammar | None" = None
    avoided_ids: frozenset[int] = frozenset()


@dataclass(slots=True, eq=False)
class Request:
    """A live request. Times are seconds of the engine's clock; None until they happened."""

    request_id: "RequestId"
    spec: RequestSpec
    arrived_at: float
    state: State = State.WAITING
    output: list[int] = field(default_factory=list)
    prompt_logprobs: "list[TokenLogprobs]" = field(default_factory=list)  # if asked for
    fixed_draw: "SampleSpec | None" = None  # the draw of each of its tokens, if all are alike
    num_computed: int = 0  # tokens whose KV is on the device, or in its host copy
    num_planned: int = 0  # those, and the ones that iterations in flight compute
    num_pending: int = 0  # tokens that iterations in flight sample
    num_in_flight: int = 0  # iterations in flight that compute it, or move its KV
    num_cached: int = 0  # tokens of the prompt that were found there at first admission
    block_hashes: list[bytes] = field(default_factory=list)  # see engine.kv.prefix
    num_preemptions: int = 0  # times that its KV was given up, to be computed again
    num_swaps: int = 0  # times that its KV was swapped out
    produced_at_start: int = 0  # output when it was last given KV
    num_step_overs: int = 0  # admissions that passed it since it last waited
    num_crashes: int = 0  # worker deaths it took part in since its last token
    finish: FinishReason | None = None
    abort: Abort | None = None
    error: "EngineError | None" = None
    admitted_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    ended_at: float | None = None
    cancelled_in: int | None = None  # iterations committed when the cancel came

    def move(self, move: Move) -> State:
        """Make a legal move, and say where it led; anything else is a bug of ours."""
        to = TRANSITIONS.get((self.state, move))
        assert to is not None, f"request {self.request_id}: {move} while {self.state}"
        self.state = to
        return to

    @property
    def prompt_len(self) -> int:
        return len(self.spec.prompt)

    @property
    def produced(self) -> int:
        """Output tokens so far."""
        return len(self.output)

    @property
    def num_tokens(self) -> int:
        """Tokens known so far, prompt and output."""
        return len(self.spec.prompt) + len(self.output)

    @property
    def remaining(self) -> int:
        """Known tokens that are not in the KV cache yet; at least one while alive."""
        return len(self.spec.prompt) + len(self.output) - self.num_computed

    @property
    def unplanned(self) -> int:
        """Tokens that no iteration has computed or is computing, the pending ones included."""
        known = len(self.spec.prompt) + len(self.output)
        return known + self.num_pending - self.num_planned

    @property
    def max_slots(self) -> int:
        """Slots it may ever need: the last token of the answer is never computed."""
        return len(self.spec.prompt) + self.spec.max_tokens - 1

    @property
    def phase(self) -> Phase:
        is_decode = self.output and self.num_computed == self.num_tokens - 1
        return Phase.DECODE if is_decode else Phase.PREFILL

    @property
    def is_suspect(self) -> bool:
        """It was in the batch when a worker died, and has produced nothing since."""
        return self.num_crashes > 0

    @property
    def ending(self) -> Move:
        """How it ends, once that is decided."""
        if self.finish is not None:
            return Move.FINISH
        if self.abort is not None:
            return Move.EXPIRE if self.abort is Abort.DEADLINE else Move.CANCEL
        assert self.error is not None, f"request {self.request_id} has no reason to end"
        return Move.FAIL

    @property
    def awaits_grammar(self) -> bool:
        """Whether the worker may still have to compile its grammar: since it was last given KV it
        has produced nothing."""
        return self.spec.grammar is not None and self.produced == self.produced_at_start

    def land(self, num_computed: int) -> None:
        """It is in no iteration, and so many of its tokens are on the device."""
        self.num_computed = self.num_planned = num_computed
        self.num_pending = self.num_in_flight = 0

    @property
    def outcome(self) -> str:
        """`finished`, `cancelled`, `failed`, `expired`; a stop string is a finish like others."""
        stopped = self.abort is Abort.STOP_STRING
        return "finished" if self.finish or stopped else self.state.value

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of its prompt are still to be computed."""
        if self.spec.prompt_logprobs is None:
            return False
        return len(self.prompt_logprobs) < len(self.spec.prompt) - 1

    def tokens(self, start: int, stop: int) -> tuple[int, ...]:
        """Known token ids at positions `[start, stop)`."""
        prompt = self.spec.prompt
        if stop <= len(prompt):
            return prompt[start:stop]
        if start >= len(prompt):
            return tuple(self.output[start - len(prompt) : stop - len(prompt)])
        return prompt[start:] + tuple(self.output[: stop - len(prompt)])
