"""NCCL communication between GPUs: hidden states between stages, all-reduce within a stage.

NCCL operations run on streams. A send or all-reduce runs after the work already submitted to the
compute stream; the compute stream waits for it, the host does not. Hidden states are received on a
separate stream, so that receiving them does not delay the step that is being computed.

All-reduces may be captured in CUDA graphs: a group connects at its first exchange, which is one of
the forward passes before the capture, and a captured all-reduce is part of the compute stream.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, distributed

from engine.errors import StartupError
from engine.worker.model.kv.data_plane import HIDDEN_TAG, Group

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store, Work

WAITING = timedelta(hours=24)  # the executor's own watchdog applies first


class NcclTransport:
    """A `TensorTransport` over NCCL."""

    has_own_groups = True

    def __init__(self, place: torch.device, dtype: torch.dtype) -> None:
        self._place = place
        self._dtype = dtype
        self._arrivals = torch.cuda.Stream(place)  # type: ignore[no-untyped-call] # the stubs lack it

    @classmethod
    def open(cls, place: torch.device, dtype: torch.dtype) -> "NcclTransport":
        """Raises `StartupError` if torch was built without NCCL."""
        if not distributed.is_nccl_available():
            raise StartupError(
                f"several workers on GPUs need NCCL, which torch {torch.__version__} lacks"
            )
        return cls(place, dtype)

    def group(self, store: "Store", rank: int, size: int) -> Group:
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
        self, group: Group, header: "Work", sizes: tuple[int, int], peer: int
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
