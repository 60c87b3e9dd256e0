"""One step as arrays: the ragged layout that every attention backend reads.

Built in numpy on the host. All indices are checked here, so a wrong step cannot access memory
outside its bounds.
"""

from dataclasses import dataclass, replace
from itertools import accumulate, chain, groupby
from typing import NamedTuple

import numpy as np

from engine.lora import NO_LORA
from engine.step import LAST_TOKEN, NO_STATE, BlockTable, StateSlots, Step, StepEntry
from engine.worker.ports import Int32s, Int64s, LoraSegment, PoolingMethod, RaggedLayout
from engine.worker.ports.layout import NONE_POOLED, EncodedRows, PooledRows

FEW_DECODES = 32  # up to so many decodes, numbers are computed faster one by one than as arrays


@dataclass(frozen=True, slots=True)
class LayoutLimits:
    """Upper bounds of the indices in a step."""

    vocab_size: int
    max_positions: int
    num_blocks: int
    block_size: int
    windows: tuple[int | None, ...] = (None,)  # one window for each layer group
    num_states: int = 0
    pooling: PoolingMethod | None = None  # how the model pools, if it does

    @property
    def keeps_all(self) -> bool:
        """Whether all layers keep the KV of all tokens."""
        return self.windows == (None,)


def blank_layout(num_rows: int, spare_block: int, block_size: int) -> RaggedLayout:
    """A layout that consists of padding rows only."""
    none, start = np.zeros(0, np.int64), np.zeros(1, np.int32)
    counts = none.astype(np.int32)
    empty = RaggedLayout(
        token_ids=none,
        last_token_rows=none,
        positions=none,
        slots=none,
        qo_indptr=start,
        kv_len=counts,
        kv_indptr=start,
        kv_indices=counts,
        kv_last_page_len=counts,
        sampled_rows=none,
        scored_rows=none,
        num_decodes=0,
        block_size=block_size,
    )
    return padded(empty, num_rows, spare_block)


def padded(layout: RaggedLayout, num_rows: int, spare_block: int) -> RaggedLayout:
    """The layout with requests of one token behind the others, up to `num_rows` rows.

    Padding rows read and write only `spare_block`, which belongs to no request, and are not
    sampled.
    """
    count = num_rows - layout.num_tokens
    assert count >= 0, "more rows than they are padded to"
    size = layout.block_size
    zeros, ones = np.zeros(count, np.int64), np.ones(count, np.int32)
    more = np.arange(1, count + 1, dtype=np.int32)
    return replace(
        layout,
        token_ids=np.concatenate((layout.token_ids, zeros)),
        positions=np.concatenate((layout.positions, zeros)),
        slots=np.concatenate((layout.slots, zeros + spare_block * size)),
        qo_indptr=np.concatenate((layout.qo_indptr, layout.qo_indptr[-1] + more)),
        kv_len=np.concatenate((layout.kv_len, ones)),
        kv_indptr=np.concatenate((layout.kv_indptr, layout.kv_indptr[-1] + more)),
        kv_indices=np.concatenate((layout.kv_indices, ones * np.int32(spare_block))),
        kv_last_page_len=np.concatenate((layout.kv_last_page_len, ones)),
        num_decodes=num_rows if layout.is_decode_only else layout.num_decodes,
        groups=tuple(padded(group, num_rows, spare_block) for group in layout.groups),
        rope_positions=None
        if layout.rope_positions is None
        else np.concatenate((layout.rope_positions, zeros)),
    )


def _indptr(lengths: Int64s) -> Int32s:
    out = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=out[1:])
    return out


class _GroupTable(NamedTuple):
    """The block tables of all entries in one layer group, and how many blocks lie before them."""

    first: Int64s
    blocks: list[bytes]


def _table_of(entries: tuple[StepEntry, ...], group: int, limits: LayoutLimits) -> _GroupTable:
    """An entry without `tables` uses its `blocks` in all groups."""
    tables = [
        entry.tables[group] if entry.tables else BlockTable(0, entry.blocks) for entry in entries
    ]
    window, size = limits.windows[group], limits.block_size
    for entry, table in zip(entries, tables, strict=True):
        needed = 0 if window is None else max(0, entry.start - window + 1)
        if not 0 <= table.first * size <= needed:
            raise ValueError(
                f"request {entry.request_id}: the table of group {group} begins with block "
                f"{table.first}, behind position {needed}, which is read"
            )
    first = np.array([table.first for table in tables], dtype=np.int64)
    return _GroupTable(first, [table.blocks for table in tables])


def _joined(entries: tuple[StepEntry, ...], blocks: list[bytes], counts: list[int]) -> Int32s:
    """The first `counts` block ids of all entries, concatenated."""
    parts = [table[: 4 * n] for table, n in zip(blocks, counts, strict=True)]
    joined = b"".join(parts)
    if len(joined) != 4 * sum(counts):
        short = next(i for i, n in enumerate(counts) if len(parts[i]) != 4 * n)
        entry = entries[short]
        raise ValueError(
            f"request {entry.request_id}: {len(parts[short]) // 4} blocks do not cover "
            f"{entry.start + len(entry.tokens)} tokens"
        )
    return np.frombuffer(joined, dtype="<i4").astype(np.int32)


def _check(name: str, values: Int64s | Int32s, limit: int) -> None:
    # As unsigned integers, negative numbers are larger than any bound.
    unsigned = values.view(np.uint64 if values.itemsize == 8 else np.uint32)
    if len(values) and int(unsigned.max()) >= limit:
        raise ValueError(f"{name} out of range [0, {limit})")


def _check_all(name: str, values: list[int], limit: int) -> None:
    if min(values) < 0 or max(values) >= limit:
        raise ValueError(f"{name} out of range [0, {limit})")


def _scored_rows(entries: tuple[StepEntry, ...], first_rows: Int32s, vocab_size: int) -> Int64s:
    rows = []
    for entry, first_row in zip(entries, first_rows.tolist(), strict=True):
        if entry.prompt_logprobs is not None:
            _, offset, ids = entry.prompt_logprobs
            if offset < 0 or offset + len(ids) > len(entry.tokens):
                raise ValueError(
                    f"request {entry.request_id}: prompt_logprobs targets exceed its tokens"
                )
            _check("targets", np.array(ids, dtype=np.int64), vocab_size)
            rows.append(np.arange(first_row + offset, first_row + offset + len(ids)))
    return np.concatenate(rows) if rows else np.zeros(0, dtype=np.int64)


def _lora_segments(entries: tuple[StepEntry, ...], first_rows: Int32s) -> tuple[LoraSegment, ...]:
    """One segment for each run of neighbouring entries with the same LoRA adapter."""
    segments, first = [], 0
    for lora_id, run in groupby(entries, lambda entry: entry.lora_id):
        last = first + sum(1 for _ in run)
        if lora_id != NO_LORA:
            segments.append(LoraSegment(lora_id, int(first_rows[first]), int(first_rows[last])))
        first = last
    return tuple(segments)


def _token_types(entries: tuple[StepEntry, ...], qo_indptr: Int32s) -> Int64s | None:
    """1 for the tokens behind the first text of a pair; None without pairs."""
    pairs = [
        (int(qo_indptr[at]) + entry.pooling.first_len, int(qo_indptr[at + 1]))
        for at, entry in enumerate(entries)
        if entry.pooling is not None and entry.pooling.first_len is not None
    ]
    if not pairs:
        return None
    types = np.zeros(int(qo_indptr[-1]), dtype=np.int64)
    for start, stop in pairs:
        types[start:stop] = 1
    return types


def _pooled(entries: tuple[StepEntry, ...], qo_indptr: Int32s, limits: LayoutLimits) -> PooledRows:
    """The rows that pooling reads of each entry with `pooling`; of a model that generates text,
    the last row of each entry with `token_ids`."""
    method = limits.pooling
    wanted = [
        at
        for at, entry in enumerate(entries)
        if entry.pooling is not None and (method is not None or entry.pooling.token_ids)
    ]
    if not wanted:
        return NONE_POOLED
    ids = [token for at in wanted if (spec := entries[at].pooling) for token in spec.token_ids]
    _check("token ids to score", np.array(ids, dtype=np.int64), limits.vocab_size)
    first, stop = qo_indptr[:-1][wanted].astype(np.int64), qo_indptr[1:][wanted].astype(np.int64)
    if method is PoolingMethod.MEAN:
        rows = np.concatenate([np.arange(*ends) for ends in zip(first, stop, strict=True)])
        return PooledRows(rows, stop - first)
    rows = first if method is PoolingMethod.CLS else stop - 1
    return PooledRows(rows, np.ones(len(rows), dtype=np.int64))


def build_layout(step: Step, limits: LayoutLimits) -> RaggedLayout:
    """The layout of a step; raises `ValueError` if an index is out of bounds."""
    entries = step.entries
    tokens = [entry.tokens for entry in entries]
    if not tokens or not all(tokens):
        raise ValueError("a step needs entries, and each entry needs tokens")
    layout = _with_groups(entries, limits)
    if any(entry.media is not None for entry in entries):
        layout = _with_media(layout, entries, limits)
    return replace(layout, states=_states(entries, limits)) if limits.num_states else layout


def _with_media(
    layout: RaggedLayout, entries: tuple[StepEntry, ...], limits: LayoutLimits
) -> RaggedLayout:
    """The layout with the rows that stand for images, and the positions that RoPE turns by."""
    encoded: list[EncodedRows] = []
    rope = layout.positions.copy()
    if any(entry.media is not None and entry.media.positions for entry in entries):
        rope = np.tile(rope, (3, 1))
    for entry, first_row in zip(entries, layout.qo_indptr.tolist(), strict=False):
        if entry.media is None:
            continue
        rows, shift, positions = entry.media
        count = len(entry.tokens)
        own = rope[..., first_row : first_row + count]
        if positions:
            own[...] = np.frombuffer(positions, dtype="<i4").reshape(3, count)
        else:
            own += shift
        for image, offset, first, length in rows:
            if min(offset, first, length) < 0 or offset + length > count:
                raise ValueError(f"request {entry.request_id}: rows of images beyond its tokens")
            encoded.append(EncodedRows(image, first_row + offset, first, length))
    _check("RoPE positions", np.ascontiguousarray(rope), limits.max_positions)
    groups = tuple(replace(group, encoded=tuple(encoded)) for group in layout.groups)
    return replace(layout, rope_positions=rope, encoded=tuple(encoded), groups=groups)


def _states(entries: tuple[StepEntry, ...], limits: LayoutLimits) -> tuple[StateSlots, ...]:
    """The state slots of all entries; an entry without any uses the first slot."""
    states = tuple(entry.state or StateSlots(0, NO_STATE) for entry in entries)
    for entry, state in zip(entries, states, strict=True):
        sources = () if state.source == NO_STATE else (state.source,)
        slots = (state.slot, *sources, *(slot for _, slot in state.snapshots))
        _check("state slots", np.array(slots, dtype=np.int64), limits.num_states)
        ends = [0, *(num_tokens for num_tokens, _ in state.snapshots), len(entry.tokens) + 1]
        if ends != sorted(set(ends)):
            raise ValueError(f"request {entry.request_id}: snapshots outside of its tokens")
    return states


def _with_groups(entries: tuple[StepEntry, ...], limits: LayoutLimits) -> RaggedLayout:
    """The layout with those of the layer groups, if there are any."""
    if limits.keeps_all and len(entries) <= FEW_DECODES and all(map(_is_plain_decode, entries)):
        return _build_decodes(entries, limits)
    if limits.keeps_all:
        return _build(entries, limits, _GroupTable(_NONE, [entry.blocks for entry in entries]))
    if not limits.windows:
        return _build(entries, limits, _table_of_step(entries, limits))
    numbers = range(len(limits.windows))
    if any(len(entry.tables) not in (0, len(numbers)) for entry in entries):
        raise ValueError(f"an entry needs {len(numbers)} block tables, one per layer group")
    tables = [_table_of(entries, number, limits) for number in numbers]
    whole = _build(entries, limits, tables[0])
    groups = (whole, *[_build(entries, limits, table) for table in tables[1:]])
    shifts = [np.repeat(table.first, np.diff(whole.qo_indptr)) for table in tables]
    return replace(
        whole,
        groups=tuple(
            replace(group, positions=group.positions - shift * limits.block_size)
            for group, shift in zip(groups, shifts, strict=True)
        ),
    )


def _table_of_step(entries: tuple[StepEntry, ...], limits: LayoutLimits) -> _GroupTable:
    """Blocks for a step of a model that keeps no KV: consecutive ones, from the first one on."""
    if any(entry.start for entry in entries):
        raise ValueError("a model that keeps no KV computes a prompt from its first token on")
    blocks, first = [], 0
    for entry in entries:
        stop = first - (-len(entry.tokens) // limits.block_size)
        blocks.append(np.arange(first, stop, dtype="<i4").tobytes())
        first = stop
    return _GroupTable(_NONE, blocks)


_NONE = np.zeros(0, dtype=np.int64)


def _is_plain_decode(entry: StepEntry) -> bool:
    """Whether the entry is one token whose hidden state is sampled, and nothing else."""
    is_sampled = entry.sample is not None and entry.prompt_logprobs is None
    return is_sampled and len(entry.tokens) == 1 and entry.pooling is None


def _build_decodes(entries: tuple[StepEntry, ...], limits: LayoutLimits) -> RaggedLayout:
    """The layout of a few entries of one token each, like `_build`."""
    size, count = limits.block_size, len(entries)
    tokens = [entry.tokens[0] for entry in entries]
    pending = [row for row, token in enumerate(tokens) if token == LAST_TOKEN]
    for row in pending:
        tokens[row] = 0
    positions = [entry.start for entry in entries]
    _check_all("token ids", tokens, limits.vocab_size)
    _check_all("positions", positions, limits.max_positions)
    num_pages = [position // size + 1 for position in positions]
    kv_indptr = [0, *accumulate(num_pages)]
    kv_indices = _joined(entries, [entry.blocks for entry in entries], num_pages)
    _check("block ids", kv_indices, limits.num_blocks)
    offsets = [position % size for position in positions]
    pages = zip(kv_indptr[1:], offsets, strict=True)  # a decode is written to its last page
    slots = [kv_indices.item(stop - 1) * size + offset for stop, offset in pages]
    longs = np.array((tokens, positions, slots), dtype=np.int64)
    ends = np.array((range(count + 1), kv_indptr), dtype=np.int32)
    lengths = np.array((positions, offsets), dtype=np.int32) + np.int32(1)
    has_loras = any(entry.lora_id for entry in entries)
    return RaggedLayout(
        token_ids=longs[0],
        last_token_rows=np.array(pending, dtype=np.int64),
        positions=longs[1],
        slots=longs[2],
        qo_indptr=ends[0],
        kv_len=lengths[0],
        kv_indptr=ends[1],
        kv_indices=kv_indices,
        kv_last_page_len=lengths[1],
        sampled_rows=np.arange(count),
        scored_rows=_NONE,
        num_decodes=count,
        block_size=size,
        lora_segments=_lora_segments(entries, ends[0]) if has_loras else (),
    )


def _build(
    entries: tuple[StepEntry, ...], limits: LayoutLimits, table: _GroupTable
) -> RaggedLayout:
    """The layout with the block tables of one layer group; positions are not shifted yet."""
    size = limits.block_size
    tokens = [entry.tokens for entry in entries]
    q_len = np.array([len(each) for each in tokens], dtype=np.int64)
    start = np.array([entry.start for entry in entries], dtype=np.int64)
    kept_from = table.first * size if len(table.first) else 0
    kv_len = start + q_len - kept_from
    num_pages = -(-kv_len // size)

    token_ids = np.array(list(chain.from_iterable(tokens)), dtype=np.int64)
    last_token_rows = np.flatnonzero(token_ids == LAST_TOKEN)
    token_ids[last_token_rows] = 0
    qo_indptr, kv_indptr = _indptr(q_len), _indptr(num_pages)
    kv_indices = _joined(entries, table.blocks, num_pages.tolist())
    positions, first_pages, num_decodes = start, kv_indptr[:-1], len(entries)
    if len(table.first):
        first_pages = first_pages - table.first
    if len(token_ids) > len(entries):
        owner = np.repeat(np.arange(len(entries)), q_len)
        positions = np.arange(len(token_ids)) - qo_indptr[owner] + start[owner]
        first_pages, num_decodes = first_pages[owner], int(np.argmax(q_len > 1))

    _check("token ids", token_ids, limits.vocab_size)
    _check("positions", positions, limits.max_positions)
    _check("block ids", kv_indices, limits.num_blocks)
    page_at, offset = np.divmod(positions, size)
    last_rows = qo_indptr[1:].astype(np.int64) - 1
    is_sampled = [entry.sample is not None for entry in entries]
    has_loras = any(entry.lora_id for entry in entries)
    return RaggedLayout(
        token_ids=token_ids,
        last_token_rows=last_token_rows,
        positions=positions,
        slots=kv_indices[first_pages + page_at] * np.int64(size) + offset,
        qo_indptr=qo_indptr,
        kv_len=kv_len.astype(np.int32),
        kv_indptr=kv_indptr,
        kv_indices=kv_indices,
        kv_last_page_len=((kv_len - 1) % size + 1).astype(np.int32),
        sampled_rows=last_rows if all(is_sampled) else last_rows[is_sampled],
        scored_rows=_scored_rows(entries, qo_indptr[:-1], limits.vocab_size),
        num_decodes=num_decodes,
        block_size=size,
        lora_segments=_lora_segments(entries, qo_indptr) if has_loras else (),
        pooled=_pooled(entries, qo_indptr, limits),
        token_types=_token_types(entries, qo_indptr),
    )
