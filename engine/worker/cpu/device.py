"""The CPU as a `Device`: a thread pool, compiled kernels, one memory for both tiers of KV."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.errors import StartupError
from engine.transport.process_memory import available_bytes
from engine.worker.cpu.attention import paged_kernels, rope_and_cache_write
from engine.worker.cpu.build import compile_all, request
from engine.worker.cpu.kernels import sampling
from engine.worker.cpu.kernels.dtypes import dtype_code
from engine.worker.cpu.kernels.vectors import INSTRUCTIONS
from engine.worker.cpu.linears import describe, linears_of
from engine.worker.cpu.linears.packed_store import DeferredWeights, PackedStore, layout_of
from engine.worker.cpu.native_formats import (
    PLAIN_ATTENTION,
    conversion_kernels,
    kv_format,
    native_format,
    weight_formats,
)
from engine.worker.cpu.operators import NativeOperators
from engine.worker.cpu.thread_pool import NativeThreadPool
from engine.worker.cpu.transfers import HostTransfers
from engine.worker.device import Formats, Progress, attentions_for
from engine.worker.model.kv.data_plane import HostTransport
from engine.worker.model.kv.host_pool import HostPool
from engine.worker.model.kv.kv_tensors import allocate, untouched_zeros
from engine.worker.model.layout import LayoutLimits
from engine.worker.model.stage import Stage
from engine.worker.model.torch_operators import TorchOperators
from engine.worker.ports import (
    AttentionBackend,
    AttentionSpec,
    BlockMover,
    KVCapacity,
    KVTensors,
    MakesAttention,
    ModelShape,
    Operators,
    PreferredFormat,
    Shard,
    StageModel,
    StoredWeights,
    WeightSource,
)
from engine.worker.weights.formats import FORMATS
from engine.worker.weights.packed_cache import PackedCache
from engine.worker.weights.random import check_memory
from engine.worker_settings import WorkerSettings

DEFAULT_ATTENTION = "cpu"
DEFAULT_MAX_BYTES = 4 << 30
DEFAULT_MEMORY_SHARE = 4  # a quarter of what is available


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Allocates pages that take memory when they are written."""

    block_size: int
    kv_dtype: torch.dtype

    def zeros(self, *sizes: int) -> Tensor:
        return torch.zeros(sizes)

    def states(self, sizes: tuple[int, ...]) -> Tensor:
        return untouched_zeros(sizes, torch.float32)

    def kv(self, shape: ModelShape, num_blocks: int) -> KVTensors:
        return allocate(shape, shape.num_layers, num_blocks, self.block_size, self.kv_dtype)

    def mover(self, cache: KVTensors, shape: ModelShape, num_host_blocks: int) -> BlockMover:
        return HostPool(cache, self.kv(shape, num_host_blocks))


def _num_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class CpuDevice:
    """One worker's share of the cores and of the memory of this machine."""

    name = "cpu"

    def __init__(self, settings: WorkerSettings, preferred: PreferredFormat | None = None) -> None:
        kernels, preferred = settings.kernels, preferred or PreferredFormat()
        if kernels.batch_invariant:
            raise StartupError("--batch-invariant is not supported on cpu, only on cuda")
        self.attentions = attentions_for(settings, "cpu", DEFAULT_ATTENTION)
        self._is_plain = self.attentions == (PLAIN_ATTENTION,)
        self.kernels = "torch" if self._is_plain else INSTRUCTIONS
        stored, converted = weight_formats(kernels, preferred, is_plain=self._is_plain)
        names = stored or (converted,)
        kv_dtype = kv_format(settings.kv.kv_cache_dtype, names, keeps_kv=preferred.keeps_kv)
        linears = linears_of(*names, activation_bits=kernels.activation_bits)
        weights = describe([linears[each] for each in names])
        if stored:  # also for the weights that are floats
            linears["float32"] = linears_of(converted)[converted]
        # All that is not a linear is computed in float32.
        format = None if stored else FORMATS[converted]
        self.formats = Formats(torch.float32, kv_dtype, weights, format)
        self.memory = HostMemory(settings.kv.block_size, kv_dtype)
        self._layout = layout_of(linears)
        self._store = PackedStore(linears)
        self._settings = settings
        self._progress: Progress = lambda what, done, total: None
        self._compiling: Future[None] | None = None  # compiles attention kernels, from `source` on
        share = max(1, _num_cores() // settings.placement.num_local_workers)
        self.pool = NativeThreadPool(kernels.threads or share)
        torch.set_num_threads(self.pool.threads if self._is_plain else 1)

    @classmethod
    def open(cls, settings: WorkerSettings, preferred: PreferredFormat) -> "CpuDevice":
        return cls(settings, preferred)

    @staticmethod
    def missing(settings: WorkerSettings) -> str:
        """Always "": every machine has a CPU."""
        return ""

    def prepare(self, progress: Progress) -> None:
        """Begin to compile kernels in other processes, for which `source` waits."""
        self._progress = progress
        if not self._is_plain:
            # The longest first: begun last, one core would be idle.
            attend, *others = self._kernels_of_attention()
            request((attend, sampling.sample, *self._usual_kernels(), *others))

    def _usual_kernels(self) -> tuple[Callable[..., None], ...]:
        conversion = conversion_kernels(self.formats.linear)
        return *conversion, *self._native_operators().usual_kernels

    def _kernels_of_attention(self) -> tuple[Callable[..., None], ...]:
        dtype = dtype_code(self.formats.kv_dtype)
        attend = paged_kernels.attend_kernel(dtype)
        return attend, paged_kernels.merge_partials, rope_and_cache_write.BY_DTYPE[dtype]

    def _compile(self) -> None:
        """Compile the usual kernels. Those of attention, a third of the work, are compiled while
        weights are packed, and that of sampling until a request needs it."""
        compile_all(self._usual_kernels(), self._progress)
        compiler = ThreadPoolExecutor(1, "compile")
        self._compiling = compiler.submit(compile_all, self._kernels_of_attention())
        compiler.submit(compile_all, (sampling.sample,))
        compiler.shutdown(wait=False)

    def beside(self, preferred: PreferredFormat) -> "CpuDevice":
        return CpuDevice(self._settings, preferred)

    def operators(self) -> Operators:
        return TorchOperators() if self._is_plain else self._native_operators()

    def _native_operators(self) -> NativeOperators:
        return NativeOperators(self.pool, self._store)

    def recorded(self, model: StageModel, operators: Operators, num_ranks: int) -> StageModel:
        if isinstance(operators, NativeOperators):
            return operators.recorded(model, num_ranks)
        return model

    def check_weights(self, num_bytes: int, idle_bytes: int) -> None:
        check_memory(num_bytes - (idle_bytes if self._settings.kernels.packed_cache else 0))

    @contextmanager
    def source(
        self, weights: StoredWeights, cache: PackedCache, num_bytes: int
    ) -> Iterator[WeightSource]:
        if self._is_plain:
            yield weights
            return
        with cache.open(self._layout, num_bytes) as file:
            self._store.open(file)
            self._compile()  # while files are read
            torch.set_num_threads(self.pool.threads)  # conversions are torch's; steps use the pool
            try:
                format = native_format(self.pool, self.formats.linear)
                yield DeferredWeights(weights, format, file.checkpoint)
            finally:
                torch.set_num_threads(1)

    def backend(
        self, makes: MakesAttention, spec: AttentionSpec, cache: KVTensors
    ) -> AttentionBackend:
        if self._compiling is not None:
            self._compiling.result()
        return makes(spec, cache, self.pool)

    def kv_capacity(self, profile_run: Callable[[], None]) -> KVCapacity:
        """All available memory; by default the smaller of 4 GiB and a quarter of it.

        All workers of the model on a machine share the default equally.
        """
        available = max(0, available_bytes() - self._store.file_bytes)
        usual = min(DEFAULT_MAX_BYTES, available // DEFAULT_MEMORY_SHARE)
        usual //= self._settings.placement.num_local_workers * self._settings.num_replicas
        return KVCapacity(available, usual, available, is_shared=True)

    def transfers(self) -> HostTransfers:
        return HostTransfers()

    def replaying(
        self, stage: Stage, shard: Shard, limits: LayoutLimits, progress: Progress
    ) -> Stage:
        """The stage as it is: kernels of similar steps are recorded by `recorded`."""
        return stage

    def tensor_transport(self) -> HostTransport:
        return HostTransport(self.formats.dtype)

    def enter_thread(self) -> None:
        """A no-op: all threads use the same processor."""

    def check(self) -> None:
        """Wait for the checksums of cached weights; `WorkerLost` if they are damaged. All else that
        fails on a CPU raises where it fails."""
        self._store.check()
