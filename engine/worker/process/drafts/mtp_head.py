"""Drafts from a model's own layer for multi-token prediction (`MtpModel`), in the same worker.

The layer reads the final hidden states of the model's rows. They are kept until proposals for the
request are wanted, which may be many steps later:

    step         rows of positions 4 5 6, sampled token t7     kept: rows 4 5 6, next t5 t6 t7
    proposals    pass 1: rows 4 5 6 proposes t8, pass 2: row 7 (its own output, t8) proposes t9, …

Its KV is that of a draft model: in a cache of its own, over the model's block tables, neither
swapped nor saved. Rows that were not kept (a reused prefix, a long prompt) leave stale KV, so
proposals are worse; the output is the same, since every draft is verified.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from engine.errors import StartupError
from engine.step import RequestId, Step, StepEntry
from engine.worker.device import Device
from engine.worker.model.kv.kv_groups import KVGroups
from engine.worker.model.layout import LayoutLimits, build_layout
from engine.worker.ports import (
    AttentionBackend,
    ModelShape,
    MtpModel,
    StageModel,
    StepContext,
    StepLimits,
)
from engine.worker.process.attention_choice import StageAttention, attention_specs
from engine.worker.process.drafts.draft_model import draft_sample, sampled_tokens
from engine.worker.process.model_build import BuiltModel
from engine.worker.process.stage_kv import StageKV
from engine.worker.sampling.logits_output import LogitsOutput
from engine.worker.sampling.sampler import Sampler
from engine.worker.weights.checkpoint import mtp_shard
from engine.worker_settings import WorkerSettings

METHOD = 'the method "mtp" of --speculative-config'
MAX_ROWS = 1024  # rows that are kept for a request


@dataclass(slots=True)
class _KeptRows:
    """Rows of a request that the layer has not computed, at positions from `first` on. The next
    token of the last row may be unknown."""

    first: int
    hidden: list[Tensor] = field(default_factory=list)  # [rows, hidden] each
    next_ids: list[int] = field(default_factory=list)
    num_rows: int = 0

    def add(self, hidden: Tensor, next_ids: Sequence[int]) -> None:
        self.hidden.append(hidden.clone())
        self.next_ids += next_ids
        self.num_rows += len(hidden)
        if self.num_rows > MAX_ROWS:
            self.drop(self.num_rows - MAX_ROWS)

    def drop(self, count: int) -> None:
        """Drop the first rows."""
        self.hidden = [torch.cat(self.hidden)[count:]]
        del self.next_ids[:count]
        self.first, self.num_rows = self.first + count, self.num_rows - count


class _Row(NamedTuple):
    """An entry of the layer's next pass; its token is proposal number `place`."""

    place: int
    entry: StepEntry
    features: Tensor  # [entry's tokens, hidden]
    num_left: int  # tokens to propose


@dataclass(frozen=True, slots=True)
class MtpHead:
    """Proposes tokens with the model's layer for multi-token prediction."""

    device: Device
    model: StageModel
    mtp: MtpModel
    attention: AttentionBackend
    sampler: Sampler
    limits: LayoutLimits
    step_limits: StepLimits
    reads_hidden = True
    _kept: OrderedDict[RequestId, _KeptRows] = field(
        default_factory=OrderedDict
    )  # least recent first

    def propose(
        self, step: Step, output: LogitsOutput, hidden: Tensor | None
    ) -> tuple[tuple[int, ...], ...]:
        assert hidden is not None, "the step was computed"
        with torch.inference_mode(), self.device.pool.awake():
            found = list(sampled_tokens(step, output))
            self._keep_rows(found, hidden)
            if not step.has_proposals:
                return ()
            wanted = [pair for pair in found if pair[0].proposal is not None]
            proposals: list[list[int]] = [[] for _ in wanted]
            rows = self._first_rows(wanted)
            while rows:
                rows.sort(key=lambda row: len(row.entry.tokens) > 1)  # decodes first
                rows = self._pass(replace(step, entries=tuple([r.entry for r in rows])), rows)
                for row in rows:
                    proposals[row.place].append(row.entry.tokens[0])
                rows = [row for row in rows if row.num_left]
        return tuple([tuple(each) for each in proposals])

    def _keep_rows(self, found: Sequence[tuple[StepEntry, Sequence[int]]], hidden: Tensor) -> None:
        """Keep the rows of a step whose tokens are part of their request."""
        at = 0
        for entry, sampled in found:
            rows = hidden[at : at + len(entry.tokens)]
            at += len(entry.tokens)
            if entry.sample is not None and not sampled:  # a row that failed, or is late
                self._kept.pop(entry.request_id, None)
                continue
            tokens = entry.tokens[: len(sampled)] if entry.num_drafts else entry.tokens
            kept = self._kept.get(entry.request_id)
            if kept is None or kept.first + kept.num_rows != entry.start:
                kept = self._kept[entry.request_id] = _KeptRows(entry.start)
            elif len(kept.next_ids) < kept.num_rows:
                kept.next_ids.append(tokens[0])
            kept.add(rows[: len(tokens)], (*tokens[1:], *sampled[-1:]))
            self._kept.move_to_end(entry.request_id)
        while len(self._kept) > 2 * self.step_limits.max_requests:
            self._kept.popitem(last=False)

    def _first_rows(self, wanted: Sequence[tuple[StepEntry, Sequence[int]]]) -> list[_Row]:
        """The rows of the first pass, as many tokens as a step may have."""
        rows, left = [], self.step_limits.max_tokens
        for place, (entry, sampled) in enumerate(wanted):
            spec, kept = entry.proposal, self._kept.get(entry.request_id)
            assert spec is not None, "others want no proposals"
            if kept is None or not kept.next_ids:
                continue
            count = len(kept.next_ids)
            if not spec.num_tokens:
                count = min(count, len(spec.tokens))
            num_left = spec.num_tokens if sampled and count <= left else 0
            count = min(count, left)
            if not count:
                continue
            left -= count
            sample = draft_sample(entry.sample) if num_left and entry.sample is not None else None
            ids = tuple(kept.next_ids[:count])
            row = StepEntry(entry.request_id, kept.first, ids, entry.blocks, sample)
            features = self.model.features(torch.cat(kept.hidden)[:count])
            rows.append(_Row(place, row, features, num_left))
            kept.drop(count)
        return rows

    def _pass(self, step: Step, rows: Sequence[_Row]) -> list[_Row]:
        """Compute rows; returns those of the next pass, whose token is the proposed one."""
        layout = build_layout(step, self.limits)
        self.attention.plan(layout)
        put, numbers = self.device.transfers().put, layout.sampled_rows
        context = StepContext(
            put(layout.positions),
            self.attention,
            None if len(numbers) in (0, layout.num_tokens) else put(numbers),
        )
        features = torch.cat([row.features for row in rows]).to(self.device.formats.dtype)
        hidden = self.mtp.layers(put(layout.token_ids), features, context)
        sampling = [row for row in rows if row.entry.sample is not None]
        if not sampling:
            return []
        specs = [row.entry.sample for row in sampling if row.entry.sample is not None]
        positions = (layout.positions[layout.sampled_rows] + 2).tolist()
        tokens = self.sampler.sample(self.mtp.logits(hidden), specs, positions).tokens
        following = self.mtp.features(hidden)
        return [
            _Row(
                row.place,
                row.entry._replace(start=row.entry.start + len(row.entry.tokens), tokens=(token,)),
                following[number : number + 1],
                row.num_left - 1,
            )
            for number, (row, token) in enumerate(zip(sampling, tokens, strict=True))
        ]


@dataclass(frozen=True, slots=True)
class LoadedMtp:
    """The layer's weights; its KV cache is allocated once its size is known."""

    device: Device
    built: BuiltModel
    mtp: MtpModel
    attention: StageAttention
    kv: StageKV
    step_limits: StepLimits
    num_parameters: int  # parameters in what a proposal computes: the layer and the head
    num_bytes: int = 0  # they are counted with the model

    def open(self, num_blocks: int) -> MtpHead:
        """The head over a KV cache of so many blocks."""
        put = self.device.transfers().put
        return MtpHead(
            self.device,
            self.built.model,
            self.mtp,
            self.attention.over(self.kv.allocate(num_blocks)),
            Sampler(self.kv.shard.shape.vocab_size, self.built.operators.sampling, put),
            self.kv.limits(self.step_limits.max_model_len, num_blocks, num_states=0),
            self.step_limits,
        )


def check_mtp(settings: WorkerSettings, shape: ModelShape) -> None:
    """Raise `StartupError` if the layer cannot propose tokens for a model of this shape."""
    if settings.placement.num_workers > 1:
        raise StartupError(f"{METHOD} needs a single worker: no stages and no ranks")
    if not KVGroups.of(shape).keeps_all:
        raise StartupError(f"{METHOD} does not support models with sliding-window layers")


def load_mtp(
    settings: WorkerSettings,
    device: Device,
    built: BuiltModel,
    shape: ModelShape,
    num_parameters: int,
) -> LoadedMtp | None:
    """The layer with its attention, if it was built; `shape` is the model's, with the positions
    that are served, and `num_parameters` is the size of the layer."""
    if built.mtp is None:
        return None
    shard = mtp_shard(shape)
    limits = StepLimits(
        settings.max_batch_size,
        settings.max_batch_tokens + settings.max_batch_size,
        shape.max_positions,
    )
    specs = attention_specs(
        shard.local_shape, device.formats.dtype, limits, is_batch_invariant=False
    )
    return LoadedMtp(
        device,
        built,
        built.mtp,
        StageAttention(device, specs, settings.kv.block_size),
        StageKV(device, settings, shard, KVGroups.of(shard.shape)),
        limits,
        num_parameters + shape.vocab_size * shape.hidden_size,
    )
