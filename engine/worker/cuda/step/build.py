"""Building what runs steps: a `StepLauncher` for a whole model, or graphs for one of its stages."""

import logging
from dataclasses import replace

import torch

from engine.worker.cuda.sampling.following import FollowingReader
from engine.worker.cuda.sampling.logits_output import DeviceOutputReader
from engine.worker.cuda.sampling.sampler import DeviceSampler
from engine.worker.cuda.step.arena import StepArena
from engine.worker.cuda.step.forward import Forward
from engine.worker.cuda.step.graphs import DecodeGraphs, Layers
from engine.worker.cuda.step.kv_mover import DeviceMover
from engine.worker.cuda.step.launcher import ReadsOutput, StepLauncher
from engine.worker.cuda.step.stage_graphs import StageGraphs
from engine.worker.cuda.transfers import HostTransfer
from engine.worker.device import Progress, WholeModel
from engine.worker.model.stage import Stage
from engine.worker.ports import CapturableAttention, Shard
from engine.worker.streams import Streams
from engine.worker_settings import WorkerSettings

logger = logging.getLogger(__name__)


def make_launcher(
    streams: Streams, whole: WholeModel, settings: WorkerSettings, progress: Progress
) -> StepLauncher:
    """The launcher of a model with one stage; captures all graphs if attention supports it and
    `settings.kernels.cuda_graphs` is set. All ranks call this together."""
    stage, limits = whole.stage, whole.limits
    assert isinstance(whole.mover, DeviceMover), "a mover of this device"
    max_tokens, max_requests = settings.max_batch_tokens, settings.max_batch_size
    arena = StepArena(streams, Forward.capacity(max_tokens, max_requests))
    graphs = _graphs(streams, whole, settings, arena, None)
    if graphs is not None:
        graphs.capture(max_requests, progress)
    return StepLauncher(
        streams,
        Forward(stage.model, stage.attention, arena, graphs, limits.num_blocks),
        _reader(streams, whole),
        whole.mover,
        limits,
        has_ranks=whole.ranks is not None,
    )


def make_captured(
    streams: Streams,
    whole: WholeModel,
    shard: Shard,
    settings: WorkerSettings,
    progress: Progress,
    dtype: torch.dtype,
) -> Stage:
    """One of several stages, with graphs of its decode steps if they can be captured. All ranks of
    the stage call this together."""
    most = settings.max_batch_size
    arena = StepArena(streams, 2 * most)
    received = None
    if not shard.is_first:
        received = torch.zeros((most, shard.shape.hidden_size), dtype=dtype, device=streams.device)
    graphs = _graphs(streams, whole, settings, arena, received)
    if graphs is None:
        return whole.stage
    graphs.capture(most, progress)
    spare_block = whole.limits.num_blocks
    replayed = StageGraphs(graphs, arena, received, spare_block, is_last=shard.is_last)
    return replace(whole.stage, graphs=replayed)


def _graphs(
    streams: Streams,
    whole: WholeModel,
    settings: WorkerSettings,
    arena: StepArena,
    received: torch.Tensor | None,
) -> DecodeGraphs | None:
    """Graphs of no size yet; None if they are disabled or attention cannot be captured."""
    stage, limits = whole.stage, whole.limits
    if not settings.kernels.cuda_graphs:
        return None
    if not isinstance(stage.attention, CapturableAttention):
        name = type(stage.attention).__name__
        logger.warning("decode steps run without CUDA graphs: %s cannot be captured", name)
        return None
    layers = Layers(stage.model, stage.attention, received)
    return DecodeGraphs(streams, layers, arena, (limits.num_blocks, limits.block_size))


def _reader(streams: Streams, whole: WholeModel) -> ReadsOutput:
    """Rank 0 samples; the other ranks compute their part of the logits and get the tokens."""
    sampler, ranks = whole.sampler, whole.ranks
    assert isinstance(sampler, DeviceSampler), "a sampler of this device"
    if ranks is not None and ranks.rank > 0:
        vocab_size = sampler.vocab_size
        return FollowingReader(whole.stage.head, vocab_size, ranks.all_reduce, streams.device)
    return DeviceOutputReader(
        whole.stage.head,
        sampler,
        whole.constraints,
        HostTransfer(streams),
        None if ranks is None else ranks.all_reduce,
    )
