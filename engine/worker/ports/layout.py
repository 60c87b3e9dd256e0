"""The index arrays of one step, which every attention backend reads."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.step import StateSlots

Int64s = NDArray[np.int64]
Int32s = NDArray[np.int32]


class LoraSegment(NamedTuple):
    """Rows `[start, stop)` of a step, which are computed with one LoRA adapter."""

    lora_id: int
    start: int
    stop: int


class PooledRows(NamedTuple):
    """The rows of a step that are pooled, and how many of them each pooled entry has. Of a model
    that generates text: the rows after which the log-probabilities of given tokens are computed."""

    rows: Int64s
    counts: Int64s


class EncodedRows(NamedTuple):
    """Rows `[start, start + num_rows)` of a step, which stand for rows of an image's encoding from
    `first` on."""

    image: int
    start: int
    first: int
    num_rows: int


NONE_POOLED = PooledRows(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))


@dataclass(frozen=True, slots=True)
class RaggedLayout:
    """T new tokens of N requests; the first `num_decodes` requests have one new token each.

    Requests lie one after the other, decodes first. Names and meaning of the index arrays are
    FlashInfer's. `kv_len[i]` is the number of tokens of request i in the cache after this step.
    Its pages are `kv_indices[kv_indptr[i]:kv_indptr[i + 1]]`, and the last page is filled up to
    `kv_last_page_len[i]`.

    If layers keep different parts of their KV, `groups` has a layout for each layer group. In it
    a request's positions count from the first token whose KV the group still has.
    """

    token_ids: Int64s  # [T], 0 in `last_token_rows` until they are filled in
    last_token_rows: Int64s  # [H], rows of `LAST_TOKEN` in the order of the entries
    positions: Int64s  # [T]
    slots: Int64s  # [T], page * block_size + offset
    qo_indptr: Int32s  # [N + 1]
    kv_len: Int32s  # [N]
    kv_indptr: Int32s  # [N + 1]
    kv_indices: Int32s  # [kv_indptr[N]]
    kv_last_page_len: Int32s  # [N]
    sampled_rows: Int64s  # [M], row of the last token of each entry that samples a token
    scored_rows: Int64s  # [P], row before each prompt token whose log-probability is requested
    num_decodes: int
    block_size: int
    lora_segments: tuple[LoraSegment, ...] = ()  # ascending; rows in none use no adapter
    groups: tuple["RaggedLayout", ...] = ()
    states: tuple[StateSlots, ...] = ()  # one per request, of a model with recurrent layers
    pooled: PooledRows = NONE_POOLED
    token_types: Int64s | None = None  # [T], 1 in the second text of a pair; None: all 0
    rope_positions: Int64s | None = None  # [T], or [3, T] beside images; None: `positions`
    encoded: tuple[EncodedRows, ...] = ()

    def of_group(self, group: int) -> "RaggedLayout":
        """What the attention of a layer group is planned with."""
        return self.groups[group] if self.groups else self

    @property
    def num_requests(self) -> int:
        return len(self.kv_len)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def is_decode_only(self) -> bool:
        return self.num_decodes == self.num_requests
