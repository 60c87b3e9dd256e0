"""The frozen words that cross to the workers and back. Standard library only.

A `Step` orders one iteration (Orca's control message): a worker that never saw a request can
run any `Step` whose KV it holds. `WorkerSettings` and `WorkerReport` open the conversation.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, NewType

RequestId = NewType("RequestId", int)
StepId = NewType("StepId", int)

HELD_TOKEN = -1  # as a token of an entry: the one that the worker sampled for it last


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a request wants its tokens drawn; the meaning of each field is OpenAI's or vLLM's.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 switch the filter off.
    Randomness is a function of `seed` and the position alone.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0

    @property
    def reads_output(self) -> bool:
        """Whether drawing looks at the tokens produced so far."""
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )


class GrammarKind(StrEnum):
    """What the text of a `Grammar` is."""

    JSON_OBJECT = "json_object"  # any JSON object; no text
    JSON_SCHEMA = "json_schema"  # a JSON schema, as JSON
    REGEX = "regex"  # a regular expression that the whole output matches
    CHOICE = "choice"  # a JSON array of strings, of which the output is one
    LARK = "lark"  # a context-free grammar in Lark's notation
    EBNF = "ebnf"  # a context-free grammar in GBNF notation (`root ::= …`)
    TAGS = "tags"  # free text with tagged parts, as JSON: see `adapters.grammar`


class Grammar(NamedTuple):
    """What an output must match, from its first token to its end token."""

    kind: GrammarKind
    text: str = ""


class Draw(NamedTuple):
    """The order to sample one token after an entry's last position.

    `prompt` and `output` are filled only where a penalty or the grammar reads them; `banned` are
    ids that may not be drawn now (end tokens before `min_tokens`). With `logprobs` the result
    tells the token's log-probability and that many likeliest tokens. Under a `grammar` the ids in
    `ends` may be drawn when it accepts the output, and are, though banned, when it allows
    nothing else; with `may_be_late` the answer may be that the grammar is not ready yet.

    Where the entry's token is `HELD_TOKEN`, `output` lacks that token, and the worker completes
    it.
    """

    sampling: Sampling
    banned: tuple[int, ...] = ()
    prompt: tuple[int, ...] = ()
    output: tuple[int, ...] = ()
    logprobs: int | None = None
    grammar: Grammar | None = None
    ends: tuple[int, ...] = ()
    may_be_late: bool = False

    @property
    def reads_output(self) -> bool:
        """Whether drawing looks at `output`."""
        return self.sampling.reads_output or self.grammar is not None


class PromptTargets(NamedTuple):
    """The order to tell how likely `ids[i]` is after an entry's `tokens[offset + i]`.

    With each comes that many (`top`) likeliest tokens.
    """

    top: int
    offset: int
    ids: tuple[int, ...]


class StepEntry(NamedTuple):
    """One request's share of an iteration: compute `tokens` at positions `start`, `start + 1`, …

    `blocks` is the request's block table as little-endian int32 (oldest block first); it covers
    at least the slots `[0, start + len(tokens))`, and slots `[0, start)` already hold KV.
    Without a `draw` the entry is a piece of a prompt and yields no token. An entry that was
    planned before its token was known has `HELD_TOKEN` as its only one.
    """

    request_id: RequestId
    start: int
    tokens: tuple[int, ...]
    blocks: bytes
    draw: Draw | None
    prompt_logprobs: PromptTargets | None = None


class Direction(StrEnum):
    """Which way KV moves between the tiers."""

    OUT = "out"  # device to host
    IN = "in"  # host to device


class BlockMove(NamedTuple):
    """The order to copy blocks between device and host, index by index.

    `device` and `host` are block numbers as little-endian int32, equally many. All moves of a step
    begin after the steps before it, and have ended when its result comes back. One that
    `is_awaited` has to end before the step computes: its entries read what comes in, or write
    where something goes out. The others touch no block of any entry, so they may run beside.
    """

    direction: Direction
    device: bytes
    host: bytes
    is_awaited: bool

    @property
    def num_blocks(self) -> int:
        return len(self.device) // 4


@dataclass(frozen=True, slots=True)
class Step:
    """One iteration over one batch; decodes come first, then prefills.

    `moves` swap KV out and in; within a step no two touch the same block, but one that is awaited
    and goes out may leave its device blocks to one that comes in after it.
    """

    step_id: StepId
    entries: tuple[StepEntry, ...]
    moves: tuple[BlockMove, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens computed by this step, over all entries."""
        return sum([len(entry.tokens) for entry in self.entries])


class TokenLogprobs(NamedTuple):
    """How likely a token was, in the model's own distribution: natural logarithms.

    That is before bias, bans, grammar, penalties and temperature. `rank` is 1 for the likeliest;
    `top` are the likeliest (id, log-probability), the best first.
    """

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


class Fault(NamedTuple):
    """Why entry number `entry` of a step has no result, though its batch mates have.

    `is_asked_for`: it follows from what the request demands, not from a fault of ours.
    """

    entry: int
    line: str
    is_asked_for: bool = False


@dataclass(frozen=True, slots=True)
class StepResult:
    """The answer to a `Step`: one token per entry with a `draw`, in the order of the entries.

    `logprobs` are per token, None where not asked for; `prompt_logprobs` per entry, one for each
    id of its targets. Both are empty where no entry asks. The tokens of `faults` mean nothing, and
    neither do those of the entries numbered in `late`, which are to be drawn again.
    """

    step_id: StepId
    tokens: tuple[int, ...]
    seconds: float
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    prompt_logprobs: tuple[tuple[TokenLogprobs, ...], ...] = ()
    faults: tuple[Fault, ...] = ()
    late: tuple[int, ...] = ()


class StepTimes(NamedTuple):
    """When one worker came how far with a step: seconds of its machine's monotonic clock.

    Hidden states were there at `data_at`, None on the first stage. A step that was never computed
    ended where it began. On a GPU, `idle` seconds lie between the end of the step before and the
    beginning of this one, in which the layers of neither were computed.
    """

    data_at: float | None
    began_at: float
    ended_at: float
    idle: float = 0.0


@dataclass(frozen=True, slots=True)
class Placement:
    """Which share of a model one worker holds: a stage (some layers) and a rank (a part of each).

    The workers of one model find each other at `rendezvous`, a "host:port" where worker 0 listens:
    on the inherited socket `listener`, a file descriptor, which only its own process may name.
    The others reach this one at `address`, and `num_neighbours` workers, this one included, share
    its machine, of which it is number `neighbour`.
    """

    stage: int = 0
    num_stages: int = 1
    rank: int = 0
    num_ranks: int = 1
    rendezvous: str = ""
    listener: int | None = None
    address: str = "127.0.0.1"
    num_neighbours: int = 1
    neighbour: int = 0

    @property
    def num_workers(self) -> int:
        return self.num_stages * self.num_ranks

    @property
    def index(self) -> int:
        """This worker among all: stage by stage, rank by rank."""
        return self.stage * self.num_ranks + self.rank

    @property
    def is_last_stage(self) -> bool:
        return self.stage == self.num_stages - 1

    @property
    def answers(self) -> bool:
        """Whether tokens come back from this worker: rank 0 of the last stage."""
        return self.is_last_stage and self.rank == 0

    def __str__(self) -> str:
        return f"stage {self.stage} rank {self.rank}"


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """What a worker needs to know to load its share of a model.

    `dtype`, `weights` (of linear layers), `kv_dtype`, `device` and `attention` may be "auto".
    `kv_slots` 0 means: as many as `kv_bytes` hold, over all workers; both 0 means: the worker
    chooses from the memory that is free. `host_kv_bytes`, over all workers too, are for KV that is
    swapped out. `threads` 0: a fair share of the cores; `thread_wait`, "spin" or "sleep", is
    what they do between kernels. `max_model_len` 0: the checkpoint's own limit. A worker that
    `traces` tells the times of each step. With `lookahead` steps may go on from tokens that
    only the workers know. With `cuda_graphs` steps of decodes alone are captured on a GPU. What is
    rounded at loading is kept in `cache_dir`; "": nowhere.
    """

    model: str
    dtype: str = "auto"
    weights: str = "auto"
    kv_dtype: str = "auto"
    device: str = "auto"
    attention: str = "auto"
    block_size: int = 16
    kv_slots: int = 0
    kv_bytes: int = 0
    host_kv_bytes: int = 0
    max_model_len: int = 0
    max_batch_tokens: int = 2048
    max_batch_size: int = 64
    threads: int = 0
    thread_wait: str = "spin"
    traces: bool = False
    lookahead: int = 0
    cuda_graphs: bool = True
    gpu_memory_utilization: float = 0.9
    cache_dir: str = ""
    placement: Placement = Placement()


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """What a worker learned while it loaded: facts about the model and the room for KV.

    `num_parameters` are the whole model's, `bytes_per_block` and `threads` the worker's own.
    `kernels` are what it computes with, for a person.
    """

    architecture: str
    num_parameters: int
    dtype: str
    device: str
    attention: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    num_blocks: int
    block_size: int
    bytes_per_block: int
    threads: int
    weights: str = "float32"
    kv_dtype: str = "float32"
    num_host_blocks: int = 0
    kernels: str = "torch"
