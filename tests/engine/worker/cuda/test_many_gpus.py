"""Workers on several stand-ins of GPUs: what arrives is settled before it is read."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import distributed

from engine.errors import StartupError, WorkerLost
from engine.lora import LoraSpec
from engine.step import SampleSpec, Step, StepId
from engine.worker.cuda.gpu import NcclTransport
from engine.worker.model.stage import Stage
from engine.worker.process.entry import launch
from tests.engine.worker.cuda.fleet import gpus
from tests.engine.worker.process.driving import GREEDY, Driver, load_worker
from tests.models.checkpoints import make_checkpoint


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
        with ThreadPoolExecutor(1, "podway-lora") as threads:
            spec = LoraSpec(1, "none", str(tmp_path / "none"))
            report = threads.submit(workers.workers[1].load_lora, spec).result()
        assert report.error
        assert last.threads == {"podway-lora_0"}


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
        NcclTransport.open(torch.device("cuda", 0), torch.bfloat16)
