"""torch's symmetric memory without GPUs: the ranks are threads, and their buffers on the CPU.

It requires what torch's operation checks, and what its kernel takes for granted.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroup

from engine.worker.cuda import one_shot_sums

SECONDS = 60.0  # a rank that waits longer for another one fails


class Buffer(NamedTuple):
    """One rank's memory."""

    tensor: Tensor
    name: str
    rank: int


class Meeting:
    """The ranks of a process group, and what each of them brings."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=SECONDS)
        self.brought: dict[int, Tensor] = {}

    def share(self, rank: int, value: Tensor) -> list[Tensor]:
        """What all ranks bring, in their order; it may be read until `barrier` is waited for."""
        self.brought[rank] = value
        self.barrier.wait()
        return [self.brought[each] for each in sorted(self.brought)]


def _nothing(rank: int) -> None:
    """A rank that does what it is asked."""


@dataclass
class StandInMemory:
    """Stands in for `_SymmetricMemory`, the registry of process groups and the operation."""

    links: Callable[[int, int], bool] = lambda one, other: True
    on_rendezvous: Callable[[int], None] = _nothing  # called with the rank
    on_sum: Callable[[int], None] = _nothing
    off: dict[int, float] = field(default_factory=dict)  # added to the sums of a rank
    sums: list[tuple[str, int, torch.dtype, int]] = field(default_factory=list)
    _own: threading.local = field(default_factory=threading.local)  # the group that was registered
    _meetings: dict[str, Meeting] = field(default_factory=dict)
    _buffers: dict[int, Buffer] = field(default_factory=dict)  # by address
    _mapped: set[int] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def install(self, patched: pytest.MonkeyPatch) -> None:
        patched.setattr(one_shot_sums, "_SymmetricMemory", self)
        patched.setattr(one_shot_sums, "_register_process_group", self.register)
        patched.setattr(one_shot_sums, "are_linked", lambda *pair: self.links(*pair))
        patched.setattr(torch.ops.symm_mem, one_shot_sums.OPERATION, self.one_shot_all_reduce_out)

    def num_sums(self, rank: int) -> int:
        return sum(each[1] == rank for each in self.sums)

    def register(self, name: str, group: ProcessGroup) -> None:
        self._own.group = name, group
        with self._lock:
            self._meetings.setdefault(name, Meeting(group.size()))

    def empty_strided_p2p(
        self,
        size: tuple[int, ...],
        stride: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        group_name: str,
    ) -> Tensor:
        name, group = self._own.group
        assert name == group_name, "a group that is not registered"
        buffer = torch.full(size, 77, dtype=dtype)
        assert buffer.stride() == stride, "another layout"
        self._buffers[buffer.data_ptr()] = Buffer(buffer, name, group.rank())
        return buffer

    def rendezvous(self, tensor: Tensor, group_name: str) -> None:
        buffer = self._buffers[tensor.data_ptr()]
        assert buffer.name == group_name, "the buffer of another group"
        meeting = self._meetings[group_name]
        try:
            self.on_rendezvous(buffer.rank)
        except RuntimeError:
            meeting.barrier.abort()  # the others' time runs out
            raise
        sizes = meeting.share(buffer.rank, torch.tensor(tensor.nbytes))
        meeting.barrier.wait()
        assert len(set(map(int, sizes))) == 1, "buffers of different sizes"
        self._mapped.add(tensor.data_ptr())

    def one_shot_all_reduce_out(self, shared: Tensor, op: str, name: str, out: Tensor) -> Tensor:
        address = shared.untyped_storage().data_ptr()
        assert address in self._mapped, "not in a buffer that all ranks have mapped"
        buffer = self._buffers[address]
        assert (op, name) == ("sum", buffer.name)
        assert shared.dtype in (torch.bfloat16, torch.float32), "no kernel for this dtype"
        assert shared.storage_offset() == 0, "ranks read at the same offset"
        assert shared.is_contiguous(), "not contiguous"
        assert out.is_contiguous(), "not contiguous"
        assert (out.dtype, out.shape) == (shared.dtype, shared.shape)
        assert shared.nbytes % 4 == 0, "threads add words"
        width = next(width for width in (16, 8, 4) if shared.nbytes % width == 0)
        assert out.data_ptr() % width == 0, "misaligned address"
        self.on_sum(buffer.rank)
        meeting = self._meetings[name]
        parts = meeting.share(buffer.rank, shared)
        assert len({(part.shape, part.dtype) for part in parts}) == 1, "ranks sum different tensors"
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        meeting.barrier.wait()  # until then the others read
        out.copy_(total + self.off.get(buffer.rank, 0))
        with self._lock:
            self.sums.append((name, buffer.rank, shared.dtype, shared.nbytes))
        return out
