"""Building a `StepLauncher`: input arena, CUDA graphs, sampler, transfers."""

from engine.worker.cuda.sampling.logits_output import DeviceOutputReader
from engine.worker.cuda.sampling.sampler import DeviceSampler
from engine.worker.cuda.step.arena import StepArena
from engine.worker.cuda.step.forward import Forward
from engine.worker.cuda.step.graphs import DecodeGraphs, Layers
from engine.worker.cuda.step.kv_mover import DeviceMover
from engine.worker.cuda.step.launcher import StepLauncher
from engine.worker.cuda.transfers import HostTransfer
from engine.worker.device import Progress, WholeModel
from engine.worker.ports import CapturableAttention
from engine.worker.streams import Streams
from engine.worker_settings import WorkerSettings


def make_launcher(
    streams: Streams, whole: WholeModel, settings: WorkerSettings, progress: Progress
) -> StepLauncher:
    """The launcher; captures all graphs if attention supports it and `settings.cuda_graphs` is
    set."""
    stage, limits = whole.stage, whole.limits
    assert isinstance(whole.mover, DeviceMover), "a mover of this device"
    assert isinstance(whole.sampler, DeviceSampler), "a sampler of this device"
    max_tokens, max_requests = settings.max_batch_tokens, settings.max_batch_size
    arena = StepArena(streams, Forward.capacity(max_tokens, max_requests))
    spare_block = limits.num_blocks
    graphs = None
    if settings.cuda_graphs and isinstance(stage.attention, CapturableAttention):
        layers = Layers(stage.model, stage.attention)
        graphs = DecodeGraphs(streams, layers, arena, (spare_block, limits.block_size))
        graphs.capture(max_requests, progress)
    return StepLauncher(
        streams,
        Forward(stage.model, stage.attention, arena, graphs, spare_block),
        DeviceOutputReader(stage.head, whole.sampler, whole.constraints, HostTransfer(streams)),
        whole.mover,
        limits,
    )
