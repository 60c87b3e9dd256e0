"""A CUDA GPU as a `Device`: 16-bit weights, FlashInfer attention, and the KV cache in the memory
that is left."""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from engine.errors import StartupError
from engine.transport.process_memory import available_bytes
from engine.worker.cuda.build_environment import prepare_environment
from engine.worker.cuda.formats import kv_format, reported, weight_format, why_not_fp8
from engine.worker.cuda.gpu import Gpu, TorchGpu
from engine.worker.cuda.kernels.library import NO_KERNELS, TritonKernels, kernel_trials, load
from engine.worker.cuda.kernels.tiling import has_room
from engine.worker.cuda.memory import GpuMemory, check_weights, fitting, measure
from engine.worker.cuda.model.fusion import fused
from engine.worker.cuda.model.linears import FastProducts
from engine.worker.cuda.model.loras import CudaLoras
from engine.worker.cuda.model.operators import CudaOperators
from engine.worker.cuda.model.weight_staging import OnDevice
from engine.worker.cuda.one_shot_sums import SumTrial, ending
from engine.worker.cuda.requirements import missing
from engine.worker.cuda.sampling.sampling_kernels import DeviceSampling
from engine.worker.cuda.step.arena import StepArena
from engine.worker.cuda.step.build import arena_capacity, with_graphs
from engine.worker.cuda.step.graphs import GraphSizes, graph_sizes, mixed_sizes
from engine.worker.cuda.step.transfers import DeviceTransfers
from engine.worker.device import Formats, Progress, attentions_for, choose_dtype
from engine.worker.model.kv.data_plane import TensorTransport
from engine.worker.model.layout import LayoutLimits
from engine.worker.model.stage import Stage
from engine.worker.ports import (
    AllReduce,
    AttentionBackend,
    AttentionSpec,
    KVCapacity,
    KVTensors,
    MakesAttention,
    Operators,
    PreferredFormat,
    Shard,
    StageModel,
    WeightSource,
)
from engine.worker.weights.packed_cache import PackedCache
from engine.worker_settings import Placement, WorkerSettings

logger = logging.getLogger(__name__)

DTYPES = {
    "auto": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
DEFAULT_ATTENTION = "flashinfer"
PLAIN_ATTENTION = "reference"  # and with it, plain torch throughout


class NoThreadPool:
    """Stands where a CPU backend gets its thread pool; a GPU backend must not use it."""

    threads = 1
    graph = None

    def empty(
        self, kind: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        raise AssertionError("a GPU backend requested memory of the CPU thread pool")

    def run(self, kernel: int, operands: int, chunks: int) -> None:
        raise AssertionError("a GPU backend ran a CPU kernel")

    def wake(self) -> None:
        """A no-op: there are no helpers."""

    def rest(self) -> None:
        """A no-op."""

    def awake(self) -> AbstractContextManager[None]:
        """A no-op."""
        return nullcontext()


class CudaDevice:
    """A `Device` on one GPU. Everything that needs a real GPU is behind `gpu`, so tests replace
    it."""

    kernels = "cuda"
    pool = NoThreadPool()

    def __init__(
        self,
        settings: WorkerSettings,
        gpu: Gpu,
        preferred: PreferredFormat | None = None,
        triton: TritonKernels = NO_KERNELS,
    ) -> None:
        self.name = f"{gpu.place} ({gpu.model})"
        dtype = choose_dtype("--dtype", settings.kernels.dtype, DTYPES, "cuda")
        self.attentions = attentions_for(settings, "cuda", DEFAULT_ATTENTION, PLAIN_ATTENTION)
        self._format = weight_format(settings.kernels.weights, dtype, gpu, preferred)
        if settings.kernels.activation_bits not in ("auto", "8"):
            raise StartupError(
                f"activation_bits {settings.kernels.activation_bits!r} is not supported on cuda; "
                "known: auto, 8"
            )
        self._others = "" if preferred is None else preferred.format or ""
        weights = reported(self._format, dtype, preferred)
        # Weights are converted on the GPU, not by `source`.
        self.formats = Formats(dtype, kv_format(settings.kv.kv_cache_dtype, dtype), weights)
        self._settings = settings
        self._gpu = gpu
        self._streams = gpu.streams()
        size = settings.kv.block_size
        self.memory = GpuMemory(gpu.place, self._streams, self.formats, size)
        is_plain = self.attentions == (PLAIN_ATTENTION,) or dtype is torch.float32
        self._triton = NO_KERNELS if is_plain else triton
        self._check_invariance()
        self._transfers: DeviceTransfers | None = None  # made by `transfers`
        self._progress: Progress = _no_progress  # replaced by `prepare`

    @classmethod
    def open(cls, settings: WorkerSettings, preferred: PreferredFormat) -> "CudaDevice":
        """Open the GPU of this worker; raises `StartupError` if there are fewer GPUs than
        workers."""
        index = gpu_index(settings.kernels.device, settings.placement, torch.cuda.device_count())
        gpu = TorchGpu(index)
        prepare_environment(gpu.capability)
        dtype = choose_dtype("--dtype", settings.kernels.dtype, DTYPES, "cuda")
        if settings.kernels.attention == PLAIN_ATTENTION or dtype is torch.float32:
            return cls(settings, gpu, preferred)
        triton = load(gpu.place, dtype, settings.kernels.kernel_choices)
        return cls(settings, gpu, preferred, triton)

    @staticmethod
    def missing(settings: WorkerSettings) -> str:
        """What this machine lacks to run on a GPU, in one line; empty if nothing."""
        return missing(wants_kernels=settings.kernels.attention != PLAIN_ATTENTION)

    def prepare(self, progress: Progress) -> None:
        """Keep `progress` for `kv_capacity`, which compiles the kernels that the model needs."""
        self._progress = progress

    def check_weights(self, num_bytes: int, idle_bytes: int) -> None:
        """Raise `StartupError` if the GPU has less memory left for weights."""
        check_weights(self._gpu, self._settings.kernels.gpu_memory_utilization, num_bytes)

    def beside(self, preferred: PreferredFormat) -> "CudaDevice":
        return CudaDevice(self._settings, self._gpu, preferred, self._triton)

    def operators(self) -> Operators:
        """Operators that place weights on the GPU in the configured weight format."""
        triton, is_invariant = self._triton, self._settings.kernels.batch_invariant
        has_products = has_room(self._gpu.capability) or is_invariant
        fast = FastProducts(
            triton.rows,
            triton.gemm if has_products else None,
            triton.four_bit,
            triton.fp8_weights,
            triton.recurrence,
            triton.experts,
            is_invariant,
        )
        settings, place, dtype = self._settings, self._gpu.place, self.formats.dtype
        captured = triton.lora if settings.loras else None
        return CudaOperators(
            place,
            dtype,
            self._format,
            fast,
            DeviceSampling(self._gpu.put, triton.sampling.sample) if triton.sampling else None,
            self._others,
            multiplies_fp8=why_not_fp8(self._gpu, dtype) == "",
            loras=CudaLoras(self._streams, dtype, captured, settings.max_lora_rank),
        )

    def recorded(self, model: StageModel, operators: Operators, num_ranks: int) -> StageModel:
        """The model with norms and gates fused into 8-bit linears.

        On a GPU steps are captured as CUDA graphs, by `replaying`.
        """
        return fused(model, self._triton.rows)

    def source(
        self, weights: WeightSource, cache: PackedCache, num_bytes: int
    ) -> AbstractContextManager[WeightSource]:
        """A weight source that copies each tensor to the GPU through pinned memory."""
        return nullcontext(OnDevice(weights, self._gpu.place, self._streams))

    def backend(
        self, makes: MakesAttention, spec: AttentionSpec, cache: KVTensors
    ) -> AttentionBackend:
        """The attention backend over this cache."""
        return makes(spec, cache, self.pool)

    def kv_capacity(self, profile_run: Callable[[], None]) -> KVCapacity:
        """Memory that `--gpu-memory-utilization` leaves for KV beside the largest step.

        Every kernel runs once before the measurement, so that kernels which were never run on
        this machine are compiled first.
        """
        with fitting(self._gpu):
            warm_up(profile_run, self._progress)
        share = min(1.0, self._graph_sizes.largest / self._settings.max_batch_tokens)
        utilization = self._settings.kernels.gpu_memory_utilization
        budget = measure(self._gpu, utilization, share, profile_run)
        logger.info("KV cache: %d bytes (%s)", budget.left, budget)
        return KVCapacity(budget.left, budget.left, available_bytes(), is_shared=False)

    def transfers(self) -> DeviceTransfers:
        if self._transfers is None:
            settings = self._settings
            size = arena_capacity(settings.max_batch_tokens, settings.max_batch_size)
            self._transfers = DeviceTransfers(self._streams, StepArena(self._streams, size))
        return self._transfers

    def replaying(
        self, stage: Stage, shard: Shard, limits: LayoutLimits, progress: Progress
    ) -> Stage:
        """The stage with CUDA graphs of its steps; of models with recurrent layers only decodes
        have some, and only if kernels of ours compute these layers. Decodes with LoRA adapters have
        others, if there are adapters from the start on."""
        recurrent, kernels = shard.local_shape.recurrent_layers, self._triton.recurrence
        if not (self._settings.kernels.cuda_graphs and shard.has_logits):
            return stage
        received, sizes, arena = None, self._graph_sizes, self.transfers().arena
        if limits.num_states:
            if recurrent and not (kernels and all(map(kernels.has_kernels, recurrent))):
                return stage
            sizes = sizes._replace(mixed=())
        if not shard.is_first:
            received = self.memory.zeros(sizes.largest, shard.received_width)
        ranked = shard.num_ranks > 1
        return with_graphs(
            self._streams, stage, arena, received, limits, sizes, progress, is_ranked=ranked
        )

    def tensor_transport(self) -> TensorTransport:
        """NCCL: tensors go from GPU to GPU without passing through the host."""
        return self._gpu.tensor_transport(self.formats.dtype, self._all_reduce)

    def _all_reduce(self, placement: Placement, plain: AllReduce) -> AllReduce:
        """One-shot sums beside NCCL's if all ranks can compute them; not in batch-invariant mode,
        in which the bits of a row would depend on which of the two computes it."""
        if self._settings.kernels.batch_invariant:
            return plain
        streams = self._gpu.streams()  # its graph must not empty the memory pool of the others
        trials = kernel_trials(
            self._gpu.place,
            self._settings.kernels.kernel_choices,
            synchronize=ending(streams.synchronize),
        )
        return SumTrial(placement, plain, streams, trials).all_reduce()

    def enter_thread(self) -> None:
        """A thread's current GPU is the first one until it is set."""
        self._gpu.enter_thread()

    def check(self) -> None:
        """An illegal access of a kernel fails all later calls of this process."""
        self._streams.synchronize()

    def _check_invariance(self) -> None:
        """Batch-invariant mode needs our kernel for matrix products."""
        if not self._settings.kernels.batch_invariant:
            return
        if self._triton.gemm is None or self.attentions == (PLAIN_ATTENTION,):
            raise StartupError(
                "--batch-invariant needs --attention flashinfer, a 16-bit --dtype and the Triton "
                "kernel for matrix products, which is not usable here (see the log)"
            )

    @property
    def _graph_sizes(self) -> GraphSizes:
        settings = self._settings
        if not settings.kernels.cuda_graphs:
            return GraphSizes((), ())
        decodes, mixed = settings.max_batch_size, settings.max_batch_tokens
        return GraphSizes(graph_sizes(decodes), mixed_sizes(mixed))


def warm_up(run: Callable[[], object], progress: Progress) -> None:
    """Run once; raises `StartupError` if a kernel fails to compile or run."""
    progress("kernels", 0, 1)
    try:
        run()
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, OSError) as error:
        line = next(iter(str(error).splitlines()), type(error).__name__)
        raise StartupError(f"kernels cannot be compiled or run: {line}") from error
    progress("kernels", 1, 1)


def _no_progress(what: str, done: int, total: int) -> None:
    """Report nothing."""


def gpu_index(device: str, placement: Placement, count: int) -> int:
    """The index of the GPU of this worker: workers take consecutive GPUs, `device`'s index first.

    Raises `StartupError` if `count` GPUs are fewer than this machine's workers.
    """
    first = int(device.partition(":")[2] or 0)
    if first + placement.num_local_workers > count:
        named = f" starting at {device}" if first else ""
        raise StartupError(
            f"this machine's {placement.num_local_workers} workers need one GPU each{named}, but "
            f"only {count} GPUs are visible; there are --replicas × --pipeline-stages × "
            "--tensor-ranks workers"
        )
    return first + placement.local_index
