"""A stand-in for a GPU: tensors are on the CPU or the meta device; tests set the memory used."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, cast

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroupGloo, Store, Work

from engine.worker.cuda.device import CudaDevice
from engine.worker.cuda.gpu import ChoosesSums
from engine.worker.cuda.kernels.library import NO_KERNELS, TritonKernels
from engine.worker.model.kv.data_plane import HIDDEN_TAG, Group
from engine.worker.process.worker import Worker
from engine.worker.weights.checkpoint import Checkpoint
from engine.worker_settings import WorkerSettings
from tests.engine.worker.cuda.standin import StandInStreams
from tests.engine.worker.process.driving import settings_for
from tests.worker_settings import changed

CPU = torch.device("cpu")


def gpu_settings(model: object, **values: object) -> WorkerSettings:
    """Settings with a small largest step: each load on a stand-in runs it."""
    settings = settings_for(
        model, "reference", kv_dtype="auto", max_batch_size=4, max_batch_tokens=64
    )
    return changed(settings, **values)


def load_stored(
    model: object, dtype: str = "float32", kernels: TritonKernels = NO_KERNELS
) -> Worker:
    """A worker that computes in the formats that the checkpoint prefers, with these kernels."""
    settings, gpu = gpu_settings(model, dtype=dtype), StandingGpu(total_bytes=1 << 31)
    preferred = Checkpoint.open(str(model)).preferred_format
    device = CudaDevice(settings, gpu, preferred)
    device._triton = kernels  # reference attention would leave them out
    return Worker.load(settings, lambda *_: None, device)


@dataclass
class StandingGpu:
    """A `Gpu` of `total_bytes`, of which others use `used`; a test says what a step takes."""

    place: torch.device = CPU
    model: str = "Standing GPU"
    capability: tuple[int, int] = (9, 0)
    total_bytes: int = 1 << 30
    used: int = 100 << 20
    peak: int = 0
    threads: set[str] = field(default_factory=set)  # whose current GPU this is
    of_it: StandInStreams = field(default_factory=StandInStreams)

    def used_bytes(self) -> int:
        return self.used

    def tensor_bytes(self) -> int:
        return 0

    def peak_bytes(self) -> int:
        return self.peak

    def reset_peak(self) -> None:
        self.peak = 0

    def release_cached(self) -> None:
        """Nothing is kept."""

    def put(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self.place)

    def tensor_transport(self, dtype: torch.dtype, sums: ChoosesSums) -> "StandingTransport":
        return StandingTransport(dtype, sums)

    def enter_thread(self) -> None:
        self.threads.add(threading.current_thread().name)

    def streams(self) -> StandInStreams:
        return self.of_it

    @contextmanager
    def step(self, num_bytes: int) -> Iterator[None]:
        """Inside, a step takes so much."""
        yield
        self.peak = max(self.peak, num_bytes)


@dataclass
class StandingTransport:
    """Carries as NCCL does: what arrives must not be read before it was settled."""

    dtype: torch.dtype
    all_reduce: ChoosesSums
    has_own_groups: bool = True
    num_groups: int = 0
    num_settled: int = 0
    num_computed: int = 0  # steps for which the host has waited
    on_header: Callable[[], object] = lambda: None  # called when a header has arrived

    def group(self, store: Store, rank: int, size: int) -> Group:
        self.num_groups += 1
        return cast(Group, ProcessGroupGloo(store, rank, size, timedelta(seconds=60)))

    def computed(self) -> Callable[[], None]:
        def wait() -> None:
            self.num_computed += 1

        return wait

    def receive(
        self, group: Group, header: Work, sizes: tuple[int, int], peer: int
    ) -> tuple[Tensor, Callable[[], None]]:
        hidden = torch.full(sizes, torch.nan, dtype=self.dtype)
        arriving = torch.empty(sizes, dtype=self.dtype)
        header.wait()
        self.on_header()
        work = group.recv([arriving], peer, HIDDEN_TAG)

        def settle() -> None:
            work.wait()
            hidden.copy_(arriving)
            self.num_settled += 1

        return hidden, settle
