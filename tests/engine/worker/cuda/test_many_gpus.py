"""Workers on several stand-ins of GPUs: what arrives is settled before it is read."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed

from engine.errors import StartupError, WorkerLost
from engine.lora import LoraSpec
from engine.step import SampleSpec, Step, StepId
from engine.transport.wire import LoadLora
from engine.worker.cuda.gpu import NcclTransport, TorchGpu
from engine.worker.model.stage import Stage
from engine.worker.process.entry import LoraThread, launch
from tests.engine.worker.cuda.fleet import gpus
from tests.engine.worker.cuda.launching import on_stand_ins
from tests.engine.worker.process.driving import GREEDY, Driver, load_worker
from tests.models.checkpoints import make_checkpoint


class Parent:
    """Keeps what a worker sends."""

    def __init__(self) -> None:
        self.sent: SimpleQueue[bytearray] = SimpleQueue()

    def send(self, message: bytearray) -> None:
        self.sent.put(message)


@pytest.mark.parametrize(("stages", "ranks", "groups"), [(2, 1, 1), (1, 2, 1), (2, 2, 2)])
def test_shards_on_gpus_compute_what_one_computes(
    tmp_path: Path, stages: int, ranks: int, groups: int
) -> None:
    make_checkpoint(tmp_path, "llama")
    alone = Driver(load_worker(tmp_path), seed=1)
    with gpus(tmp_path, stages, ranks) as (workers, devices):
        together = Driver(workers, seed=1)
        for piece in ((0, range(1, 12)), (1, (4, 5)), (0, (3,))):
            wanted, found = alone.logits(piece), together.logits(piece)
            torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
        assert all(device.carried.num_groups == groups for device in devices)
        later = devices[ranks:]
        assert all(device.carried.num_settled > 3 for device in later)
        assert all(device.carried.num_settled == 0 for device in devices[:ranks])


def test_a_header_is_sent_when_the_device_has_computed_what_follows_it(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    seen: list[int] = []
    with gpus(tmp_path, 2, 1) as (workers, (first, last)):
        before = first.carried.num_computed
        last.carried.on_header = lambda: seen.append(first.carried.num_computed - before)
        Driver(workers).generate(0, [1, 2, 3], 4)
        assert last.carried.num_computed == 0, "the last stage sends none"
    assert seen == [1, 2, 3, 4]


def test_every_thread_that_uses_a_gpu_makes_it_the_current_one(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    with gpus(tmp_path, 2, 1) as (workers, (_, last)):
        entry = Driver(workers).entry(0, [5, 6], SampleSpec(GREEDY))
        step = Step(StepId(1), (entry,))
        last.threads.clear()
        workers.workers[1].learn(step)
        workers.run(step)
        assert "podway-inbox" in last.threads
        last.threads.clear()
        messages: Any = Parent()
        LoraThread(messages, workers.workers[1]).put(LoadLora(LoraSpec(1, "none", str(tmp_path))))
        assert messages.sent.get(timeout=60)
        assert last.threads == {"podway-lora"}
    alone = on_stand_ins(tmp_path)
    launched = alone.launch(Step(StepId(1), (Driver(alone.worker).entry(0, [5], None),)))
    alone.device.gpu.threads.clear()
    with ThreadPoolExecutor(1, "podway-answers") as threads:
        threads.submit(launched.collect).result()
    assert alone.device.gpu.threads == {"podway-answers_0"}


def test_the_current_gpu_is_that_of_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    current: dict[str, torch.device] = {}
    properties = SimpleNamespace(name="GPU", major=9, minor=0, total_memory=1 << 30)

    def set_device(place: torch.device) -> None:
        current[threading.current_thread().name] = place

    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    gpu = TorchGpu(1)
    other = threading.Thread(target=gpu.enter_thread, name="other")
    other.start()
    other.join()
    wanted = torch.device("cuda", 1)
    assert current == {threading.current_thread().name: wanted, "other": wanted}


def test_a_device_that_has_failed_ends_its_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path, "llama")

    def fault(*_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with gpus(tmp_path, 2, 1) as (workers, (first, _)):
        step = Step(StepId(1), (Driver(workers).entry(0, [5, 6], SampleSpec(GREEDY)),))
        monkeypatch.setattr(Stage, "run", fault)
        first.of_it.fault = "an illegal memory access was encountered"
        with pytest.raises(WorkerLost, match="the GPU failed: an illegal memory access"):
            launch(workers.workers[0], step)


def test_without_nccl_several_workers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "is_nccl_available", lambda: False)
    with pytest.raises(StartupError, match="several workers on GPUs need NCCL, which torch "):
        NcclTransport.open(torch.device("cuda", 0), torch.bfloat16, lambda place, plain: plain)
