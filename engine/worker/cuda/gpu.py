"""The port to one GPU: its name, memory, streams, and NCCL.

Only this file and `streams` need a real GPU. All other code of this package also runs, and
is tested, on CPU tensors.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol, cast

import torch
from numpy.typing import NDArray
from torch import Tensor, distributed
from torch._C._distributed_c10d import Store, Work

from engine.errors import StartupError
from engine.worker.cuda.streams import CudaStreams
from engine.worker.model.kv.data_plane import HIDDEN_TAG, Group, TensorTransport
from engine.worker.ports import AllReduce
from engine.worker.streams import Streams
from engine.worker_settings import Placement

ChoosesSums = Callable[[Placement, AllReduce], AllReduce]  # `TensorTransport.all_reduce`
WAITING = timedelta(hours=24)  # the executor's own watchdog applies first


class NcclTransport:
    """A `TensorTransport` over NCCL: hidden states between stages, all-reduce within a stage.

    NCCL operations run on streams. A send or all-reduce runs after the work already submitted to
    the compute stream; the compute stream waits for it, the host does not. Hidden states are
    received on a separate stream, so that receiving them does not delay the step that is computed.

    All-reduces may be captured in CUDA graphs: a group connects at its first exchange, which comes
    before the capture, and a captured all-reduce is part of the compute stream.
    """

    has_own_groups = True

    def __init__(self, place: torch.device, dtype: torch.dtype, sums: ChoosesSums) -> None:
        self._place = place
        self._dtype = dtype
        self.all_reduce = sums
        self._arrivals = torch.cuda.Stream(place)  # type: ignore[no-untyped-call] # the stubs lack it

    @classmethod
    def open(cls, place: torch.device, dtype: torch.dtype, sums: ChoosesSums) -> "NcclTransport":
        """Raises `StartupError` if torch was built without NCCL."""
        if not distributed.is_nccl_available():
            raise StartupError(
                f"several workers on GPUs need NCCL, which torch {torch.__version__} lacks"
            )
        return cls(place, dtype, sums)

    def group(self, store: Store, rank: int, size: int) -> Group:
        """A process group; its members connect at their first exchange."""
        from torch._C._distributed_c10d import ProcessGroupNCCL  # only where torch has NCCL

        options = ProcessGroupNCCL.Options()
        options._timeout = WAITING
        return cast(Group, ProcessGroupNCCL(store, rank, size, options))

    def computed(self) -> Callable[[], None]:
        """Waits for what the compute stream was given so far."""
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call] # the stubs lack it
        event.record()

        def wait() -> None:
            torch.cuda.set_device(self._place)  # a thread's current GPU is the first one until then
            event.synchronize()

        return wait

    def receive(
        self, group: Group, header: Work, sizes: tuple[int, int], peer: int
    ) -> tuple[Tensor, Callable[[], None]]:
        """Receive hidden states `[tokens, hidden]`. The host waits for the header first: a receive
        submitted earlier would make the GPU spin."""
        header.wait()
        with torch.cuda.stream(self._arrivals):
            hidden = torch.empty(sizes, dtype=self._dtype, device=self._place)
            group.recv([hidden], peer, HIDDEN_TAG).wait()
            arrived = self._arrivals.record_event()

        def settle() -> None:
            computing = torch.cuda.current_stream(self._place)
            computing.wait_event(arrived)
            hidden.record_stream(computing)

        return hidden, settle


class Gpu(Protocol):
    """The current CUDA device of this process."""

    @property
    def place(self) -> torch.device: ...

    @property
    def model(self) -> str:
        """The product name, for example "NVIDIA H200"."""

    @property
    def capability(self) -> tuple[int, int]:
        """The compute capability: (9, 0) is Hopper."""

    @property
    def total_bytes(self) -> int: ...

    def used_bytes(self) -> int:
        """Memory in use on this GPU by all processes, tensors and everything else."""

    def tensor_bytes(self) -> int:
        """Memory in tensors of this process."""

    def peak_bytes(self) -> int:
        """The largest `tensor_bytes` since `reset_peak`."""

    def reset_peak(self) -> None: ...

    def release_cached(self) -> None:
        """Wait for all work, then return cached memory that no tensor uses to the driver."""

    def put(self, array: NDArray[Any]) -> Tensor:
        """Copy the array to the GPU asynchronously; work submitted from now on sees it."""

    def tensor_transport(self, dtype: torch.dtype, sums: ChoosesSums) -> TensorTransport:
        """Communication between GPUs; raises `StartupError` if torch was built without NCCL."""

    def enter_thread(self) -> None:
        """Make this the current GPU of the calling thread."""

    def streams(self) -> Streams:
        """The streams of this GPU; make one and share it."""


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

    def put(self, array: NDArray[Any]) -> Tensor:
        source = torch.from_numpy(array).pin_memory()  # torch keeps it until the copy is done
        return source.to(self.place, non_blocking=True)

    def tensor_transport(self, dtype: torch.dtype, sums: ChoosesSums) -> NcclTransport:
        return NcclTransport.open(self.place, dtype, sums)

    def enter_thread(self) -> None:
        torch.cuda.set_device(self.place)

    def streams(self) -> CudaStreams:
        return CudaStreams(self.place)
