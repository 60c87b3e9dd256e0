"""Ranks on two GPUs that read each other's memory: their sums beside NCCL's."""

import multiprocessing
import os
import socket

import pytest
import torch

from engine.worker.cuda.device import CudaDevice
from engine.worker.cuda.one_shot_sums import DTYPES, OneShotSums, are_linked
from engine.worker.cuda.streams import CudaStreams
from engine.worker.model.kv.data_plane import DataPlane
from engine.worker.ports import PreferredFormat
from engine.worker_settings import Placement
from tests.worker_settings import worker_settings

NUM_REPLAYS = 200
SECONDS = 300.0
HAS_TWO = torch.cuda.device_count() > 1


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_TWO or not are_linked(0, 1), reason="needs two GPUs with NVLink")
def test_sums_of_two_ranks_are_nccls_bits_eagerly_and_in_a_graph() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    fresh = multiprocessing.get_context("spawn")
    ranks = [fresh.Process(target=run_rank, args=(rank, port)) for rank in range(2)]
    try:
        for each in ranks:
            each.start()
        for each in ranks:
            each.join(timeout=SECONDS)
        assert [each.exitcode for each in ranks] == [0, 0]
    finally:
        for each in ranks:
            each.kill()


def run_rank(rank: int, port: int) -> None:
    """A sum of two numbers has one rounding, whatever computes it."""
    placement = Placement(
        rank=rank,
        num_ranks=2,
        rendezvous=f"127.0.0.1:{port}",
        num_local_workers=2,
        local_index=rank,
    )
    settings = worker_settings("m", device="cuda", attention="reference", placement=placement)
    device = CudaDevice.open(settings, PreferredFormat())
    transport, place = device.tensor_transport(), torch.device("cuda", rank)
    plane = DataPlane.join(placement, transport)
    sums = transport.all_reduce(placement, plane.all_reduce)
    assert isinstance(sums, OneShotSums)
    with torch.inference_mode():
        for dtype in DTYPES:
            most = sums.max_bytes // dtype.itemsize
            for count in (2, 34, 4096, 5 * 4096, most, most + 2):
                given = torch.randn(count, device=place).to(dtype)
                found, wanted = given.clone(), given.clone()
                sums(found)
                plane.all_reduce(wanted)
                assert torch.equal(found, wanted), (dtype, count)
        given = torch.zeros(16, 4096, dtype=torch.bfloat16, device=place)

        def twice() -> torch.Tensor:
            first = given.clone()
            sums(first)
            second = first + given
            sums(second)
            return second

        graph, result = CudaStreams(place).capture(twice)
        for replay in range(NUM_REPLAYS):
            given.fill_(replay + rank)
            graph.replay()
            total = 2 * replay + 1
            first = torch.tensor(float(total)).bfloat16()
            wanted = (first + replay) + (first + (replay + 1))
            assert torch.equal(result.cpu(), wanted.expand_as(result)), replay
    os._exit(0)  # as a worker does: NCCL's threads may wait
