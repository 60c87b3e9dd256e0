"""Ranks on stand-ins of GPUs that read each other's memory, and what makes them leave it."""

import ctypes
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import (
    TCPStore,
    _resolve_process_group,
    _unregister_process_group,
)
from torch.distributed.distributed_c10d import GroupName

from engine.errors import KernelFaulted
from engine.worker.cuda import one_shot_sums
from engine.worker.cuda.choice_file import ChoiceFile, KernelTrials
from engine.worker.cuda.device import CudaDevice
from engine.worker.cuda.kernels import reference
from engine.worker.cuda.kernels.library import TritonKernels
from engine.worker.cuda.one_shot_sums import OneShotSums, SumTrial, are_linked, ending
from engine.worker.ports import AllReduce
from engine.worker.process.worker import Worker
from engine.worker_settings import Placement
from tests.engine.worker.cuda.fleet import gpus
from tests.engine.worker.cuda.standin import StandInStreams
from tests.engine.worker.cuda.standing import StandingGpu
from tests.engine.worker.cuda.symmetric_memory import StandInMemory
from tests.engine.worker.process.driving import Driver, load_worker
from tests.models.checkpoints import make_checkpoint
from tests.worker_settings import worker_settings

LIMITS = {"dtype": "float32", "max_batch_size": 4, "max_batch_tokens": 16}


@dataclass
class OneRank:
    """The only rank of a group, whose sums are its own numbers."""

    placement: Placement
    plain: list[Tensor] = field(default_factory=list)  # what was left to the plain sum
    streams: StandInStreams = field(default_factory=StandInStreams)

    def open(self) -> OneShotSums:
        sums = OneShotSums(torch.device("cpu", 0), self.placement, self.plain.append)
        assert sums.missing() == ""
        sums.open()
        return sums

    def trial(self, path: Path, synchronize: Callable[[], None]) -> AllReduce:
        """Of a process with a file of trials."""
        self.streams.device = torch.device("cpu", 0)
        trials = KernelTrials(ChoiceFile(path), synchronize)
        return SumTrial(self.placement, self.plain.append, self.streams, trials).all_reduce()


@pytest.fixture
def one_rank() -> Iterator[OneRank]:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield OneRank(Placement(rendezvous=f"127.0.0.1:{store.port}"))
    del store


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> StandInMemory:
    found = StandInMemory()
    found.install(monkeypatch)
    return found


def reducing(worker: Worker) -> Any:
    return worker.parts.shard.all_reduce


@pytest.mark.parametrize(("stages", "ranks"), [(1, 2), (1, 4), (2, 2)])
def test_ranks_add_up_in_one_step_eagerly_and_in_graphs(
    model: Path, memory: StandInMemory, stages: int, ranks: int
) -> None:
    alone = Driver(load_worker(model), seed=1)
    with gpus(model, stages, ranks, LIMITS, has_graphs=True, on_one_machine=True) as (workers, _):
        assert all(isinstance(reducing(each), OneShotSums) for each in workers.workers)
        together, before = Driver(workers, seed=1), memory.num_sums(0)
        for request, prompt in ((0, (5, 6, 7)), (1, (9,) * 11)):
            assert together.generate(request, prompt, 4) == alone.generate(request, prompt, 4)
        in_graphs = memory.num_sums(0) - before
        piece = 2, tuple(range(30))  # more than a graph has
        torch.testing.assert_close(
            together.logits(piece), alone.logits(piece), rtol=1e-3, atol=1e-3
        )
    layers = workers.workers[0].parts.shard.shape.num_layers
    assert in_graphs == 8 * (2 * layers + 1)  # of 8 steps, and one of the embeddings
    assert memory.num_sums(0) - before == 9 * (2 * layers + 1)
    names = {name for name, *_ in memory.sums}
    assert names == {f"ranks of stage {stage}" for stage in range(stages)}


def test_what_is_large_of_another_dtype_or_no_whole_word_is_the_plain_sum(
    memory: StandInMemory, one_rank: OneRank
) -> None:
    sums, plain = one_rank.open(), one_rank.plain
    most = sums.max_bytes
    for tensor in (
        torch.ones(most // 4 + 1),
        torch.ones(8, dtype=torch.int64),
        torch.ones(8, dtype=torch.float16),
        torch.ones(3, dtype=torch.bfloat16),
    ):
        sums(tensor)
        assert plain.pop() is tensor
    assert not memory.sums
    for tensor in (torch.ones(most // 4), torch.ones(most // 2, dtype=torch.bfloat16)):
        sums(tensor)
    assert [num_bytes for *_, num_bytes in memory.sums] == [most, most]
    assert not plain


def test_a_sum_that_threads_cannot_write_in_place_is_copied(
    memory: StandInMemory, one_rank: OneRank
) -> None:
    sums = one_rank.open()
    memory.off[0] = 1.0
    numbers = torch.arange(9.0)
    sums(numbers[1:])  # 4 bytes behind an aligned address
    assert numbers.tolist() == [0, 2, 3, 4, 5, 6, 7, 8, 9]


def fails(rank: int) -> Callable[[int], None]:
    def fail(asked: int) -> None:
        if asked == rank:
            raise RuntimeError(f"rank {rank} has no more memory")

    return fail


def cannot_read(memory: StandInMemory) -> None:
    memory.links = lambda one, other: one != 1


def cannot_map(memory: StandInMemory) -> None:
    memory.on_rendezvous = fails(1)


def computes_wrong_sums(memory: StandInMemory) -> None:
    memory.off[1] = 1.0


def all_raise(memory: StandInMemory) -> None:
    def fail(rank: int) -> None:
        raise RuntimeError("no kernel image is available\nfor this device")

    memory.on_sum = fail


@pytest.mark.parametrize(
    ("break_it", "reasons"),
    [
        (cannot_read, ["atomic operations of GPU 1 do not reach the memory of GPU 0"]),
        (cannot_map, ["rank 1 has no more memory"]),
        (computes_wrong_sums, ["they are not NCCL's sums"]),
        (all_raise, ["no kernel image is available"] * 2),
    ],
)
def test_if_one_rank_cannot_all_take_nccl_and_the_start_succeeds(
    model: Path,
    memory: StandInMemory,
    caplog: pytest.LogCaptureFixture,
    break_it: Callable[[StandInMemory], None],
    reasons: list[str],
) -> None:
    break_it(memory)
    with gpus(model, 1, 2, LIMITS, has_graphs=True, on_one_machine=True) as (workers, _):
        assert not any(isinstance(reducing(each), OneShotSums) for each in workers.workers)
        tried = len(memory.sums)
        memory.on_sum = fails(0)
        wanted = Driver(load_worker(model), seed=1).generate(0, (5, 6, 7), 4)
        assert Driver(workers, seed=1).generate(0, (5, 6, 7), 4) == wanted
        assert len(memory.sums) == tried
    lines = [each for each in caplog.messages if each.startswith("all sums over ranks are NCCL's")]
    assert len(lines) == 2
    for reason in reasons:
        line = next(each for each in lines if each.endswith(reason))
        lines.remove(line)
    assert all("another rank" in each or "Barrier" in each for each in lines)


@pytest.mark.parametrize("never_ends", [False, True])
def test_a_trial_that_makes_the_gpu_fault_or_never_ends_is_left_out_by_the_next_start(
    memory: StandInMemory,
    one_rank: OneRank,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    never_ends: bool,
) -> None:
    path, ended = tmp_path / "trials.json", threading.Event()
    monkeypatch.setattr(one_shot_sums, "TRIAL_SECONDS", 0.01 if never_ends else 60.0)

    def breaks(rank: int) -> None:
        one_rank.streams.fault = "an illegal memory access was encountered"

    def synchronize() -> None:
        if never_ends:
            ended.wait()
        one_rank.streams.synchronize()

    memory.on_sum = breaks
    why = "it has not ended" if never_ends else "the GPU failed: an illegal"
    line = f"the kernel 'one-shot sums of rank 0' made the GPU fault: {why}.*--tensor-ranks 1"
    try:
        with pytest.raises(KernelFaulted, match=line):
            one_rank.trial(path, ending(synchronize))
    finally:
        ended.set()
    num_sums = len(memory.sums)
    assert one_rank.trial(path, ending(lambda: None)) == one_rank.plain.append
    assert "it made the GPU fault at an earlier start" in caplog.messages[-1]
    assert len(memory.sums) == num_sums


def test_sums_that_cannot_be_captured_are_left_out(
    memory: StandInMemory, one_rank: OneRank, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(rank: int) -> None:
        if one_rank.streams.is_capturing:
            raise RuntimeError("operation not permitted when stream is capturing")

    memory.on_sum = refuse
    found = one_rank.trial(tmp_path / "trials.json", one_rank.streams.synchronize)
    assert found == one_rank.plain.append
    assert caplog.messages[-1].endswith("operation not permitted when stream is capturing")


def test_a_rank_whose_gpu_works_keeps_no_note(
    memory: StandInMemory, one_rank: OneRank, tmp_path: Path
) -> None:
    for _ in range(3):
        found = one_rank.trial(tmp_path / "trials.json", ending(one_rank.streams.synchronize))
        assert isinstance(found, OneShotSums)


def test_batch_invariant_sums_are_all_of_one_kind(memory: StandInMemory) -> None:
    settings = worker_settings("m", batch_invariant=True, device="cuda", dtype="bfloat16")
    device = CudaDevice(settings, StandingGpu(), None, TritonKernels(gemm=reference))
    plain: list[Tensor] = []
    transport = device.tensor_transport()
    assert transport.all_reduce(Placement(num_ranks=2), plain.append) == plain.append
    assert not plain, "nothing was tried"


def test_workers_on_several_machines_or_with_an_old_torch_cannot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = Placement(num_stages=2, num_ranks=2, num_local_workers=2)
    sums = OneShotSums(torch.device("cuda", 0), place, lambda tensor: None)
    assert sums.missing() == "the workers do not see each other's GPUs"
    place = Placement(stage=1, num_stages=2, rank=1, num_ranks=3, num_local_workers=6)
    asked: list[tuple[int, ...]] = []

    def linked(*pair: int) -> bool:
        asked.append(pair)
        return True

    monkeypatch.setattr(one_shot_sums, "are_linked", linked)
    sums = OneShotSums(torch.device("cuda", 4), place, lambda tensor: None)
    assert sums.missing() == ""
    assert asked == [(4, 3), (4, 5)]
    monkeypatch.setattr(one_shot_sums, "OPERATION", "no_such_operation")
    assert sums.missing() == f"torch {torch.__version__} has no no_such_operation"


@pytest.mark.parametrize(
    ("status", "value", "expected"), [(0, 1, True), (0, 0, False), (101, 1, False)]
)
def test_gpus_are_linked_if_atomic_operations_reach_each_other(
    monkeypatch: pytest.MonkeyPatch, status: int, value: int, expected: bool
) -> None:
    def query(found: Any, attribute: int, one: int, other: int) -> int:
        assert (attribute, one, other) == (3, 0, 1)
        found._obj.value = value
        return status

    driver = SimpleNamespace(cuDeviceGetP2PAttribute=query)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    assert are_linked(0, 1) == expected


def test_without_a_driver_no_gpus_are_linked(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", fail)
    assert not are_linked(0, 1)


def test_torch_finds_the_process_group_of_the_ranks(one_rank: OneRank) -> None:
    """With torch itself, which has no symmetric memory on CPUs."""
    sums = OneShotSums(torch.device("cpu"), one_rank.placement, one_rank.plain.append)
    try:
        with pytest.raises(RuntimeError, match="does not support device type cpu"):
            sums.open()
        assert _resolve_process_group(GroupName("ranks of stage 0")).size() == 1
    finally:
        _unregister_process_group(GroupName("ranks of stage 0"))
