"""The frozen messages between the control plane and the workers. Standard library only.

A `Step` describes one iteration (Orca's control message). A worker that holds the KV blocks of a
step can run it; only the output of a request, which penalties and grammars read, is remembered by
the worker from step to step (`SampleSpec.continues`).
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, NewType

from engine.lora import NO_LORA
from engine.media import EncoderWork, EntryMedia
from engine.pooling import PoolSpec

RequestId = NewType("RequestId", int)
StepId = NewType("StepId", int)

HASH_BYTES = 16  # the length of a KV block's hash
HASH_VERSION = 2  # changes when the same content gets another hash (`engine.kv.prefix`)
LAST_TOKEN = -1  # in `StepEntry.tokens`: the last token that the worker sampled for the request
NO_STATE = -1  # in `StateSlots.source`: zeros
OUTPUT_KEPT_STEPS = 64  # a worker remembers an output so many steps after it was last needed


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of a request; each field means what it means in OpenAI's API or vLLM.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 switch the filter off.
    The random number of a token depends on `seed` and the token's position only.
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
        """Whether sampling depends on the output tokens so far (penalties)."""
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )


class GrammarKind(StrEnum):
    """The language of a `Grammar`'s text."""

    JSON_OBJECT = "json_object"  # any JSON object; no text
    JSON_SCHEMA = "json_schema"  # a JSON schema, as JSON
    REGEX = "regex"  # a regular expression that the whole output matches
    CHOICE = "choice"  # a JSON array of strings, of which the output is one
    LARK = "lark"  # a context-free grammar in Lark's notation
    EBNF = "ebnf"  # a context-free grammar in GBNF notation (`root ::= …`)
    TAGS = "tags"  # free text with tagged parts, as JSON: see `adapters.grammar`


class Grammar(NamedTuple):
    """A constraint that the whole output must match, from its first token to its end token."""

    kind: GrammarKind
    text: str = ""


class SampleSpec(NamedTuple):
    """How to sample one token after an entry's last position.

    `prompt`, `output` and `grammar` are given only where a penalty or the grammar reads the output
    so far. An entry that `continues` gives none of them: the worker takes them from the request's
    last entry that sampled, which was at most `OUTPUT_KEPT_STEPS` steps before and is followed by
    no loss of KV, and appends the entry's one token to the output.

    `banned` are token ids that must not be sampled now (end tokens before `min_tokens`). `logprobs`
    requests the token's log-probability and that many of the most likely tokens. Under a grammar,
    `end_ids` are allowed once the grammar accepts the output; if it allows nothing else, they are
    allowed even if banned. With `may_be_late` the worker may report the entry as late because the
    grammar is still being compiled.
    """

    sampling: SamplingParams
    banned: tuple[int, ...] = ()
    prompt: tuple[int, ...] = ()
    output: tuple[int, ...] = ()
    logprobs: int | None = None
    grammar: Grammar | None = None
    end_ids: tuple[int, ...] = ()
    may_be_late: bool = False
    continues: bool = False

    @property
    def reads_output(self) -> bool:
        """Whether sampling reads the output so far."""
        return self.continues or self.sampling.reads_output or self.grammar is not None


class PromptTargets(NamedTuple):
    """Prompt log-probabilities to compute: of `ids[i]` after the entry's `tokens[offset + i]`.

    The result has the log-probability of each id and the `top` most likely tokens beside it.
    """

    top: int
    offset: int
    ids: tuple[int, ...]


class BlockTable(NamedTuple):
    """The blocks of a request in one layer group, as little-endian int32, oldest block first.

    The first `first` blocks of the request are not in it: they lie before the group's window.
    """

    first: int
    blocks: bytes


class Snapshot(NamedTuple):
    """The state after the first `num_tokens` tokens of an entry is also written to a slot."""

    num_tokens: int
    slot: int


class StateSlots(NamedTuple):
    """Where an entry reads and writes the states of recurrent layers.

    They are read from slot `source` (`NO_STATE`: zeros) before the first token, and written to slot
    `slot` after the last one. An entry with drafts has a snapshot after each of its tokens but the
    last, from which the request goes on behind its last accepted token.
    """

    slot: int
    source: int
    snapshots: tuple[Snapshot, ...] = ()


class ProposalSpec(NamedTuple):
    """What the draft model does for an entry once the step has sampled: it proposes `num_tokens`
    tokens that may follow the entry's last token.

    Before, it computes `tokens`: those from position `start` on whose KV it does not have yet. If
    `num_tokens` is 0, it does nothing else. Otherwise they reach up to the entry's `start`, and
    `blocks` covers `num_tokens` slots more than the entry's own tokens need.
    """

    num_tokens: int
    start: int
    tokens: tuple[int, ...] = ()


class StepEntry(NamedTuple):
    """One request's share of an iteration: compute `tokens` at positions `start`, `start + 1`, …

    `blocks` is the request's block table as little-endian int32 (oldest block first); it covers
    at least the slots `[0, start + len(tokens))`, and slots `[0, start)` already hold KV. For a
    model whose layers do not all keep all their KV (`WorkerReport.windows`), `blocks` is empty and
    `tables` has a table for each layer group, which covers at least the slots from the first
    token's window on. `state` is given for a model with recurrent layers.
    With `sample` None the entry is a chunk of a prompt and samples no token; otherwise one token
    is sampled after the entry's last position. With `pooling` the entry ends a prompt whose hidden
    states are pooled into a vector, and `sample` is None. An entry that was planned before its
    input token was known (lookahead) has `LAST_TOKEN` as its only token.

    Speculation: the last `num_drafts` of a decode's `tokens` are drafts, `(last, d1, …, dk)`. Each
    of the k + 1 rows is computed and sampled like a decode of its own, as if the drafts before it
    were the output. Tokens are accepted as long as the token sampled by the row before equals the
    draft; the first one that differs is the last token of the entry. So the output is the same
    with and without drafts. `sample` holds for all rows: they have the same `banned`. With
    `proposal`, the worker's draft model proposes drafts for the request's next entry.

    A request with images has `media`, unless its positions are those of text and no token of the
    entry stands for an image.
    """

    request_id: RequestId
    start: int
    tokens: tuple[int, ...]
    blocks: bytes
    sample: SampleSpec | None
    prompt_logprobs: PromptTargets | None = None
    num_drafts: int = 0
    lora_id: int = NO_LORA
    tables: tuple[BlockTable, ...] = ()
    pooling: PoolSpec | None = None
    state: StateSlots | None = None
    proposal: ProposalSpec | None = None
    media: EntryMedia | None = None

    @property
    def is_decode(self) -> bool:
        """Whether every row of the entry is computed like the decode of one token."""
        return len(self.tokens) == 1 + self.num_drafts


class Direction(StrEnum):
    """Direction of a KV swap."""

    OUT = "out"  # device to host
    IN = "in"  # host to device


class Tier(StrEnum):
    """Where KV lies that is not on the device."""

    HOST = "host"
    DISK = "disk"
    STORE = "store"  # shared with other servers


class PageKind(StrEnum):
    """What a page holds. Pages of one kind have the same size and are numbered together."""

    BLOCK = "block"  # the KV of a run of tokens, in one layer group
    SNAPSHOT = "snapshot"  # the states of all recurrent layers after some tokens


class Page(NamedTuple):
    """A page on the device."""

    kind: PageKind
    number: int


class BlockMove(NamedTuple):
    """A copy of pages of a kind between device and a tier below: `device[i]` to or from `host[i]`.

    `device` and `host` are page numbers as little-endian int32, equally many; those of `host`
    count the pages of this kind in `tier`. On disk each copy is stored with its content's hash, and
    read only if it has this hash: `hashes` has them, `HASH_BYTES` each. The copy starts after the
    steps before it and has ended when the step's result is returned. If `is_awaited`,
    it must end before the step computes, since an entry reads the blocks that are swapped in or
    overwrites the blocks that are swapped out. All other moves write no block that an entry reads
    or writes, and read none that an entry writes, so they may run in parallel with the compute.
    (They may read what entries read too: blocks of a prefix that a request which is swapped out
    shares with one that runs, for example.)
    """

    direction: Direction
    device: bytes
    host: bytes
    is_awaited: bool
    tier: Tier = Tier.HOST
    hashes: bytes = b""
    kind: PageKind = PageKind.BLOCK

    @property
    def num_blocks(self) -> int:
        return len(self.device) // 4


@dataclass(frozen=True, slots=True)
class Step:
    """One iteration over one batch; `entries` has the decodes first, then the prefills.

    The slices in `encodes` are computed before any entry; the images in `dropped` are forgotten,
    with their pixels and what was computed of them, before that.

    `moves` copy KV between the tiers. No two moves of a step touch the same block, with two
    exceptions: an awaited move in may use the device blocks of an awaited move out that precedes
    it, and a device block may be saved in two tiers. A step without entries only makes its moves
    and computes slices of images.
    """

    step_id: StepId
    entries: tuple[StepEntry, ...]
    moves: tuple[BlockMove, ...] = ()
    encodes: tuple[EncoderWork, ...] = ()
    dropped: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens computed by this step, over all entries."""
        return sum([len(entry.tokens) for entry in self.entries])

    @property
    def is_ahead(self) -> bool:
        """Whether it was planned before all of its input tokens were known."""
        return (LAST_TOKEN,) in [entry.tokens for entry in self.entries]

    @property
    def has_drafts(self) -> bool:
        """Whether any entry has drafts."""
        return sum([entry.num_drafts for entry in self.entries]) > 0

    @property
    def has_proposals(self) -> bool:
        """Whether the draft model has anything to do."""
        return any(entry.proposal is not None for entry in self.entries)


class TokenLogprobs(NamedTuple):
    """Log-probability (natural) of a token in the model's unmodified distribution.

    Bias, bans, grammar, penalties and temperature are not applied. `rank` is 1 for the most likely
    token; `top` lists the most likely tokens as (id, log-probability), best first.
    """

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


class Fault(NamedTuple):
    """The error of entry number `entry` of a step; the other entries have their results.

    `is_caller_error`: the request's own parameters cause it (bans, grammar), not the model.
    """

    entry: int
    message: str
    is_caller_error: bool = False


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a `Step`: one token per entry with a `sample`, in the order of the entries, and
    one more for each accepted draft. `num_accepted` has the number of accepted drafts of each entry
    with drafts.

    `logprobs` has one item per token, None where not requested; `prompt_logprobs` one tuple per
    entry, with one item per target id. Both are empty if no entry requests any. The tokens of
    entries in `faults` are meaningless. So are those of the entries numbered in `late`: their
    last token has to be computed again in a later step. `seconds` is the worker's own time.
    `unread` are device pages that moves from the disk or a store could not fill. `vectors` has one
    vector for each entry with `pooling`, in their order, as little-endian float32. `proposals` has
    the proposed tokens of each entry with `proposal`; `proposal_seconds`, a part of `seconds`, is
    the draft model's time, and `encoder_seconds`, another part, that of the slices in `encodes`.
    `failed_images` could not be encoded, so that the tokens of requests with them are meaningless.
    """

    step_id: StepId
    tokens: tuple[int, ...]
    seconds: float
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    prompt_logprobs: tuple[tuple[TokenLogprobs, ...], ...] = ()
    faults: tuple[Fault, ...] = ()
    late: tuple[int, ...] = ()
    num_accepted: tuple[int, ...] = ()
    unread: tuple[Page, ...] = ()
    vectors: tuple[bytes, ...] = ()
    proposals: tuple[tuple[int, ...], ...] = ()
    proposal_seconds: float = 0.0
    encoder_seconds: float = 0.0
    failed_images: tuple[int, ...] = ()


class StepTimes(NamedTuple):
    """Timestamps of one step on one worker, in seconds of the machine's monotonic clock.

    `data_at`: hidden states were received, None on the first stage. A step that was not computed
    has `ended_at` equal to `began_at`. On a GPU, `idle` is the time in seconds between the end of
    the previous step's layers and the beginning of this step's.
    """

    data_at: float | None
    began_at: float
    ended_at: float
    idle: float = 0.0
