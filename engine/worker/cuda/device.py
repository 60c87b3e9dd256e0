"""A GPU as a `Device`: 16-bit weights, FlashInfer's attention, KV in what memory is left."""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from math import prod

import torch
from torch import Tensor

from engine.errors import RefusedToStart
from engine.step import Placement, WorkerSettings
from engine.worker.cuda.gpu import Gpu, TorchGpu
from engine.worker.cuda.memory import measure
from engine.worker.cuda.missing import missing
from engine.worker.cuda.operators import PlainOperators
from engine.worker.cuda.sampler import DeviceSampler
from engine.worker.cuda.source import OnDevice
from engine.worker.device import Progress, Room, attention_for, choose
from engine.worker.host_pool import HostPool
from engine.worker.kv_tensors import KVTensors, available_bytes, bytes_per_block
from engine.worker.ports import (
    AttentionBackend,
    AttentionSpec,
    MakesAttention,
    ModelShape,
    MovesBlocks,
    Operators,
    StageModel,
    WeightSource,
)
from engine.worker.stored import Suits

logger = logging.getLogger(__name__)

DTYPES = {
    "auto": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
DEFAULT_ATTENTION = "flashinfer"
PLAIN_ATTENTION = "reference"  # and with it, plain torch throughout
NUM_SPARE = 1  # blocks that rows of padding write to


class NoTeam:
    """In the place of a team of threads: nothing here is shared out among cores."""

    threads = 1
    tape = None

    def room(
        self, kind: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        raise AssertionError("memory for a kernel of the CPU was asked for on a GPU")

    def run(self, kernel: int, operands: int, chunks: int) -> None:
        raise AssertionError("a kernel of the CPU was asked for on a GPU")


class CudaDevice:
    """See `Device`. Whatever needs a real GPU is behind `gpu`."""

    threads = 1
    rounds = False

    def __init__(self, settings: WorkerSettings, gpu: Gpu) -> None:
        self.place = gpu.place
        self.name = str(gpu.place)
        self.dtype = choose("dtype", settings.dtype, DTYPES, "cuda")
        self.attention = attention_for(settings, "cuda", DEFAULT_ATTENTION)
        if self.dtype is torch.float32 and self.attention != PLAIN_ATTENTION:
            raise RefusedToStart(
                f"dtype 'float32' needs --attention {PLAIN_ATTENTION} on cuda; known for "
                f"{self.attention}: bfloat16, float16"
            )
        self.weights = str(self.dtype).removeprefix("torch.")
        if settings.weights not in ("auto", self.weights):
            raise RefusedToStart(
                f"weights {settings.weights!r} is not supported on cuda with dtype "
                f"{self.weights}; known: auto, {self.weights}"
            )
        self.kv_dtype = self.dtype
        if settings.kv_dtype not in ("auto", self.weights):
            raise RefusedToStart(
                f"kv_dtype {settings.kv_dtype!r} is not supported on cuda with dtype "
                f"{self.weights}; known: auto, {self.weights}"
            )
        self._settings = settings
        self._gpu = gpu

    @classmethod
    def open(cls, settings: WorkerSettings, suits: Suits) -> "CudaDevice":
        """Floats, whatever suits. Raises `RefusedToStart` where the worker's number is beyond
        the GPUs there are."""
        index = gpu_index(settings.device, settings.placement, torch.cuda.device_count())
        return cls(settings, TorchGpu(index))

    @staticmethod
    def missing(settings: WorkerSettings) -> str:
        """What this machine lacks, in one line."""
        return missing(wants_kernels=settings.attention != PLAIN_ATTENTION)

    def prepare(self, progress: Progress) -> None:
        """See `Device`."""

    def operators(self) -> Operators:
        """See `Device`."""
        return PlainOperators(self.place)

    def recorded(self, model: StageModel, operators: Operators, num_ranks: int) -> StageModel:
        """See `Device`; nothing is recorded yet."""
        return model

    def sampler(self, vocab_size: int, operators: Operators) -> DeviceSampler:
        """See `Device`."""
        return DeviceSampler(vocab_size, self._gpu.put)

    def source(self, weights: WeightSource) -> WeightSource:
        """See `Device`."""
        return OnDevice(weights, self._gpu)

    def backend(
        self, makes: MakesAttention, spec: AttentionSpec, cache: KVTensors
    ) -> AttentionBackend:
        """See `Device`."""
        return makes(spec, cache, NoTeam())

    def block_bytes(self, shape: ModelShape) -> int:
        """See `Device`."""
        size = self._settings.block_size
        return bytes_per_block(shape, shape.num_layers, size, self.kv_dtype)

    def room(self, rehearse: Callable[[], None]) -> Room:
        """What `--gpu-memory-utilization` leaves after the largest step, less the spare block."""
        budget = measure(self._gpu, self._settings.gpu_memory_utilization, rehearse)
        logger.info("KV has %d bytes: %s", budget.left, budget)
        return Room(budget.left, budget.left, available_bytes(), is_shared=False)

    def allocate(self, shape: ModelShape, num_blocks: int) -> KVTensors:
        """See `Device`."""
        sizes = self._sizes(shape, num_blocks + NUM_SPARE)
        cache = torch.zeros(sizes, dtype=self.kv_dtype, device=self.place)
        return KVTensors(tuple(cache[:, 0]), tuple(cache[:, 1]), NUM_SPARE)

    def allocate_host(self, shape: ModelShape, num_blocks: int) -> KVTensors:
        """Pinned, so that copies run beside the compute."""
        sizes = self._sizes(shape, num_blocks)
        cache = self._pinned(prod(sizes)).view(sizes)
        return KVTensors(tuple(cache[:, 0]), tuple(cache[:, 1]))

    def mover(self, cache: KVTensors, host: KVTensors) -> MovesBlocks:
        """See `Device`."""
        return HostPool(cache, host)

    def awake(self) -> AbstractContextManager[None]:
        """Nothing has to be woken."""
        return nullcontext()

    def _sizes(self, shape: ModelShape, num_blocks: int) -> tuple[int, ...]:
        size = self._settings.block_size
        return (shape.num_layers, 2, num_blocks, size, shape.num_kv_heads, shape.head_dim)

    def _pinned(self, count: int) -> Tensor:
        if count == 0:
            return torch.empty(0, dtype=self.kv_dtype)
        return self._gpu.pinned(count * self.kv_dtype.itemsize).view(self.kv_dtype)


def gpu_index(device: str, placement: Placement, count: int) -> int:
    """Which of `count` GPUs a worker takes: its own, one after the other from the named one on.

    Raises `RefusedToStart` where there are fewer than workers on this machine.
    """
    first = int(device.partition(":")[2] or 0)
    if first + placement.num_neighbours > count:
        named = f" from {device} on" if first else ""
        raise RefusedToStart(
            f"{placement.num_neighbours} workers of this machine need a GPU each{named}, but "
            f"{count} are visible"
        )
    return first + placement.neighbour
