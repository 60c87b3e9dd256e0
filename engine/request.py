"""One request: what its caller requested (`RequestSpec`, constant) and its progress (`Request`), in
the states of `engine.states`.

Orca calls the phases initiation and increment; here they are prefill and decode.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from engine.errors import EngineError
from engine.lora import LoraAdapter
from engine.media import Media, Span
from engine.pooling import PoolSpec
from engine.states import TERMINAL as TERMINAL
from engine.states import TRANSITIONS as TRANSITIONS
from engine.states import Move as Move
from engine.states import State as State
from engine.step import Grammar, RequestId, SampleSpec, SamplingParams, StepId, TokenLogprobs


class FinishReason(Enum):
    """Why generation stopped, in OpenAI's words."""

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


LATE_INTERVAL = 16  # tokens; see `Samples.may_be_late`
# Requests that are ended without a pause: each takes 40 to 80 µs of the event loop
ENDS_AT_ONCE = 32


class Caching(NamedTuple):
    """What the prefix cache has of a request: blocks and states of its first `until` tokens are
    left to others (None: all), and `known_hashes` are the digests of its leading blocks as far as
    an earlier request has computed them (see `engine.kv.prefix`). They are evicted after all others
    until so many `seconds` after its arrival (see `engine.kv.retention`). Behind `checkpoints`,
    numbers of prompt tokens, other requests will probably go on. Of requests with the same `key`
    the caller expects long common prefixes (see `engine.replicas.replica`)."""

    until: int | None = None
    known_hashes: tuple[bytes, ...] = ()
    seconds: float = 0.0
    checkpoints: tuple[int, ...] = ()
    key: str = ""


CACHED = Caching()


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """What a caller requests: at most `max_tokens` tokens after `prompt` (ids, at least one).

    A token of `end_ids` ends the output; none of them is sampled before `min_tokens` tokens.
    `label` is the caller's name for the request, used in logs and to cancel it. Only requests with
    equal `salt` share prefixes.

    For policies: lower `priority` goes first; tokens are counted per `tenant` (an API key), whose
    share is proportional to `weight`; those who take turns are each a `client` (an API key, or an
    address). Deadlines are seconds after arrival: the first token should be produced before
    `ttft_deadline`; the request ends when `deadline` passes. A background request uses only what
    the others leave, under every policy. `itl_goal` is the number of seconds that an iteration in
    which it is decoded should not exceed; None: the server's goal.

    `logprobs` and `prompt_logprobs` request log-probabilities of the output, or of the prompt
    after its first token, each with that many of the most likely tokens. The output matches
    `grammar`; under one, `avoided_ids` (some of `end_ids`) are sampled only if nothing else is
    allowed. `prediction` is text that the output is expected to repeat, for speculation.

    With a `lora` all tokens are computed with this LoRA adapter. Prefixes are shared only between
    requests whose adapters have the same digest.

    With `pooling` no token is produced, `max_tokens` is 0, and the request finishes with the vector
    that its prompt is pooled into.

    Some tokens of the prompt stand for the images `media`; prefixes with them are shared only if
    the images are the same.

    The prompt begins with that of the request `behind` which it goes on, if any: an ended one of
    the same response, which is charged for it.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams
    end_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    label: str = ""
    salt: str = ""
    priority: int = 0
    tenant: str = ""
    client: str = ""
    weight: float = 1.0
    ttft_deadline: float | None = None
    deadline: float | None = None
    is_background: bool = False
    itl_goal: float | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None
    avoided_ids: frozenset[int] = frozenset()
    prediction: tuple[int, ...] = ()
    lora: LoraAdapter | None = None
    pooling: PoolSpec | None = None
    behind: "Request | None" = None
    caching: Caching = CACHED
    media: tuple[Media, ...] = ()

    @property
    def spans(self) -> tuple[Span, ...]:
        """The tokens of the prompt that stand for other content."""
        return tuple([each.span for each in self.media]) if self.media else ()

    @property
    def ends(self) -> tuple[int, ...]:
        """Where other requests will probably go on: at checkpoints, and behind images."""
        if not self.media:
            return self.caching.checkpoints
        return (*self.caching.checkpoints, *[each.end for each in self.media])

    @property
    def lora_digest(self) -> str:
        """The digest of its LoRA adapter; "" without one."""
        return "" if self.lora is None else self.lora.digest

    @property
    def retention(self) -> float:
        """Seconds after its arrival in which what it leaves in the prefix cache is evicted last."""
        return self.caching.seconds

    @property
    def is_pooling(self) -> bool:
        """Whether the prompt is pooled into a vector, and no token is produced."""
        return self.pooling is not None

    @property
    def max_slots(self) -> int:
        """Most slots it can need: the last output token's KV is never computed."""
        return len(self.prompt) + max(0, self.max_tokens - 1)

    @property
    def shared_len(self) -> int:
        """Prompt tokens of the request `behind` which it goes on."""
        return 0 if self.behind is None else self.behind.prompt_len

    @property
    def own_len(self) -> int:
        """Prompt tokens that no other request of the response is charged for."""
        return len(self.prompt) - self.shared_len


@dataclass(slots=True)
class FoundPrefix:
    """How much of a request's KV was in the cache when `engine.kv.prefix_search` last looked."""

    num_matched: int = 0  # leading blocks that were on the device
    num_evictions_seen: int = 0  # when `num_matched` was last checked: engine.kv.prefix
    num_drops_seen: int = 0  # in the tiers below, likewise
    num_reusable: int = 0  # leading blocks behind which it can start
    reusable_hashes: list[bytes] = field(default_factory=list)  # the last used of its digests
    reusable_at: tuple[int, int] | None = None  # the state for which `num_reusable` was found
    awaits_lookup: bool = False  # until a shared store has answered what it has of the prompt


@dataclass(slots=True)
class Setbacks:
    """How often a request had to wait for others, or to be computed again."""

    num_preemptions: int = 0  # times that its KV was dropped, to be recomputed
    num_swaps: int = 0  # times that its KV was swapped out
    num_step_overs: int = 0  # later requests admitted before it since it last got its KV


@dataclass(slots=True)
class Samples:
    """How the tokens of a request are sampled, as far as its worker has been told."""

    constant: SampleSpec | None = None  # if the same for all its tokens
    # How to sample a token that is not late, if the worker has its output; the same for all of
    # them, except before `min_tokens`: then it stays None
    continuing: SampleSpec | None = None
    sampled_at: StepId | None = None  # the last step that sampled it with its present KV
    produced_at_start: int = 0  # output tokens when it last got its KV
    has_slow_masks: bool = False  # a mask of its grammar, which was compiled, was late

    def may_be_late(self, index: int) -> bool:
        """Whether output token `index` of a request with a grammar may be late because of it, so
        that no iteration can be planned ahead of it. The first token after it got its KV may be,
        since the worker may have to compile the grammar; every `LATE_INTERVAL`-th, to find out
        whether masks are slow; and all if one was."""
        return self.has_slow_masks or (index - self.produced_at_start) % LATE_INTERVAL == 0

    def was_late(self, index: int) -> None:
        """The worker did not have the mask of output token `index` in time, so it got no token."""
        if index > self.produced_at_start:  # otherwise the grammar was being compiled
            self.has_slow_masks = True


@dataclass(slots=True)
class Times:
    """Seconds of the engine's clock; None until known, or if it never happens."""

    arrived_at: float
    images_wanted_at: float | None = None  # when it began to wait for its images to be encoded
    lacked_image_at: float | None = None  # when it last waited for one
    admitted_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    earlier_token_at: float | None = None  # when it had the last token before those of that moment
    ended_at: float | None = None

    @property
    def ttft(self) -> float | None:
        """Seconds from its arrival to its first token."""
        return None if self.first_token_at is None else self.first_token_at - self.arrived_at


@dataclass(slots=True, eq=False)
class Request:
    """The progress of a request. Apart from it stand its `times`, what the prefix cache had of it
    when it was last `found`, how its `samples` are taken, and what made it wait (`setbacks`)."""

    request_id: RequestId
    spec: RequestSpec
    times: Times
    state: State = State.WAITING
    output: list[int] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # if requested
    vector: bytes = b""  # the result of a pooling request, float32; empty until it has finished
    finish: FinishReason | None = None
    abort: Abort | None = None
    error: EngineError | None = None
    num_computed: int = 0  # tokens whose KV is on the device, or in its host copy
    num_planned: int = 0  # num_computed + tokens that iterations in flight compute
    num_pending: int = 0  # output tokens that iterations in flight sample
    num_drafted: int = 0  # leading tokens whose KV of the draft model is on the device
    num_in_flight: int = 0  # iterations in flight that compute it or swap its KV
    num_cached: int = 0  # prompt tokens found in the prefix cache at first admission
    num_crashes: int = 0  # worker crashes while in flight since its last token; with one, a suspect
    num_accepted_prediction: int = 0  # drafts taken from its prediction that were right
    num_rejected_prediction: int = 0
    block_hashes: list[bytes] = field(default_factory=list)  # as far as needed: engine.kv.prefix
    found: FoundPrefix = field(default_factory=FoundPrefix)
    samples: Samples = field(default_factory=Samples)
    setbacks: Setbacks = field(default_factory=Setbacks)

    def move(self, move: Move) -> State:
        """Make a move of `TRANSITIONS` and return the new state. AssertionError for any other."""
        to = TRANSITIONS.get((self.state, move))
        assert to is not None, f"request {self.request_id}: {move} while {self.state}"
        self.state = to
        return to

    @property
    def is_started(self) -> bool:
        """Whether it holds KV on the device, and its end is not decided."""
        return self.state is State.READY or self.state is State.RUNNING

    @property
    def prompt_len(self) -> int:
        return len(self.spec.prompt)

    @property
    def produced(self) -> int:
        """Output tokens so far."""
        return len(self.output)

    @property
    def num_queued(self) -> int:
        """Tokens that it adds to the queue while it waits."""
        return self.spec.own_len + len(self.output)

    @property
    def own_cached(self) -> int:
        """Tokens of `own_len` that were found in the prefix cache."""
        return max(0, self.num_cached - self.spec.shared_len)

    @property
    def num_tokens(self) -> int:
        """Tokens known so far, prompt and output."""
        return len(self.spec.prompt) + len(self.output)

    @property
    def remaining(self) -> int:
        """Known tokens whose KV is not computed yet; at least one while the request is live."""
        return len(self.spec.prompt) + len(self.output) - self.num_computed

    @property
    def unplanned(self) -> int:
        """Tokens that no iteration has computed or is computing, including pending ones."""
        known = len(self.spec.prompt) + len(self.output)
        return known + self.num_pending - self.num_planned

    @property
    def may_go_ahead(self) -> bool:
        """Whether a request in flight can be planned again: it has a next token, as far as is
        known, at a known position (behind drafts it is not)."""
        if self.unplanned < 1 or self.num_in_flight != 1 or self.state is not State.RUNNING:
            return False
        num_known = self.produced + self.num_pending
        has_mask = self.num_pending > 0 and self.spec.grammar is not None
        may_be_late = has_mask and self.samples.may_be_late(num_known - 1)
        return not may_be_late and num_known < self.spec.max_tokens

    @property
    def is_decoding(self) -> bool:
        """Whether no KV but that of its last output token is to be computed."""
        return bool(self.output) and self.num_computed == self.num_tokens - 1

    @property
    def final_move(self) -> Move:
        """The move that ends it, once its end is decided."""
        if self.finish is not None:
            return Move.FINISH
        if self.abort is not None:
            return Move.EXPIRE if self.abort is Abort.DEADLINE else Move.CANCEL
        assert self.error is not None, f"request {self.request_id} has no reason to end"
        return Move.FAIL

    def append(self, token: int) -> None:
        """Add a token to the output, which may end with it."""
        spec, output = self.spec, self.output
        output.append(token)
        if token in spec.end_ids:
            self.finish = FinishReason.STOP
        elif len(output) == spec.max_tokens:
            self.finish = FinishReason.LENGTH

    def reset_to(self, num_computed: int) -> None:
        """The request is in no iteration, and the KV of its first `num_computed` tokens is kept."""
        self.num_computed = self.num_planned = num_computed
        self.num_drafted = min(self.num_drafted, num_computed)
        self.num_pending = self.num_in_flight = 0
        self.samples.sampled_at = None  # the worker may not have its output any more

    @property
    def outcome(self) -> str:
        """`finished`, `cancelled`, `failed` or `expired`; a stop string counts as finished."""
        stopped = self.abort is Abort.STOP_STRING
        return "finished" if self.finish or stopped else self.state.value

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether requested log-probabilities of its prompt are still to be computed."""
        wants = self.spec.prompt_logprobs is not None
        return wants and len(self.prompt_logprobs) < len(self.spec.prompt) - 1

    def tokens(self, start: int, stop: int) -> tuple[int, ...]:
        """Known token ids at positions `[start, stop)`."""
        prompt = self.spec.prompt
        if stop <= len(prompt):
            return prompt[start:stop]
        if start >= len(prompt):
            return tuple(self.output[start - len(prompt) : stop - len(prompt)])
        return prompt[start:] + tuple(self.output[: stop - len(prompt)])
