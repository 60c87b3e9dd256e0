"""Small sums over the ranks of a stage in one step, where GPUs read each other's memory.

NCCL hands numbers on from GPU to GPU, so small sums mostly wait. Here each rank copies its numbers
to a buffer of torch's symmetric memory, which all ranks have mapped, and one kernel reads all
buffers and adds them in the order of ranks: to the same bits on every rank, however many rows there
are. Large sums are NCCL's, which reads each number once.

Ranks that choose differently would wait for each other for ever. So a sum is chosen by its dtype
and size alone, and each step of the trial at the start ends with a count of the ranks that are
well. While a rank is gone, the kernels of the others wait for it, as NCCL's do.
"""

import ctypes
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from threading import Thread

import torch
from torch import Tensor
from torch._C._distributed_c10d import (
    PrefixStore,
    ProcessGroup,
    TCPStore,
    _register_process_group,
    _SymmetricMemory,
)

from engine.errors import KernelFaulted
from engine.worker.cuda.choice_file import KernelTrials
from engine.worker.ports import AllReduce
from engine.worker.streams import Streams
from engine.worker_settings import Placement

OPERATION = "one_shot_all_reduce_out"
# Bytes that a rank reads for one sum: those of 8 ranks of 128 KiB, up to which torch compiles
# all-reduces to this kernel (`_inductor.config`). That fewer ranks may read as much is an estimate.
MAX_READ_BYTES = 1 << 20
DTYPES = (torch.bfloat16, torch.float32)  # those of torch's kernel
WORD = 4  # a sum is a multiple of this many bytes
ALIGNMENT = 16  # bytes that a thread writes at once
NATIVE_ATOMICS = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
MEETING = timedelta(seconds=60)  # ranks meet right after an all-reduce; one that failed never comes
TRIAL_SECONDS = 60.0  # a trial takes milliseconds, or for ever if signals do not arrive

logger = logging.getLogger(__name__)


class OneShotSums:
    """An all-reduce in place: in one step up to `max_bytes`, by `plain` beyond.

    The buffer keeps its address, so that captured graphs find it. All sums are on one stream.
    """

    def __init__(self, place: torch.device, placement: Placement, plain: AllReduce) -> None:
        self.max_bytes = MAX_READ_BYTES // placement.num_ranks // ALIGNMENT * ALIGNMENT
        self._place = place
        self._placement = placement
        self._plain = plain
        self._name = f"ranks of stage {placement.stage}"  # under which torch finds them

    def missing(self) -> str:
        """Why this rank cannot read the memory of the others, in one line; empty if it can."""
        placement, own = self._placement, self._place.index
        if placement.num_local_workers < placement.num_workers:
            return "the workers do not see each other's GPUs"
        if not hasattr(torch.ops.symm_mem, OPERATION):
            return f"torch {torch.__version__} has no {OPERATION}"
        first = own - placement.rank  # workers have consecutive GPUs
        for other in range(first, first + placement.num_ranks):
            if other != own and not are_linked(own, other):
                return f"atomic operations of GPU {own} do not reach the memory of GPU {other}"
        return ""

    def open(self) -> None:
        """Allocate and map the buffers, together with the others; raises if one of them fails."""
        placement, name = self._placement, self._name
        host, _, port = placement.rendezvous.rpartition(":")
        # The data plane's own connection waits much longer
        store = TCPStore(host, int(port), timeout=MEETING, wait_for_workers=False)
        self._group = ProcessGroup(PrefixStore(name, store), placement.rank, placement.num_ranks)
        _register_process_group(name, self._group)  # type: ignore[arg-type] # a new type of str
        size = (self.max_bytes,)
        self._buffer = _SymmetricMemory.empty_strided_p2p(
            size, (1,), torch.uint8, self._place, name
        )
        _SymmetricMemory.rendezvous(self._buffer, name)

    def __call__(self, tensor: Tensor) -> None:
        num_bytes = tensor.nbytes
        if tensor.dtype not in DTYPES or num_bytes > self.max_bytes or num_bytes % WORD:
            self._plain(tensor)
            return
        # torch also has an operation that copies. Its threads do not wait for each other's copies
        # before they tell the other ranks; a copy that is a kernel of its own is done before.
        shared = self._buffer[:num_bytes].view(tensor.dtype).view(tensor.shape)
        shared.copy_(tensor)
        is_aligned = tensor.data_ptr() % ALIGNMENT == 0
        out = tensor if is_aligned else torch.empty_like(tensor)
        getattr(torch.ops.symm_mem, OPERATION)(shared, "sum", self._name, out)
        if not is_aligned:
            tensor.copy_(out)


@dataclass(frozen=True, slots=True)
class SumTrial:
    """Decides, together with the other ranks of the stage, whether sums are one-shot."""

    placement: Placement
    plain: AllReduce
    streams: Streams
    trials: KernelTrials

    def all_reduce(self) -> AllReduce:
        """One-shot sums if they work on all ranks, which call this together, else `plain`.

        Raises `KernelFaulted` if the GPU can compute nothing more; a new start leaves them out.
        """
        sums = OneShotSums(self.streams.device, self.placement, self.plain)
        for step in (self._missing, self._opened, self._tried):
            reason = step(sums)
            well = torch.tensor([int(not reason)], dtype=torch.int32, device=self.streams.device)
            self.plain(well)
            if int(well) < self.placement.num_ranks:
                reason = reason or "another rank cannot, as its log says"
                logger.warning("all sums over ranks are NCCL's, none is one-shot: %s", reason)
                return self.plain
        logger.info("sums over ranks are one-shot up to %d bytes", sums.max_bytes)
        return sums

    @property
    def _kernel(self) -> str:
        return f"one-shot sums of rank {self.placement.rank}"  # ranks share the file of trials

    def _missing(self, sums: OneShotSums) -> str:
        return self.trials.excluded(self._kernel) or sums.missing()

    def _opened(self, sums: OneShotSums) -> str:
        try:
            sums.open()
        except Exception as error:  # torch raises several types
            return _line(error)
        return ""

    def _tried(self, sums: OneShotSums) -> str:
        """Compare with NCCL: both dtypes, small and large, and the last one in a graph, too."""
        sizes = WORD, sums.max_bytes
        given = [self._numbers(size, dtype) for size in sizes for dtype in DTYPES]
        wanted, found = ([each.clone() for each in given] for _ in range(2))
        for each in wanted:
            self.plain(each)

        def sum_again() -> Tensor:
            again = given[-1].clone()
            sums(again)
            return again

        try:
            with self.trials.trial(self._kernel, "--tensor-ranks 1"):
                for each in found:
                    sums(each)
            with self.trials.trial(self._kernel, "--tensor-ranks 1"):  # a capture waits for the GPU
                graph, result = self.streams.capture(sum_again)
                graph.replay()
        except KernelFaulted:
            raise
        except Exception as error:  # torch raises several types
            return _line(error)
        pairs = zip((*found, result), (*wanted, wanted[-1]), strict=True)
        return "" if all(torch.equal(*pair) for pair in pairs) else "they are not NCCL's sums"

    def _numbers(self, num_bytes: int, dtype: torch.dtype) -> Tensor:
        """Whole numbers, other ones on each rank, whose sums are exact in any order."""
        generator = torch.Generator().manual_seed(self.placement.rank)
        count = num_bytes // dtype.itemsize
        numbers = torch.randint(-8, 8, (count,), generator=generator)
        return numbers.to(self.streams.device, dtype)


def are_linked(one: int, other: int) -> bool:
    """Whether a GPU reads the other's memory, and its atomic operations are atomic there, as over
    NVLink: by these the ranks wait for each other."""
    value = ctypes.c_int(0)
    try:
        query = ctypes.CDLL("libcuda.so.1").cuDeviceGetP2PAttribute
    except OSError:
        return False
    return query(ctypes.byref(value), NATIVE_ATOMICS, one, other) == 0 and value.value == 1


def ending(synchronize: Callable[[], None]) -> Callable[[], None]:
    """`synchronize`, which raises `TimeoutError` if the GPU computes longer than a trial takes."""

    def wait() -> None:
        with suppress(Exception):  # it is raised again below
            synchronize()

    def bounded() -> None:
        waiting = Thread(target=wait, name="podway-trial", daemon=True)
        waiting.start()
        waiting.join(TRIAL_SECONDS)
        if waiting.is_alive():
            raise TimeoutError(f"it has not ended after {TRIAL_SECONDS:.0f} s")
        synchronize()

    return bounded


def _line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__
