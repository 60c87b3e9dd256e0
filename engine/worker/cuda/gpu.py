"""One GPU as the rest of the room sees it: its memory, its name, host memory that it can reach.

Everything that only works where there is a GPU stands here, so that all else runs, and is
tested, on tensors of the CPU.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.worker.cuda.nccl import NcclCarrier
from engine.worker.cuda.streams import CudaStreams
from engine.worker.model.data_plane import Carrier
from engine.worker.streams import Streams


class Mark(Protocol):
    """A place in the work of a GPU."""

    def wait(self) -> None:
        """Until all work given before it is done."""
        ...


class Gpu(Protocol):
    """A GPU of which this process has the current device."""

    @property
    def place(self) -> torch.device: ...

    @property
    def model(self) -> str:
        """Its maker's name for it."""
        ...

    @property
    def capability(self) -> tuple[int, int]:
        """The compute capability: (9, 0) is Hopper."""
        ...

    @property
    def total_bytes(self) -> int: ...

    def used_bytes(self) -> int:
        """Taken on this GPU, by whichever process, tensors and all else."""
        ...

    def held_bytes(self) -> int:
        """In tensors of this process."""
        ...

    def peak_bytes(self) -> int:
        """The most that was held since `forget_peak`."""
        ...

    def forget_peak(self) -> None: ...

    def give_back(self) -> None:
        """Wait for all work, then return memory that no tensor holds."""
        ...

    def pinned(self, num_bytes: int) -> Tensor:
        """Zeroed bytes of host memory that copies need not stage."""
        ...

    def put(self, array: NDArray[Any]) -> Tensor:
        """The array on the GPU, for work given from now on; nobody waits for the copy."""
        ...

    def carrier(self, dtype: torch.dtype) -> Carrier:
        """The way of tensors between GPUs; raises `StartupError` where there is none."""
        ...

    def streams(self) -> Streams:
        """Those of this GPU; all its parts share one of these."""
        ...

    def mark(self) -> Mark:
        """After all work given to the current stream so far."""
        ...


class TorchGpu:
    """The GPU number `index` of this process, through torch."""

    def __init__(self, index: int) -> None:
        torch.cuda.set_device(index)
        self.place = torch.device("cuda", index)
        properties = torch.cuda.get_device_properties(index)
        self.model: str = properties.name
        self.capability = (properties.major, properties.minor)
        self.total_bytes: int = properties.total_memory

    def used_bytes(self) -> int:
        free, total = torch.cuda.mem_get_info(self.place)
        return total - free

    def held_bytes(self) -> int:
        return torch.cuda.memory_allocated(self.place)

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self.place)

    def forget_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.place)

    def give_back(self) -> None:
        torch.cuda.synchronize(self.place)
        torch.cuda.empty_cache()

    def pinned(self, num_bytes: int) -> Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)

    def put(self, array: NDArray[Any]) -> Tensor:
        source = torch.from_numpy(array).pin_memory()  # torch keeps it until it has been read
        return source.to(self.place, non_blocking=True)

    def carrier(self, dtype: torch.dtype) -> NcclCarrier:
        return NcclCarrier.open(self.place, dtype)

    def streams(self) -> CudaStreams:
        return CudaStreams(self.place)

    def mark(self) -> Mark:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call] # the stubs lack it
        event.record()
        return _Mark(event)


@dataclass(frozen=True, slots=True)
class _Mark:
    event: torch.cuda.Event

    def wait(self) -> None:
        self.event.synchronize()
