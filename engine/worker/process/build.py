"""Builds a worker: device, data plane, its share of the weights, KV cache."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from engine.errors import StartupError
from engine.worker.device import (
    Device,
    LaunchesSteps,
    Progress,
    RankGroup,
    WholeModel,
    open_device,
)
from engine.worker.lora.loading import Loras
from engine.worker.model.kv.data_plane import DataPlane
from engine.worker.model.kv.kv_groups import KVGroups
from engine.worker.model.kv.recurrent_states import RecurrentStates
from engine.worker.model.layout import LayoutLimits
from engine.worker.model.pooler import Pooler, report_of
from engine.worker.model.stage import Stage
from engine.worker.ports import (
    BlockMover,
    KVCapacity,
    KVTensors,
    ModelShape,
    Shard,
    StepLimits,
)
from engine.worker.process.attention_choice import StageAttention, attention_specs
from engine.worker.process.drafts.draft_model import DraftModel, LoadedDraft, load_draft
from engine.worker.process.drafts.mtp_head import LoadedMtp, MtpHead, check_mtp, load_mtp
from engine.worker.process.kept_kv import KeptKV
from engine.worker.process.model_build import build_model, linear_sizes_of, load_loras
from engine.worker.process.profile_run import ProfileRun
from engine.worker.process.stage_kv import StageKV
from engine.worker.sampling.constraints import Constraints
from engine.worker.sampling.sampler import Sampler
from engine.worker.weights.checkpoint import Checkpoint
from engine.worker_settings import Placement, WorkerReport, WorkerSettings


def _served_shape(settings: WorkerSettings, checkpoint: Checkpoint) -> ModelShape:
    """The model's shape, with the context length that is served as its positions."""
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
    return replace(shape, max_positions=settings.max_model_len or usual)


def _join(
    shape: ModelShape, placement: Placement, device: Device
) -> tuple[Shard, DataPlane | None]:
    """This worker's shard, and its data plane if there are several workers."""
    shard = Shard.of(shape, placement, None)
    if placement.num_workers == 1:
        return shard, None
    plane = DataPlane.join(placement, device.tensor_transport())
    return replace(shard, all_reduce=plane.all_reduce if placement.num_ranks > 1 else None), plane


def _gathering(shard: Shard, plane: DataPlane | None) -> Callable[[Tensor], Tensor | None] | None:
    """How the ranks' logits are gathered; None if one rank computes all of them."""
    if plane is None or shard.num_ranks == 1:
        return None
    ranks = (replace(shard, rank=rank) for rank in range(shard.num_ranks))
    return partial(plane.gather, widths=[len(other.vocabulary.run) for other in ranks])


def _rank_group(shard: Shard) -> RankGroup | None:
    """The ranks that compute a step together; None if this worker computes it alone."""
    return None if shard.all_reduce is None else RankGroup(shard.rank, shard.all_reduce)


def _stage_and_launcher(
    device: Device, whole: WholeModel, shard: Shard, progress: Progress
) -> tuple[Stage, LaunchesSteps | None]:
    """The only stage of a model launches steps; one of several may replay their layers."""
    if not shard.has_logits:  # the model pools
        return whole.stage, None
    if shard.is_first and shard.is_last:
        return whole.stage, device.launcher(whole, progress)
    return device.captured(whole, shard, progress), None


def _weight_bytes(checkpoint: Checkpoint, device: Device, num_parameters: int) -> int:
    """The least memory that the whole model's weights take in the device's format."""
    if device.linear_format is not None:
        return num_parameters * int(device.linear_format.bits) // 8
    if device.weights == str(device.dtype).removeprefix("torch."):
        return num_parameters * device.dtype.itemsize
    files = checkpoint.files.files if checkpoint.files is not None else ()
    return min(num_parameters, sum(path.stat().st_size for path in files))  # 8 bits or fewer


def _beside(
    draft: LoadedDraft | LoadedMtp | None, kv: StageKV, capacity: KVCapacity
) -> tuple[StageKV, KVCapacity]:
    """The KV cache and the memory for it beside what proposes drafts, if anything does."""
    if draft is None:
        return kv, capacity
    return replace(kv, draft_block_bytes=draft.block_bytes), capacity.without(draft.num_bytes)


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """The parts of a worker. `plane` is None if it is the only worker of the model."""

    device: Device
    stage: Stage
    sampler: Sampler
    pooler: Pooler | None  # None if the model generates text
    constraints: Constraints
    mover: BlockMover
    kept: KeptKV
    launcher: LaunchesSteps | None  # None with several stages, or on the CPU
    loras: Loras
    limits: LayoutLimits
    report: WorkerReport
    placement: Placement
    shard: Shard
    plane: DataPlane | None
    lookahead: int
    draft: DraftModel | MtpHead | None


def build_worker(
    settings: WorkerSettings, progress: Progress, device: Device | None = None
) -> WorkerParts:
    """Open the device, connect to the other workers, load the weights, allocate the KV cache.

    `progress` is called with (what, done, total); `device` overrides the settings. Raises
    `StartupError` with one readable line.
    """
    checkpoint = Checkpoint.open(settings.model, settings.task)
    device = device or open_device(settings, checkpoint.preferred_format)
    shape, placement = _served_shape(settings, checkpoint), settings.placement
    max_model_len = shape.max_positions
    if shape.recurrent_layers and device.place.type != "cpu":
        raise StartupError("recurrent layers are computed on the CPU only; use --device cpu")
    shard, plane = _join(shape, placement, device)
    shard = replace(shard, has_logits=checkpoint.pooling is None)
    limits = StepLimits(settings.max_batch_size, settings.max_batch_tokens, max_model_len)
    specs = attention_specs(
        shard.local_shape,
        device.dtype,
        limits,
        is_batch_invariant=settings.kernels.batch_invariant,
        choices=settings.kernels.gemm_cache,
    )
    kv = StageKV(device, settings, shard, KVGroups.of(shape))
    attention = StageAttention(device, specs, settings.kv.block_size, kv.layer_groups)
    constraints = Constraints(checkpoint.open_grammars)

    device.prepare(progress)
    weights = checkpoint.open_weights(device.dtype, progress)
    num_parameters, num_mtp = checkpoint.survey(weights, shard, has_mtp=settings.has_mtp)
    own_bytes = _weight_bytes(checkpoint, device, num_parameters + num_mtp) // placement.num_workers
    is_cached = checkpoint.files is not None
    idle_bytes = own_bytes * shape.idle_parameters // num_parameters if is_cached else 0
    device.check_weights(own_bytes, idle_bytes)
    packed = checkpoint.packed_cache(
        shard, settings.kernels.packed_cache, settings.kernels.packed_cache_size
    )
    built = build_model(
        checkpoint, weights, shard, device, packed, own_bytes, has_mtp=settings.has_mtp
    )
    loras = Loras(
        built.model,
        built.operators,
        partial(linear_sizes_of, checkpoint, weights, shape),
        settings.max_lora_rank,
        "LoRA is not supported with --batch-invariant" if settings.kernels.batch_invariant else "",
    )

    def make_stage(cache: KVTensors, states: RecurrentStates | None) -> Stage:
        over = attention.over(kv.by_layer(cache))
        return Stage(built.model, over, device.put, _gathering(shard, plane), states)

    sampler = device.sampler(shape.vocab_size, built.operators)
    profile_run = ProfileRun(settings, shard, max_model_len, device, kv, make_stage, sampler)
    draft = load_mtp(settings, device, built, shape, num_mtp) or load_draft(
        settings, checkpoint, max_model_len, progress
    )
    capacity = device.kv_capacity(profile_run)
    kv, capacity = _beside(draft, kv, capacity)
    counts = kv.choose_counts(capacity, max_model_len, plane)
    cache, states = kv.allocate(counts.blocks), kv.states(counts.states)
    mover = kv.state_mover(kv.mover(cache, counts.host_blocks), states, counts.host_states)
    kept = KeptKV.open(settings, checkpoint, kv, max_model_len)
    disk, mover = kept.disk, kept.mover(mover, cache, states)
    whole = WholeModel(
        stage=make_stage(cache, states),
        constraints=constraints,
        sampler=sampler,
        mover=mover,
        limits=replace(
            kv.limits(max_model_len, counts.blocks, counts.states),
            pooling=checkpoint.pooling_method,
        ),
        ranks=_rank_group(shard),
    )
    stage, launcher = _stage_and_launcher(device, whole, shard, progress)
    return WorkerParts(
        device=device,
        stage=stage,
        sampler=sampler,
        pooler=Pooler.of(checkpoint.pooling, built.model.features, built.head),
        constraints=constraints,
        mover=whole.mover,
        kept=kept,
        launcher=launcher,
        loras=loras,
        limits=whole.limits,
        report=WorkerReport(
            architecture=checkpoint.architecture,
            num_parameters=num_parameters,
            dtype=str(device.dtype).removeprefix("torch."),
            kv_dtype=str(device.kv_dtype).removeprefix("torch."),
            device=device.name,
            attention=attention.names,
            vocab_size=shape.vocab_size,
            max_model_len=max_model_len,
            eos_token_ids=checkpoint.end_ids,
            num_blocks=counts.blocks,
            block_size=settings.kv.block_size,
            bytes_per_block=kv.block_bytes,
            threads=device.threads,
            weights=device.weights,
            num_host_blocks=counts.host_blocks,
            disk_hashes=b"" if disk is None else disk.blocks.hashes(),
            kv_store_keys=kept.keys,
            disk_state_hashes=disk.states.hashes() if disk and disk.states else b"",
            kernels=device.kernels,
            loras=tuple(load_loras(loras, settings, progress)),
            windows=kv.groups.windows,
            num_states=counts.states,
            num_host_states=counts.host_states,
            bytes_per_state=kv.state_bytes,
            pooling=report_of(checkpoint.pooling, shape),
            num_draft_parameters=0 if draft is None else draft.num_parameters,
        ),
        placement=placement,
        shard=shard,
        plane=plane,
        lookahead=settings.lookahead,
        draft=None if draft is None else draft.open(counts.blocks),
    )
