"""The port `engine.worker.streams`, implemented with torch.cuda."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from math import prod
from typing import TypeVar, cast

import torch
from torch import Tensor

from engine.errors import StartupError, WorkerLost
from engine.worker.streams import Graph, StreamEvent

EXACT_BYTES = 64 << 20  # allocations of host memory from this size on are registered
GIB = 1 << 30
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CudaEvent:
    """A `torch.cuda.Event`."""

    event: torch.cuda.Event

    @property
    def is_reached(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        try:
            self.event.synchronize()
        except RuntimeError as error:  # a failed kernel surfaces at the next wait
            raise WorkerLost(f"the GPU failed: {error}") from error

    def seconds_since(self, earlier: StreamEvent) -> float:
        milliseconds = cast(CudaEvent, earlier).event.elapsed_time(self.event)
        return float(milliseconds) * 1e-3


@dataclass(frozen=True, slots=True)
class CudaStream:
    """A `torch.cuda.Stream`; None is the default stream."""

    stream: torch.cuda.Stream | None

    def submit(self, work: Callable[[], object]) -> None:
        with nullcontext() if self.stream is None else torch.cuda.stream(self.stream):
            work()

    def record(self, *, is_timed: bool = False) -> CudaEvent:
        # Blocking: a waiting thread sleeps instead of spinning beside the thread that launches.
        event = torch.cuda.Event(enable_timing=is_timed, blocking=True)  # type: ignore[no-untyped-call]
        event.record(self._current())
        return CudaEvent(event)

    def wait_for(self, event: StreamEvent) -> None:
        self._current().wait_event(cast(CudaEvent, event).event)

    def _current(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream() if self.stream is None else self.stream


class CudaStreams:
    """The streams of `device`, which must be the current device of the process."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.compute = CudaStream(None)
        self._pool = torch.cuda.graph_pool_handle()

    def side(self) -> CudaStream:
        return CudaStream(torch.cuda.Stream(self.device))  # type: ignore[no-untyped-call]

    def pinned(self, sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
        return pinned(sizes, dtype)

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def capture(self, work: Callable[[], T]) -> tuple[Graph, T]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = work()
        return graph, result

    def synchronize(self) -> None:
        try:
            torch.cuda.synchronize(self.device)
        except RuntimeError as error:
            raise WorkerLost(f"the GPU failed: {error}") from error


def pinned(sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Uninitialised page-locked host memory. A large tensor must live as long as the process.

    torch's own allocator rounds every allocation up to a power of two, so that a host tier of 40
    GiB would lock 64 GiB. So large ones are ordinary memory that is registered with CUDA; copies
    from and to it are asynchronous, as with torch's own page-locked memory.

    Raises `StartupError` if the system does not lock that much memory.
    """
    num_bytes = prod(sizes) * dtype.itemsize
    if num_bytes < EXACT_BYTES:
        return torch.empty(tuple(sizes), dtype=dtype, pin_memory=True)
    tensor = torch.empty(tuple(sizes), dtype=dtype)
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call] # the stubs lack it
    status = int(cudart.cudaHostRegister(tensor.data_ptr(), num_bytes, 0))
    if status:
        raise StartupError(
            f"{num_bytes / GIB:.1f} GiB of host memory cannot be page-locked (CUDA error {status});"
            " lower --host-kv-memory or raise the limit of locked memory (ulimit -l)"
        )
    return tensor
