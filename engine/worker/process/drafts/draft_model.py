"""A small draft model in the worker of a larger one, which proposes tokens for speculation.

It has a KV cache of its own, of as many blocks as the model's, and uses the model's block tables:
block b has the draft model's KV of the same tokens. So the control plane counts blocks once. It
also knows for which tokens the draft model has computed KV, and sends the others' ids along
(`ProposalSpec.tokens`). KV of the draft model is neither swapped nor shared: where it is missing
or stale, proposals are worse, and the output is the same, since every draft is verified.

At the end of a step the draft model computes, for each entry with a `ProposalSpec`, the tokens that
it lacks, those that the step has accepted, and the last one; then one proposed token after another:

    pass 1    …missing tokens, accepted tokens, last token    proposes d1
    pass 2    d1                                              proposes d2
    pass k    d(k-1)                                          proposes dk

Tokens are sampled with the request's temperature, filters and random numbers, so that where both
models have similar distributions they often sample the same token.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from engine.errors import StartupError
from engine.step import SampleSpec, SamplingParams, Step, StepEntry
from engine.worker.device import Device, Progress
from engine.worker.model.kv.kv_groups import KVGroups
from engine.worker.model.layout import LayoutLimits, build_layout
from engine.worker.model.stage import Stage, put_each
from engine.worker.ports import Shard, StepLimits
from engine.worker.process.attention_choice import StageAttention, attention_specs, cached_shape
from engine.worker.process.model_build import BuiltModel, build_model, weight_bytes
from engine.worker.process.stage_kv import StageKV
from engine.worker.sampling.logits_output import LogitsOutput
from engine.worker.sampling.sampler import Sampler
from engine.worker.weights.checkpoint import Checkpoint
from engine.worker_settings import WorkerSettings

METHOD = 'the method "draft_model" of --speculative-config'


class _Row(NamedTuple):
    """An entry of the draft model's next pass; its token is proposal number `place`."""

    place: int
    entry: StepEntry
    num_left: int  # tokens to propose


@dataclass(frozen=True, slots=True)
class DraftModel:
    """Proposes tokens with a model of its own."""

    device: Device
    stage: Stage
    sampler: Sampler
    limits: LayoutLimits
    max_vocab: int  # ids below are in the vocabularies of both models
    reads_hidden = False

    def propose(
        self, step: Step, output: LogitsOutput, hidden: Tensor | None
    ) -> tuple[tuple[int, ...], ...]:
        if not step.has_proposals:
            return ()
        entries = [
            self._row(entry, sampled)
            for entry, sampled in sampled_tokens(step, output)
            if entry.proposal is not None
        ]
        rows = [_Row(place, *row) for place, row in enumerate(entries) if row is not None]
        rows.sort(key=lambda row: len(row.entry.tokens) > 1)  # decodes first
        proposals: list[list[int]] = [[] for _ in entries]
        with torch.inference_mode(), self.device.pool.awake():
            while rows:
                tokens = iter(self._pass(replace(step, entries=tuple([r.entry for r in rows]))))
                rows = [
                    self._next(row, next(tokens), proposals[row.place])
                    for row in rows
                    if row.num_left
                ]
                rows = [row for row in rows if row.num_left > 0]
        return tuple([tuple(each) for each in proposals])

    def _row(self, entry: StepEntry, sampled: Sequence[int]) -> tuple[StepEntry, int] | None:
        """The entry of the first pass, and how many tokens it proposes; None if it has none."""
        spec = entry.proposal
        assert spec is not None, "other entries have no row"
        tokens, count, sample = spec.tokens, 0, None
        if spec.num_tokens and sampled and entry.sample is not None:
            count, sample = spec.num_tokens, draft_sample(entry.sample)
            num_rejected = entry.num_drafts - (len(sampled) - 1)
            tokens += (*entry.tokens[: len(entry.tokens) - num_rejected], sampled[-1])
        if not tokens:
            return None
        known = tuple([token if token < self.max_vocab else 0 for token in tokens])
        row = StepEntry(entry.request_id, spec.start, known, entry.blocks, sample)
        return row, count

    def _next(self, row: _Row, token: int, proposals: list[int]) -> _Row:
        """Keep a proposed token, which is the input of the next pass."""
        if token >= self.max_vocab:
            return row._replace(num_left=0)
        proposals.append(token)
        entry = row.entry
        start = entry.start + len(entry.tokens)
        return row._replace(
            entry=entry._replace(start=start, tokens=(token,)), num_left=row.num_left - 1
        )

    def _pass(self, step: Step) -> tuple[int, ...]:
        """The token that each entry samples."""
        layout = build_layout(step, self.limits)
        hidden = self.stage.read(layout)
        specs = [entry.sample for entry in step.entries if entry.sample is not None]
        if not specs:
            return ()
        logits = self.stage.head(hidden)
        assert logits is not None, "a draft model has one rank"
        positions = (layout.positions[layout.sampled_rows] + 1).tolist()
        return self.sampler.sample(logits, specs, positions).tokens


def draft_sample(spec: SampleSpec) -> SampleSpec:
    """The same temperature, filters and random numbers, without what reads the output."""
    sampling = spec.sampling
    return SampleSpec(
        SamplingParams(
            sampling.temperature,
            sampling.top_p,
            sampling.top_k,
            sampling.min_p,
            seed=sampling.seed,
        )
    )


def sampled_tokens(step: Step, output: LogitsOutput) -> Iterator[tuple[StepEntry, Sequence[int]]]:
    """Each entry with its tokens in the output of `accept_drafts`: none if it failed or is late."""
    without_token = {fault.entry for fault in output.faults} | set(output.late)
    at, num_accepted = 0, iter(output.num_accepted)
    for number, entry in enumerate(step.entries):
        if entry.sample is None:
            yield entry, ()
            continue
        count = 1 + (next(num_accepted) if entry.num_drafts else 0)
        yield entry, () if number in without_token else output.tokens[at : at + count]
        at += count


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """The weights of a draft model; its KV cache is allocated once its size is known."""

    device: Device
    built: BuiltModel
    attention: StageAttention
    kv: StageKV
    num_parameters: int
    num_bytes: int  # about the size of its weights
    max_model_len: int
    max_vocab: int

    def open(self, num_blocks: int) -> DraftModel:
        """The draft model over a KV cache of so many blocks."""
        over = self.attention.over(self.kv.allocate(num_blocks))
        put = self.device.transfers().put
        vocab_size = self.kv.shard.shape.vocab_size
        return DraftModel(
            device=self.device,
            stage=Stage(self.built.model, over, put_each(put)),
            sampler=Sampler(vocab_size, self.built.operators.sampling, put),
            limits=self.kv.limits(self.max_model_len, num_blocks, num_states=0),
            max_vocab=self.max_vocab,
        )


def load_draft(
    settings: WorkerSettings,
    target: Checkpoint,
    of_target: Device,
    max_model_len: int,
    progress: Progress,
) -> LoadedDraft | None:
    """Load the draft model of the settings, if they name one, on the device `of_target`.

    Raises `StartupError` if it cannot propose tokens for `target` over `max_model_len` positions.
    """
    if not settings.draft_model:
        return None
    checkpoint = Checkpoint.open(settings.draft_model, "generate")
    _check(settings, target, checkpoint, max_model_len)
    device = of_target.beside(checkpoint.preferred_format)
    shape = replace(checkpoint.family.shape, max_positions=max_model_len)
    shape = cached_shape(shape, device, settings.kv.block_size, is_batch_invariant=False)
    shard = Shard.whole(shape)
    groups = KVGroups.of(shape)
    limits = StepLimits(  # the first pass has a token more per request than the step
        settings.max_batch_size,
        settings.max_batch_tokens + settings.max_batch_size,
        max_model_len,
    )
    specs = attention_specs(
        shard.local_shape, device.formats.dtype, limits, is_batch_invariant=False
    )
    device.prepare(progress)
    weights = checkpoint.open_weights(device.formats.dtype, progress)
    num_parameters = checkpoint.survey(weights, shard).num_parameters
    num_bytes = weight_bytes(checkpoint, device.formats, num_parameters)
    device.check_weights(num_bytes, 0)
    packed = checkpoint.packed_cache(shard, settings)
    return LoadedDraft(
        device=device,
        built=build_model(checkpoint, weights, shard, device, packed, num_bytes),
        attention=StageAttention(device, specs, settings.kv.block_size),
        kv=StageKV(device, settings, shard, groups),
        num_parameters=num_parameters,
        num_bytes=num_bytes,
        max_model_len=max_model_len,
        max_vocab=min(shape.vocab_size, target.family.shape.vocab_size),
    )


def _check(
    settings: WorkerSettings, target: Checkpoint, draft: Checkpoint, max_model_len: int
) -> None:
    """Raise `StartupError` if `draft` cannot propose tokens for `target`."""
    if settings.placement.num_workers > 1:
        raise StartupError(f"{METHOD} needs a single worker: no stages and no ranks")
    if target.pooling is not None:
        raise StartupError(f"{METHOD} needs a model that generates text")
    if draft.family.shape.recurrent_layers:
        raise StartupError(f"{METHOD} does not support the draft model: it has recurrent layers")
    for name, checkpoint in (("the model", target), ("the draft model", draft)):
        if not KVGroups.of(checkpoint.family.shape).keeps_all:
            raise StartupError(f"{METHOD} does not support {name}: it has sliding-window layers")
    positions = draft.family.shape.max_positions
    if positions < max_model_len:
        raise StartupError(
            f"the draft model has {positions} positions, fewer than the {max_model_len} that are "
            f"served; --max-model-len {positions} makes them equal"
        )
    if not _has_same_vocabulary(target, draft):
        raise StartupError(
            f"the draft model {draft.directory} has another vocabulary than {target.directory}; "
            f"{METHOD} needs the same tokenizer"
        )


def _has_same_vocabulary(one: Checkpoint, other: Checkpoint) -> bool:
    """Whether all ids mean the same; one of them may have more unused ids at the end."""
    files = [Path(each.directory) / "tokenizer.json" for each in (one, other)]
    if all(file.is_file() for file in files) and files[0].read_bytes() == files[1].read_bytes():
        return True
    mine, others = one.open_token_table(), other.open_token_table()
    pairs = zip(mine.tokens, others.tokens, strict=False)
    return dict(mine.special) == dict(others.special) and all(a == b for a, b in pairs)
