"""Every attention backend as tests make it: those for GPUs on a stand-in of their library."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module

import torch
from torch import Tensor

from adapters.attention import BACKENDS
from adapters.attention.flashinfer.backend import FlashInferAttention
from adapters.attention.flashinfer.fit import unsupported_shape
from engine.worker.cuda.memory import NUM_SPARE, GpuMemory
from engine.worker.device import Formats
from engine.worker.model.kv.kv_tensors import allocate
from engine.worker.ports import (
    AttentionSpec,
    KVTensors,
    MakesAttention,
    ModelShape,
    RopeAngles,
    StepLimits,
    ThreadPool,
)
from tests.engine.worker.cuda.standin import StandInStreams
from tests.flashinfer_stand_in import StandIn

CONTRACTED = tuple(BACKENDS)
ON_CPU = (BACKENDS["cpu"], BACKENDS["reference"])
LIMITS = StepLimits(max_requests=32, max_tokens=2048, max_model_len=4096)


def maker(name: str) -> MakesAttention:
    """The class of that name in the table, or what makes it on a stand-in."""
    module, _, attribute = BACKENDS[name].partition(":")
    made: MakesAttention = getattr(import_module(module), attribute)
    if isinstance(made, type) and issubclass(made, FlashInferAttention):
        return partial(_on_stand_in, made)
    return made


def holds(name: str, dtype: torch.dtype) -> bool:
    """Whether the backend reads KV in a dtype when all else is float32."""
    return dtype is torch.float32 or BACKENDS[name] in ON_CPU


def cache_for(
    name: str, shape: ModelShape, num_blocks: int, block_size: int, dtype: torch.dtype
) -> KVTensors:
    """Zeros for all layers, lying as the backend's device lays them."""
    if BACKENDS[name] in ON_CPU:
        return allocate(shape, shape.num_layers, num_blocks, block_size, dtype)
    return gpu_cache(shape, num_blocks - NUM_SPARE, block_size, dtype)


def gpu_cache(
    shape: ModelShape, num_blocks: int, block_size: int, dtype: torch.dtype, place: str = "cpu"
) -> KVTensors:
    """The cache of a GPU, with its spare block."""
    formats = Formats(torch.float32, dtype, "float32")
    memory = GpuMemory(torch.device(place), StandInStreams(), formats, block_size)
    return memory.kv(shape, num_blocks)


class OnStandIn:
    """Lets the stream catch up before a layer is run, since torch computes at once on the CPU."""

    def __init__(self, attention: FlashInferAttention, stand_in: StandIn) -> None:
        self._attention = attention
        self._stand_in = stand_in
        self.plan = attention.plan
        self.plan_captured = attention.plan_captured

    def run(
        self,
        layer: int,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        rope: RopeAngles | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Run a layer after the stream has done all that it was given."""
        self._stand_in.catch_up()
        return self._attention.run(layer, q, k, v, rope, sinks)


class WorkerOnStandIn(OnStandIn):
    """In the table of backends: `flashinfer` in float32, for whole workers."""

    def __init__(self, spec: AttentionSpec, cache: KVTensors, pool: ThreadPool) -> None:
        stand_in = StandIn()
        super().__init__(FlashInferAttention(spec, cache, pool, stand_in), stand_in)

    @staticmethod
    def why_not(spec: AttentionSpec, kv_dtype: torch.dtype, block_size: int) -> str:
        return unsupported_shape(replace(spec, dtype=torch.bfloat16), torch.bfloat16, block_size)


def _on_stand_in(
    made: Callable[..., FlashInferAttention],
    spec: AttentionSpec,
    cache: KVTensors,
    pool: ThreadPool,
) -> OnStandIn:
    stand_in = StandIn()
    return OnStandIn(made(replace(spec, limits=LIMITS), cache, pool, stand_in), stand_in)
