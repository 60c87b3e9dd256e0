"""The port to one GPU: its name, memory, pinned host memory, streams and events.

Only this file and `streams`, `nccl` need a real GPU. All other code of this package also runs, and
is tested, on CPU tensors.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.worker.cuda.nccl import NcclTransport
from engine.worker.cuda.streams import CudaStreams
from engine.worker.model.kv.data_plane import TensorTransport
from engine.worker.streams import Streams


class Fence(Protocol):
    """A point in the current stream."""

    def wait(self) -> None:
        """Block the host until all work submitted before this point is done."""
        ...


class Gpu(Protocol):
    """The current CUDA device of this process."""

    @property
    def place(self) -> torch.device: ...

    @property
    def model(self) -> str:
        """The product name, for example "NVIDIA H200"."""
        ...

    @property
    def capability(self) -> tuple[int, int]:
        """The compute capability: (9, 0) is Hopper."""
        ...

    @property
    def total_bytes(self) -> int: ...

    def used_bytes(self) -> int:
        """Memory in use on this GPU by all processes, tensors and everything else."""
        ...

    def tensor_bytes(self) -> int:
        """Memory in tensors of this process."""
        ...

    def peak_bytes(self) -> int:
        """The largest `tensor_bytes` since `reset_peak`."""
        ...

    def reset_peak(self) -> None: ...

    def release_cached(self) -> None:
        """Wait for all work, then return cached memory that no tensor uses to the driver."""
        ...

    def pinned(self, num_bytes: int) -> Tensor:
        """Zeroed page-locked host memory."""
        ...

    def put(self, array: NDArray[Any]) -> Tensor:
        """Copy the array to the GPU asynchronously; work submitted from now on sees it."""
        ...

    def tensor_transport(self, dtype: torch.dtype) -> TensorTransport:
        """Communication between GPUs; raises `StartupError` if torch was built without NCCL."""
        ...

    def enter_thread(self) -> None:
        """Make this the current GPU of the calling thread."""
        ...

    def streams(self) -> Streams:
        """The streams of this GPU; make one and share it."""
        ...

    def fence(self) -> Fence:
        """A fence after all work submitted to the current stream so far."""
        ...


class TorchGpu:
    """The GPU number `index` of this process, through torch."""

    def __init__(self, index: int) -> None:
        self.place = torch.device("cuda", index)
        self.enter_thread()
        properties = torch.cuda.get_device_properties(index)
        self.model: str = properties.name
        self.capability = (properties.major, properties.minor)
        self.total_bytes: int = properties.total_memory

    def used_bytes(self) -> int:
        free, total = torch.cuda.mem_get_info(self.place)
        return total - free

    def tensor_bytes(self) -> int:
        return torch.cuda.memory_allocated(self.place)

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self.place)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.place)

    def release_cached(self) -> None:
        torch.cuda.synchronize(self.place)
        torch.cuda.empty_cache()

    def pinned(self, num_bytes: int) -> Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)

    def put(self, array: NDArray[Any]) -> Tensor:
        source = torch.from_numpy(array).pin_memory()  # torch keeps it until the copy is done
        return source.to(self.place, non_blocking=True)

    def tensor_transport(self, dtype: torch.dtype) -> NcclTransport:
        return NcclTransport.open(self.place, dtype)

    def enter_thread(self) -> None:
        torch.cuda.set_device(self.place)

    def streams(self) -> CudaStreams:
        return CudaStreams(self.place)

    def fence(self) -> Fence:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call] # the stubs lack it
        event.record()
        return _TorchFence(event)


@dataclass(frozen=True, slots=True)
class _TorchFence:
    event: torch.cuda.Event

    def wait(self) -> None:
        self.event.synchronize()
