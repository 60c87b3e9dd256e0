"""Captures the steps of a stage as CUDA graphs."""

import logging
from dataclasses import replace

from torch import Tensor

from engine.worker.cuda.step.arena import StepArena
from engine.worker.cuda.step.graphs import GraphSizes, Layers, StepGraphs
from engine.worker.device import Progress
from engine.worker.model.layout import LayoutLimits
from engine.worker.model.stage import Stage
from engine.worker.ports import CapturableAttention
from engine.worker.streams import Streams

logger = logging.getLogger(__name__)


def arena_capacity(max_tokens: int, max_requests: int) -> int:
    """The arena's size in int64: ids, positions, the runs of recurrent layers, slots of LoRA
    adapters, output rows, token types, and the rows whose token is on the device."""
    return 8 * max(max_tokens, max_requests) + 2 * max_tokens + 4 * max_requests


def with_graphs(
    streams: Streams,
    stage: Stage,
    arena: StepArena,
    received: Tensor | None,
    limits: LayoutLimits,
    sizes: GraphSizes,
    progress: Progress,
    *,
    is_ranked: bool,
) -> Stage:
    """The stage with graphs of its steps, if attention can be captured. All ranks of the stage call
    this together. `received` is where later stages read hidden states."""
    if not isinstance(stage.attention, CapturableAttention):
        name = type(stage.attention).__name__
        logger.warning("steps run without CUDA graphs: %s cannot be captured", name)
        return stage
    layers = Layers(stage.model, stage.attention, received, stage.states)
    graphs = StepGraphs(streams, layers, arena, (limits.num_blocks, limits.block_size))
    graphs.capture(sizes, progress, needs_all=is_ranked)
    return replace(stage, graphs=graphs)
