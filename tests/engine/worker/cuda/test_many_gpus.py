"""Workers on several stand-ins of GPUs: what arrives is settled before it is read."""

from pathlib import Path

import pytest
import torch
from torch import distributed

from engine.errors import StartupError
from engine.worker.cuda.nccl import NcclTransport
from tests.engine.worker.cuda.fleet import gpus
from tests.engine.worker.process.driving import Driver, load_worker
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


def test_without_nccl_several_workers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "is_nccl_available", lambda: False)
    with pytest.raises(StartupError, match="several workers on GPUs need NCCL, which torch "):
        NcclTransport.open(torch.device("cuda", 0), torch.bfloat16)
