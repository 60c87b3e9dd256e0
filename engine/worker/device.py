"""What a worker computes on: the device port, and how a device is chosen and opened.

A device decides dtypes, operators and attention backends, and knows how much memory there is.
Device classes are named in a table of strings, so that one device's libraries are never needed for
another.
"""

import importlib
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor

from engine.errors import StartupError
from engine.worker.model.kv.data_plane import TensorTransport
from engine.worker.model.layout import LayoutLimits
from engine.worker.model.stage import Stage
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
    StoredWeights,
    WeightSource,
)
from engine.worker.transfers import Transfers
from engine.worker.weights.packed_cache import PackedCache
from engine.worker_settings import WorkerSettings

logger = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]  # (what, done, total)

DEVICES = {
    "cpu": "engine.worker.cpu.device:CpuDevice",
    "cuda": "engine.worker.cuda.device:CudaDevice",
}
# Attention backends that run on one kind of device only.
RUNS_ON = {"cpu": "cpu", "flashinfer": "cuda"}


@dataclass(frozen=True, slots=True)
class Formats:
    """What a device computes in.

    `weights` is the format of the linear layers, as reports show it. `linear` is what
    `Device.source` converts all linear weights to on the host; None: they reach the operators as
    they are stored.
    """

    dtype: torch.dtype  # the dtype of float weights and activations
    kv_dtype: torch.dtype  # the dtype of keys and values in the cache
    weights: str
    linear: LinearFormat | None = None


class DeviceMemory(Protocol):
    """Allocates on a device."""

    def zeros(self, *sizes: int) -> Tensor:
        """Zeros in the dtype of activations."""

    def states(self, sizes: tuple[int, ...]) -> Tensor:
        """Zeros in float32 for states of recurrent layers, which live as long as the worker."""

    def kv(self, shape: ModelShape, num_blocks: int) -> KVTensors:
        """A cache of zeros for all layers of `shape`."""

    def mover(self, cache: KVTensors, shape: ModelShape, num_host_blocks: int) -> BlockMover:
        """Allocates `num_host_blocks` of host memory, and moves blocks between it and the cache."""


class ComputeThreads(Protocol):
    """The threads that compute on the CPU, the caller's included."""

    threads: int

    def wake(self) -> None:
        """Let threads that help this one compute begin to work, if they sleep."""

    def rest(self) -> None:
        """Let these threads sleep until `wake`."""

    def awake(self) -> AbstractContextManager[None]:
        """`wake` and `rest` around a block."""


class Device(Protocol):
    """The device of one worker, made by `open` of its class, which raises `StartupError`."""

    @property
    def name(self) -> str:
        """The name that reports and logs show: "cpu", "cuda:0 (NVIDIA H200)"."""

    @property
    def formats(self) -> Formats: ...

    @property
    def memory(self) -> DeviceMemory: ...

    @property
    def pool(self) -> ComputeThreads: ...

    @property
    def attentions(self) -> tuple[str, ...]:
        """Names in the table of `adapters.attention`; the first that supports the model is used."""

    @property
    def kernels(self) -> str:
        """The kernels in use, as reports show them."""

    def prepare(self, progress: Progress) -> None:
        """Load all kernels; those that were never compiled on this machine are compiled now."""

    def check_weights(self, num_bytes: int, idle_bytes: int) -> None:
        """Raise `StartupError` if this worker's weights, so many bytes, do not fit.

        `idle_bytes` of them are experts that one token does not use; a device that maps them from
        a file does not need memory for these.
        """

    def beside(self, preferred: PreferredFormat) -> "Device":
        """The same device for the weights of another model."""

    def operators(self) -> Operators: ...

    def recorded(self, model: StageModel, operators: Operators, num_ranks: int) -> StageModel:
        """The same model; where it pays, kernel calls of similar steps are recorded and replayed.

        `operators` are those that the model was built with.
        """

    def source(
        self, weights: StoredWeights, cache: PackedCache, num_bytes: int
    ) -> AbstractContextManager[WeightSource]:
        """The weights from which a model is built inside the `with` block.

        A device that packs weights takes them from the cache, or adds about `num_bytes` to it.
        """

    def backend(
        self, makes: MakesAttention, spec: AttentionSpec, cache: KVTensors
    ) -> AttentionBackend:
        """Attention over the cache; several may exist at a time."""

    def kv_capacity(self, profile_run: Callable[[], None]) -> KVCapacity:
        """Memory left for KV once all weights are loaded.

        `profile_run` runs the largest step on a cache of its own, for devices that have to
        measure how much memory that takes.
        """

    def transfers(self) -> Transfers:
        """Copies and events of steps, always the same."""

    def replaying(
        self, stage: Stage, shard: Shard, limits: LayoutLimits, progress: Progress
    ) -> Stage:
        """The stage; where it pays, it replays the layers of similar steps."""

    def tensor_transport(self) -> TensorTransport:
        """How tensors of a step reach other workers. Raises `StartupError`."""

    def enter_thread(self) -> None:
        """Make this the current device of the calling thread, before the thread uses it."""

    def check(self) -> None:
        """Wait for all work. Raises `WorkerLost` if the device failed and can compute nothing
        more."""


class _DeviceClass(Protocol):
    """A class in `DEVICES`."""

    def open(self, settings: WorkerSettings, preferred: PreferredFormat) -> Device: ...

    def missing(self, settings: WorkerSettings) -> str:
        """One line that names what this machine lacks; empty if nothing."""


def open_device(settings: WorkerSettings, preferred: PreferredFormat | None = None) -> Device:
    """The device named in the settings; "auto" is a GPU if one can be used, else the CPU.

    `preferred` is the weight format of the checkpoint for weights="auto", floats by default.
    Raises `StartupError` with one line that names what is missing or not supported.
    """
    kind, _, number = settings.kernels.device.partition(":")
    if kind == "auto":
        kind = _best(settings)
    known = f"--device {settings.kernels.device!r} is not supported; known: auto, cpu, cuda, cuda:N"
    if kind not in DEVICES or (number and not (kind == "cuda" and number.isdecimal())):
        raise StartupError(known)
    if lacks := _device_class(kind).missing(settings):
        raise StartupError(f"--device {settings.kernels.device!r} cannot be used: {lacks}")
    return _device_class(kind).open(settings, preferred or PreferredFormat())


def attentions_for(settings: WorkerSettings, kind: str, *default: str) -> tuple[str, ...]:
    """Names of attention backends, best first.

    Raises `StartupError` for a backend of another kind of device.
    """
    name = settings.kernels.attention
    if name == "auto":
        return default
    if RUNS_ON.get(name, kind) != kind:
        raise StartupError(f"--attention {name!r} does not run on {kind}")
    return (name,)


def choose_dtype(setting: str, name: str, known: dict[str, torch.dtype], kind: str) -> torch.dtype:
    """The dtype of that name; raises `StartupError` with all names that the device supports."""
    if name not in known:
        names = ", ".join(each for each in known if each != "auto")
        raise StartupError(f"{setting} {name!r} is not supported on {kind}; known: {names}")
    return known[name]


def _best(settings: WorkerSettings) -> str:
    """A GPU if torch sees one; if only software is missing, a warning names it."""
    if not torch.cuda.is_available():
        return "cpu"
    if lacks := _device_class("cuda").missing(settings):
        logger.warning("there is a GPU, but the CPU is used: %s", lacks)
        return "cpu"
    return "cuda"


def _device_class(name: str) -> _DeviceClass:
    module, _, attribute = DEVICES[name].partition(":")
    return cast(_DeviceClass, getattr(importlib.import_module(module), attribute))
