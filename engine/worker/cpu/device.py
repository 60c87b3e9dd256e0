"""The CPU as a `Device`: a thread pool, compiled kernels, one memory for both tiers of KV."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

from engine.errors import StartupError
from engine.transport.process_memory import available_bytes
from engine.worker.cpu.attention import paged_kernels, rope_and_cache_write
from engine.worker.cpu.build import compile_all, request
from engine.worker.cpu.kernels import sampling
from engine.worker.cpu.kernels.dtypes import dtype_code, has_half
from engine.worker.cpu.kernels.linears.tile_formats import HAS_BFLOAT16
from engine.worker.cpu.kernels.vectors import INSTRUCTIONS
from engine.worker.cpu.linears import FORMATS as CPU_FORMATS
from engine.worker.cpu.linears import describe, linears_of
from engine.worker.cpu.linears.packed import CpuLinears
from engine.worker.cpu.linears.packed_store import DeferredWeights, PackedStore, layout_of
from engine.worker.cpu.native_formats import conversion_kernels, native_format
from engine.worker.cpu.operators import NativeOperators
from engine.worker.cpu.thread_pool import NativeThreadPool
from engine.worker.cpu.transfers import HostTransfers
from engine.worker.device import Progress, attentions_for, choose_dtype
from engine.worker.model.kv.data_plane import HostTransport
from engine.worker.model.kv.host_pool import HostPool
from engine.worker.model.kv.kv_tensors import (
    CPU_KV_DTYPES,
    allocate,
    bytes_per_block,
    untouched_zeros,
)
from engine.worker.model.layout import LayoutLimits
from engine.worker.model.stage import Stage
from engine.worker.model.torch_operators import TorchOperators
from engine.worker.ports import (
    AttentionBackend,
    AttentionSpec,
    BlockMover,
    KVCapacity,
    KVTensors,
    LinearFormat,
    MakesAttention,
    ModelShape,
    Operators,
    PreferredFormat,
    Shard,
    StageModel,
    WeightSource,
)
from engine.worker.weights.formats import FORMATS
from engine.worker.weights.packed_cache import PackedCache
from engine.worker.weights.random import check_memory
from engine.worker_settings import WorkerSettings

DTYPES = ("auto", "float32", "bfloat16")
DEFAULT_ATTENTION = "cpu"
PLAIN_ATTENTION = "reference"  # with it, all operators are plain torch
DEFAULT_MAX_BYTES = 4 << 30
DEFAULT_MEMORY_SHARE = 4  # a quarter of what is available


def _num_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def kv_dtype_of(name: str, *, keeps_kv: bool = True) -> torch.dtype:
    """The dtype of the KV cache by its name; raises `StartupError` if it is not supported.

    "auto" is float16, whatever the dtype of weights, if the CPU converts it in hardware; without
    `keeps_kv`, in an encoder, it is float32.
    """
    if name == "auto":
        return torch.float16 if keeps_kv and has_half() else torch.float32
    dtype = choose_dtype("--kv-cache-dtype", name, CPU_KV_DTYPES, "cpu")
    if dtype is torch.float16 and not has_half():
        raise StartupError("--kv-cache-dtype 'float16' needs a CPU with F16C")
    return dtype


class CpuDevice:
    """One worker's share of the cores and of the memory of this machine."""

    name = "cpu"
    place = torch.device("cpu")
    dtype = torch.float32  # bfloat16 is a format of linears; everything else is float32

    def __init__(self, settings: WorkerSettings, preferred: PreferredFormat | None = None) -> None:
        if settings.kernels.dtype not in DTYPES:
            known = ", ".join(DTYPES[1:])
            raise StartupError(
                f"--dtype {settings.kernels.dtype!r} is not supported on cpu; known: {known}"
            )
        if settings.kernels.batch_invariant:
            raise StartupError("--batch-invariant is not supported on cpu, only on cuda")
        preferred = preferred or PreferredFormat()
        self.kv_dtype = kv_dtype_of(settings.kv.kv_cache_dtype, keeps_kv=preferred.keeps_kv)
        self.attentions = attentions_for(settings, "cpu", DEFAULT_ATTENTION)
        stored = self._stored(settings, preferred)
        name = "" if stored else self._format(settings, preferred)
        self.linear_format: LinearFormat | None = FORMATS[name] if name else None
        linears = linears_of(*stored or (name,), activation_bits=settings.kernels.activation_bits)
        self.weights = describe([linears[each] for each in stored or (name,)])
        if stored:  # also for the weights that are floats
            linears["float32"] = self._linears_of_floats(settings, preferred)
        self._layout = layout_of(linears)
        self._store = PackedStore(linears)
        neighbours = settings.placement.num_local_workers
        self.threads = settings.kernels.threads or max(1, _num_cores() // neighbours)
        self._settings = settings
        self._compiling: Future[None] | None = None  # of attention kernels, from `prepare` on
        self._pool = NativeThreadPool(self.threads, settings.kernels.thread_wait)
        torch.set_num_threads(self.threads if self._is_plain else 1)

    @classmethod
    def open(cls, settings: WorkerSettings, preferred: PreferredFormat) -> "CpuDevice":
        return cls(settings, preferred)

    @staticmethod
    def missing(settings: WorkerSettings) -> str:
        """Always "": every machine has a CPU."""
        return ""

    @property
    def _is_plain(self) -> bool:
        return self.attentions == (PLAIN_ATTENTION,)

    def _stored(self, settings: WorkerSettings, preferred: PreferredFormat) -> tuple[str, ...]:
        """The quantized formats of the checkpoint, if its weights are computed in as stored."""
        return preferred.stored if settings.kernels.weights == "auto" and not self._is_plain else ()

    def _linears_of_floats(
        self, settings: WorkerSettings, preferred: PreferredFormat
    ) -> CpuLinears:
        name = self._float_format(settings.kernels.dtype, preferred)
        return linears_of(name)[name]

    def _format(self, settings: WorkerSettings, preferred: PreferredFormat) -> str:
        """What all linears are converted to; raises `StartupError` if the settings name an unknown
        format."""
        weights = settings.kernels.weights
        if weights not in ("auto", *CPU_FORMATS):
            known = ", ".join(("auto", *CPU_FORMATS))
            raise StartupError(f"--weights {weights!r} is not supported on cpu; known: {known}")
        if weights == "auto" and preferred.format is not None and not self._is_plain:
            return preferred.format
        if weights == "auto":
            weights = self._float_format(settings.kernels.dtype, preferred)
        if self._is_plain and weights != "float32":
            raise StartupError(
                f"weights in {weights} need another attention than {PLAIN_ATTENTION!r}"
            )
        return weights

    def _float_format(self, dtype: str, of_checkpoint: PreferredFormat) -> str:
        """The format of linears whose weights are floats.

        "auto" keeps bfloat16 weights in bfloat16 if the CPU has instructions for it.
        """
        if dtype != "auto":
            return dtype
        keeps_bfloat16 = HAS_BFLOAT16 and not self._is_plain
        return "bfloat16" if keeps_bfloat16 and of_checkpoint.floats == "bfloat16" else "float32"

    @property
    def kernels(self) -> str:
        return "torch" if self._is_plain else INSTRUCTIONS

    def prepare(self, progress: Progress) -> None:
        """Compile the usual kernels. Those of attention, a third of the work, are compiled while
        weights are packed, and that of sampling until a request needs it."""
        if self._is_plain:
            return
        usual = self._native_operators().usual_kernels
        conversion = conversion_kernels(self.linear_format)
        dtype = dtype_code(self.kv_dtype)
        attention = (
            paged_kernels.attend_kernel(dtype),
            paged_kernels.merge_partials,
            rope_and_cache_write.BY_DTYPE[dtype],
        )
        request((*conversion, *attention, *usual, sampling.sample))
        compile_all((*usual, *conversion), progress)
        compiler = ThreadPoolExecutor(1, "compile")
        self._compiling = compiler.submit(compile_all, attention)
        compiler.submit(compile_all, (sampling.sample,))
        compiler.shutdown(wait=False)

    def beside(self, preferred: PreferredFormat) -> "CpuDevice":
        return CpuDevice(self._settings, preferred)

    def operators(self) -> Operators:
        return TorchOperators() if self._is_plain else self._native_operators()

    def _native_operators(self) -> NativeOperators:
        return NativeOperators(self._pool, self._store)

    def recorded(self, model: StageModel, operators: Operators, num_ranks: int) -> StageModel:
        if isinstance(operators, NativeOperators):
            return operators.recorded(model, num_ranks)
        return model

    def check_weights(self, num_bytes: int, idle_bytes: int) -> None:
        check_memory(num_bytes - (idle_bytes if self._settings.kernels.packed_cache else 0))

    @contextmanager
    def source(
        self, weights: WeightSource, cache: PackedCache, num_bytes: int
    ) -> Iterator[WeightSource]:
        if self._is_plain:
            yield weights
            return
        with cache.open(self._layout, num_bytes) as file:
            self._store.open(file)
            torch.set_num_threads(self.threads)  # packing is torch's work; steps use the pool
            try:
                yield DeferredWeights(weights, native_format(self._pool, self.linear_format))
            finally:
                torch.set_num_threads(1)

    def backend(
        self, makes: MakesAttention, spec: AttentionSpec, cache: KVTensors
    ) -> AttentionBackend:
        if self._compiling is not None:
            self._compiling.result()
        return makes(spec, cache, self._pool)

    def block_bytes(self, shape: ModelShape) -> int:
        size = self._settings.kv.block_size
        return bytes_per_block(shape, shape.num_layers, size, self.kv_dtype)

    def kv_capacity(self, profile_run: Callable[[], None]) -> KVCapacity:
        """All available memory; by default the smaller of 4 GiB and a quarter of it.

        All workers of the model on a machine share the default equally.
        """
        available = max(0, available_bytes() - self._store.file_bytes)
        usual = min(DEFAULT_MAX_BYTES, available // DEFAULT_MEMORY_SHARE)
        usual //= self._settings.placement.num_local_workers * self._settings.num_replicas
        return KVCapacity(available, usual, available, is_shared=True)

    def allocate(self, shape: ModelShape, num_blocks: int) -> KVTensors:
        size = self._settings.kv.block_size
        return allocate(shape, shape.num_layers, num_blocks, size, self.kv_dtype)

    def allocate_states(self, sizes: tuple[int, ...]) -> Tensor:
        return untouched_zeros(sizes, torch.float32)

    def mover(self, cache: KVTensors, shape: ModelShape, num_host_blocks: int) -> BlockMover:
        return HostPool(cache, self.allocate(shape, num_host_blocks))

    def transfers(self) -> HostTransfers:
        return HostTransfers()

    def replaying(
        self, stage: Stage, shard: Shard, limits: LayoutLimits, progress: Progress
    ) -> Stage:
        """The stage as it is: kernels of similar steps are recorded by `recorded`."""
        return stage

    def tensor_transport(self) -> HostTransport:
        return HostTransport(self.dtype)

    def zeros(self, *sizes: int) -> Tensor:
        return torch.zeros(sizes, dtype=self.dtype)

    def enter_thread(self) -> None:
        """A no-op: all threads use the same processor."""

    def check(self) -> None:
        """Wait for the checksums of cached weights; `WorkerLost` if they are damaged. All else that
        fails on a CPU raises where it fails."""
        self._store.check()

    def wake(self) -> None:
        self._pool.wake()

    def rest(self) -> None:
        self._pool.rest()

    def awake(self) -> AbstractContextManager[None]:
        return self._pool.awake()
