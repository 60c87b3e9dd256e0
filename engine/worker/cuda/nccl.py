"""Tensors from GPU to GPU by NCCL: hidden states from stage to stage, sums within a stage.

NCCL's work runs on streams. What is sent or added up follows what the computing stream was given
before, and the computing stream waits for it, not the host. Hidden states arrive on a stream of
their own: the thread that receives them must not hold up the step that is being computed.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, distributed

from engine.errors import StartupError
from engine.worker.model.data_plane import HIDDEN_TAG, Group

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store, Work

WAITING = timedelta(hours=24)  # the watchdog that counts is the executor's


class NcclCarrier:
    """See `Carrier`."""

    has_own_groups = True

    def __init__(self, place: torch.device, dtype: torch.dtype) -> None:
        self._place = place
        self._dtype = dtype
        self._arrivals = torch.cuda.Stream(place)  # type: ignore[no-untyped-call] # the stubs lack it

    @classmethod
    def open(cls, place: torch.device, dtype: torch.dtype) -> "NcclCarrier":
        """Raises `StartupError` where torch has no NCCL."""
        if not distributed.is_nccl_available():
            raise StartupError(
                f"several workers on GPUs need NCCL, which torch {torch.__version__} lacks"
            )
        return cls(place, dtype)

    def group(self, store: "Store", rank: int, size: int) -> Group:
        """See `Carrier`; its members connect when they first exchange something."""
        from torch._C._distributed_c10d import ProcessGroupNCCL  # only where torch has NCCL

        options = ProcessGroupNCCL.Options()
        options._timeout = WAITING
        return cast(Group, ProcessGroupNCCL(store, rank, size, options))

    def receive(
        self, group: Group, header: "Work", sizes: tuple[int, int], peer: int
    ) -> tuple[Tensor, Callable[[], None]]:
        """See `Carrier`. Before the header is there nothing is given to the GPU, which would spin
        on it."""
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
