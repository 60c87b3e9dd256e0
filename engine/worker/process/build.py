"""Builds a worker: device, data plane, its share of the weights, KV cache."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from torch import Tensor

from engine.errors import StartupError
from engine.step import PageKind
from engine.worker.device import Device, Progress, open_device
from engine.worker.lora.loading import Loras
from engine.worker.model.kv.data_plane import DataPlane
from engine.worker.model.kv.kv_groups import KVGroups
from engine.worker.model.kv.recurrent_states import RecurrentStates
from engine.worker.model.pooler import Pooler, report_of
from engine.worker.model.stage import Stage
from engine.worker.ports import KVTensors, ModelShape, Shard, StepLimits
from engine.worker.process.attention_choice import (
    StageAttention,
    attention_specs,
    cached_shape,
)
from engine.worker.process.drafts.draft_model import load_draft
from engine.worker.process.drafts.draft_rows import LoadedDrafter
from engine.worker.process.drafts.mtp_head import check_mtp, load_mtp
from engine.worker.process.images import WorkerImages
from engine.worker.process.kept_kv import KeptKV
from engine.worker.process.model_build import (
    BuiltModel,
    ProfileRun,
    build_model,
    linear_sizes_of,
    load_loras,
    weight_bytes,
)
from engine.worker.process.parts import WorkerParts
from engine.worker.process.stage_kv import KVCounts, StageKV
from engine.worker.sampling.constraints import Constraints
from engine.worker.sampling.logits_output import FollowingReader, OutputReader, ReadsOutput
from engine.worker.sampling.sampler import Sampler
from engine.worker.weights.checkpoint import Checkpoint
from engine.worker_settings import Placement, TierReport, WorkerReport, WorkerSettings


def _served_shape(settings: WorkerSettings, checkpoint: Checkpoint, device: Device) -> ModelShape:
    """The model's shape on a device, with the context length that is served as its positions."""
    shape, pooling = checkpoint.family.shape, checkpoint.pooling
    if settings.max_model_len > shape.max_positions:
        raise StartupError(
            f"--max-model-len {settings.max_model_len} is beyond the checkpoint's "
            f"{shape.max_positions} positions"
        )
    if settings.has_mtp:
        check_mtp(settings, shape)
    usual = shape.max_positions
    if pooling is not None and pooling.max_tokens is not None:
        usual = min(usual, pooling.max_tokens)
    is_invariant, size = settings.kernels.batch_invariant, settings.kv.block_size
    shape = cached_shape(shape, device, size, is_batch_invariant=is_invariant)
    return replace(shape, max_positions=settings.max_model_len or usual)


def _join(
    shape: ModelShape, placement: Placement, device: Device
) -> tuple[Shard, DataPlane | None]:
    """This worker's shard, and its data plane if there are several workers."""
    shard = Shard.of(shape, placement, None)
    if placement.num_workers == 1:
        return shard, None
    transport = device.tensor_transport()
    plane = DataPlane.join(placement, transport)
    if placement.num_ranks == 1:
        return shard, plane
    return replace(shard, all_reduce=transport.all_reduce(placement, plane.all_reduce)), plane


def _gathering(shard: Shard, plane: DataPlane | None) -> Callable[[Tensor], Tensor | None] | None:
    """How the ranks' logits are gathered; None if one rank computes all of them."""
    if plane is None or shard.num_ranks == 1:
        return None
    ranks = (replace(shard, rank=rank) for rank in range(shard.num_ranks))
    return partial(plane.gather, widths=[len(other.vocabulary.run) for other in ranks])


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a worker computes: its device, its shard, and the connection to the other workers."""

    settings: WorkerSettings
    checkpoint: Checkpoint
    device: Device
    shape: ModelShape
    shard: Shard
    plane: DataPlane | None
    progress: Progress

    @property
    def max_model_len(self) -> int:
        return self.shape.max_positions

    def kv(self) -> StageKV:
        """The sizes of its KV cache."""
        return StageKV(self.device, self.settings, self.shard, KVGroups.of(self.shape))

    def attention(self, kv: StageKV) -> StageAttention:
        """The attention of its layers."""
        settings = self.settings
        specs = attention_specs(
            self.shard.local_shape,
            self.device.formats.dtype,
            StepLimits(settings.max_batch_size, settings.max_batch_tokens, self.max_model_len),
            is_batch_invariant=settings.kernels.batch_invariant,
            choices=settings.kernels.kernel_choices,
        )
        return StageAttention(self.device, specs, settings.kv.block_size, kv.layer_groups)


def _open_place(settings: WorkerSettings, progress: Progress, device: Device | None) -> _Place:
    checkpoint = Checkpoint.open(settings.model, settings.task, settings.mmproj)
    device = device or open_device(settings, checkpoint.preferred_format)
    shape = _served_shape(settings, checkpoint, device)
    shard, plane = _join(shape, settings.placement, device)
    shard = replace(shard, has_logits=checkpoint.pooling is None)
    return _Place(settings, checkpoint, device, shape, shard, plane, progress)


class _Loaded(NamedTuple):
    """A worker's layers, and what was counted while they were loaded."""

    built: BuiltModel
    loras: Loras
    drafter: LoadedDrafter | None
    num_parameters: int


def _load(place: _Place) -> _Loaded:
    """Load the weights of the model and of what proposes drafts."""
    settings, checkpoint, device = place.settings, place.checkpoint, place.device
    device.prepare(place.progress)
    weights = checkpoint.open_weights(device.formats.dtype, place.progress)
    num_parameters, num_mtp = checkpoint.survey(weights, place.shard, has_mtp=settings.has_mtp)
    own_bytes = weight_bytes(checkpoint, device.formats, num_parameters + num_mtp)
    own_bytes //= settings.placement.num_workers
    is_cached = checkpoint.files is not None
    idle_bytes = own_bytes * place.shape.idle_parameters // num_parameters if is_cached else 0
    device.check_weights(own_bytes, idle_bytes)
    packed = checkpoint.packed_cache(place.shard, settings)
    built = build_model(
        checkpoint, weights, place.shard, device, packed, own_bytes, has_mtp=settings.has_mtp
    )
    loras = Loras(
        built.model,
        built.operators,
        partial(linear_sizes_of, checkpoint, weights, place.shape),
        settings.max_lora_rank,
        "LoRA is not supported with --batch-invariant" if settings.kernels.batch_invariant else "",
    )
    drafter = load_mtp(settings, device, built, place.shape, num_mtp) or load_draft(
        settings, checkpoint, device, place.max_model_len, place.progress
    )
    return _Loaded(built, loras, drafter, num_parameters)


def _reader(place: _Place, built: BuiltModel, stage: Stage, sampler: Sampler) -> ReadsOutput | None:
    """What follows the layers on the last stage; None on others."""
    shard, transfers = place.shard, place.device.transfers()
    if not shard.is_last:
        return None
    if place.checkpoint.pooling is not None:
        return Pooler(place.checkpoint.pooling, built.model.features, built.head, transfers)
    share = shard.all_reduce if _shares_tokens(place) else None
    if shard.rank > 0:
        return FollowingReader(stage.head, sampler.vocab_size, transfers, share)
    constraints = Constraints(place.checkpoint.open_grammars)
    return OutputReader(stage.head, sampler, constraints, transfers, share)


def _shares_tokens(place: _Place) -> bool:
    """Whether the ranks of the only stage get the sampled tokens on their devices."""
    return place.shard.is_first and place.shard.is_last and place.device.transfers().is_async


def build_worker(
    settings: WorkerSettings, progress: Progress, device: Device | None = None
) -> WorkerParts:
    """Open the device, connect to the other workers, load the weights, allocate the KV cache.

    `progress` is called with (what, done, total); `device` overrides the settings. Raises
    `StartupError` with one readable line.
    """
    place = _open_place(settings, progress, device)
    kv, shard, plane, device = place.kv(), place.shard, place.plane, place.device
    attention = place.attention(kv)
    loaded = _load(place)
    built, drafter = loaded.built, loaded.drafter
    transfers, gather = device.transfers(), _gathering(shard, plane)
    images = WorkerImages(
        built.encoder,
        place.checkpoint.encoder,
        device.memory.zeros(1),
        reports_failures=settings.placement.returns_results,
    )

    def make_stage(cache: KVTensors, states: RecurrentStates | None) -> Stage:
        over = attention.over(kv.by_layer(cache))
        held = images if shard.is_first else None
        return Stage(built.model, over, transfers.put_inputs, gather, states, images=held)

    sampler = Sampler(place.shape.vocab_size, built.operators.sampling, transfers.put)
    run = ProfileRun(settings, shard, place.max_model_len, device, kv, make_stage, sampler)
    capacity = device.kv_capacity(run)
    if drafter is not None:
        kv = replace(kv, draft_block_bytes=drafter.kv.block_bytes)
        capacity = capacity.without(drafter.num_bytes)
    counts = kv.choose_counts(capacity, place.max_model_len, plane)
    cache, states = kv.allocate(counts.blocks), kv.states(counts.states)
    kept = KeptKV.open(settings, place.checkpoint, kv, place.max_model_len)
    limits = kv.limits(place.max_model_len, counts.blocks, counts.states)
    limits = replace(limits, pooling=place.checkpoint.pooling_method)
    stage = device.replaying(make_stage(cache, states), shard, limits, progress)
    host = kv.state_mover(kv.mover(cache, counts.host_blocks), states, counts.host_states)
    return WorkerParts(
        device=device,
        stage=stage,
        reader=_reader(place, built, stage, sampler),
        drafter=None if drafter is None else drafter.open(counts.blocks),
        mover=kept.mover(host, cache, states, transfers),
        kept=kept,
        images=images,
        loras=loaded.loras,
        limits=limits,
        report=_report(place, loaded, attention.names, kv, counts, kept, stage),
        placement=settings.placement,
        shard=shard,
        plane=plane,
        token_plane=plane if settings.lookahead and not _shares_tokens(place) else None,
    )


def _report(
    place: _Place,
    loaded: _Loaded,
    attention: str,
    kv: StageKV,
    counts: KVCounts,
    kept: KeptKV,
    stage: Stage,
) -> WorkerReport:
    """What the worker says about itself; loads the LoRA adapters of the settings."""
    device, disk, drafter = place.device, kept.disk, loaded.drafter
    return WorkerReport(
        architecture=place.checkpoint.architecture,
        num_parameters=loaded.num_parameters,
        dtype=str(device.formats.dtype).removeprefix("torch."),
        kv_dtype=str(device.formats.kv_dtype).removeprefix("torch."),
        device=device.name,
        attention=attention,
        vocab_size=place.shape.vocab_size,
        max_model_len=place.max_model_len,
        eos_token_ids=place.checkpoint.end_ids,
        num_blocks=counts.blocks,
        block_size=place.settings.kv.block_size,
        bytes_per_block=kv.block_bytes,
        threads=device.pool.threads,
        weights=device.formats.weights,
        kernels=device.kernels,
        loras=tuple(load_loras(loaded.loras, place.settings, place.progress)),
        windows=kv.groups.windows,
        num_states=counts.states,
        bytes_per_state=kv.state_bytes,
        pooling=report_of(place.checkpoint.pooling, place.shape),
        num_draft_parameters=0 if drafter is None else drafter.num_parameters,
        encoder=place.checkpoint.encoder,
        graphs=() if stage.graphs is None else stage.graphs.mixed,
        tiers=TierReport(
            num_host_blocks=counts.host_blocks,
            num_host_states=counts.host_states,
            disk_hashes=disk.hashes(PageKind.BLOCK) if disk else b"",
            disk_state_hashes=disk.hashes(PageKind.SNAPSHOT) if disk else b"",
            kv_store_keys=kept.keys,
        ),
    )
