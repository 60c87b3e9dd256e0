"""What a worker computes on: the port, and how a kind of device is chosen and opened.

A device says in what form numbers are kept and which operators and attention run on it, knows how
much memory there is, and makes room in it. Kinds are found by name, in a table of strings, so that
nobody needs the libraries of another kind.
"""

import importlib
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from engine.errors import StartupError
from engine.step import Step, WorkerSettings
from engine.worker.launched import Launched
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
from engine.worker.weights.checkpoint_files import PreferredFormat

if TYPE_CHECKING:
    from engine.worker.model.data_plane import Carrier
    from engine.worker.model.kv_tensors import KVTensors
    from engine.worker.model.layout import LayoutLimits
    from engine.worker.model.stage import Stage
    from engine.worker.sampling.constraints import Constraints
    from engine.worker.sampling.sampler import Draws

logger = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]  # (what, done, total)

DEVICES = {
    "cpu": "engine.worker.cpu.device:CpuDevice",
    "cuda": "engine.worker.cuda.device:CudaDevice",
}
# Attention backends of one kind of device only.
RUNS_ON = {"cpu": "cpu", "flashinfer": "cuda", "flashinfer-split": "cuda"}


class Room(NamedTuple):
    """Bytes that KV may take: at most, unless told otherwise, and of the host.

    Where the tiers share one memory, what the device takes is no longer the host's.
    """

    most: int
    usual: int
    host: int
    is_shared: bool

    def left_on_host(self, taken: int) -> int:
        """What the host has when the device took `taken`."""
        return self.host - taken if self.is_shared else self.host


class Device(Protocol):
    """One worker's device, made as `Kind.open(settings, suits)`, which raises `StartupError`."""

    @property
    def name(self) -> str:
        """As the report says it: "cpu", "cuda:0 (NVIDIA H200)"."""
        ...

    @property
    def place(self) -> torch.device:
        """Where tensors of a step live."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and activations."""
        ...

    @property
    def kv_dtype(self) -> torch.dtype:
        """Of keys and values in the cache."""
        ...

    @property
    def weights(self) -> str:
        """The format of the linear layers."""
        ...

    @property
    def rounds(self) -> bool:
        """Whether linears want all weights in 8 bits."""
        ...

    @property
    def attentions(self) -> tuple[str, ...]:
        """Names in the table of `adapters.attention`, the first that serves the model is taken."""
        ...

    @property
    def threads(self) -> int:
        """Compute threads of the CPU."""
        ...

    @property
    def kernels(self) -> str:
        """What it computes with, for a person."""
        ...

    def prepare(self, progress: Progress) -> None:
        """Have all kernels at hand, compiled now if they never were on this machine."""
        ...

    def operators(self) -> Operators: ...

    def recorded(self, model: StageModel, operators: Operators, num_ranks: int) -> StageModel:
        """The same model, made of these operators; where it pays, steps that are alike are
        recorded once and then repeated."""
        ...

    def sampler(self, vocab_size: int, operators: Operators) -> "Draws":
        """What draws tokens from logits on this device."""
        ...

    def source(self, weights: WeightSource) -> WeightSource:
        """The same weights, where the device computes with them."""
        ...

    def backend(
        self, makes: MakesAttention, spec: AttentionSpec, cache: "KVTensors"
    ) -> AttentionBackend:
        """Attention over the cache; there may be several at a time."""
        ...

    def block_bytes(self, shape: ModelShape) -> int:
        """Bytes of one KV block over all layers of `shape`."""
        ...

    def room(self, rehearse: Callable[[], None]) -> Room:
        """Memory left for KV when all weights are there.

        `rehearse` runs the largest step there can be on a cache of its own, for who has to see
        what it takes.
        """
        ...

    def allocate(self, shape: ModelShape, num_blocks: int) -> "KVTensors":
        """A cache of zeros for all layers of `shape`."""
        ...

    def mover(self, cache: "KVTensors", shape: ModelShape, num_host_blocks: int) -> MovesBlocks:
        """What moves blocks between the cache and so many blocks of host memory, made now."""
        ...

    def launcher(self, whole: "Whole", progress: Progress) -> "LaunchesSteps | None":
        """How a worker that is alone launches steps; None: it computes each when it comes."""
        ...

    def carrier(self) -> "Carrier":
        """How tensors of a step go to and from other workers. Raises `StartupError`."""
        ...

    def blank(self, *sizes: int) -> Tensor:
        """Zeros in `dtype`, where steps are computed."""
        ...

    def awake(self) -> AbstractContextManager[None]:
        """Entered around each step."""
        ...


class LaunchesSteps(Protocol):
    """Begins with steps in order, each of which is collected later."""

    def launch(self, step: Step) -> Launched:
        """What it raises is the failure of the step, but `WorkerLost`."""
        ...


@dataclass(frozen=True, slots=True)
class Whole:
    """What steps run on where one worker holds all of a model."""

    stage: "Stage"
    constraints: "Constraints"
    sampler: "Draws"
    mover: MovesBlocks
    limits: "LayoutLimits"


class _Kind(Protocol):
    """A class in `DEVICES`."""

    def open(self, settings: WorkerSettings, suits: PreferredFormat) -> Device: ...

    def missing(self, settings: WorkerSettings) -> str:
        """One line: what this machine lacks; empty if nothing."""
        ...


def open_device(
    settings: WorkerSettings, suits: PreferredFormat = PreferredFormat.FLOATS
) -> Device:
    """The device that the settings ask for; "auto" is a GPU where there is one to be used.

    `suits` says what "auto" weights are, on devices that have the choice. Raises `StartupError`
    with one line that names what is missing or not supported.
    """
    kind, _, number = settings.device.partition(":")
    if kind == "auto":
        kind = _best(settings)
    known = f"device {settings.device!r} is not supported; known: auto, cpu, cuda, cuda:N"
    if kind not in DEVICES or (number and not (kind == "cuda" and number.isdecimal())):
        raise StartupError(known)
    if lacks := _kind(kind).missing(settings):
        raise StartupError(f"device {settings.device!r} cannot be used: {lacks}")
    return _kind(kind).open(settings, suits)


def attentions_for(settings: WorkerSettings, kind: str, *default: str) -> tuple[str, ...]:
    """Names of attention backends, best first; raises `StartupError` for another device's."""
    name = settings.attention
    if name == "auto":
        return default
    if RUNS_ON.get(name, kind) != kind:
        raise StartupError(f"attention {name!r} does not run on {kind}")
    return (name,)


def choose(what: str, name: str, known: dict[str, torch.dtype], kind: str) -> torch.dtype:
    """The dtype of that name; raises `StartupError` with what there is."""
    if name not in known:
        names = ", ".join(each for each in known if each != "auto")
        raise StartupError(f"{what} {name!r} is not supported on {kind}; known: {names}")
    return known[name]


def _best(settings: WorkerSettings) -> str:
    """A GPU if torch sees one; when only software is missing, a warning says what."""
    if not torch.cuda.is_available():
        return "cpu"
    if lacks := _kind("cuda").missing(settings):
        logger.warning("there is a GPU, but the CPU is used: %s", lacks)
        return "cpu"
    return "cuda"


def _kind(name: str) -> _Kind:
    module, _, attribute = DEVICES[name].partition(":")
    return cast(_Kind, getattr(importlib.import_module(module), attribute))
