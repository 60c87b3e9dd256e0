"""Workers that share a model, each on a stand-in for a GPU."""

import socket
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from engine.worker.cuda.device import CudaDevice
from engine.worker.cuda.gpu import ChoosesSums
from engine.worker.cuda.kernels.library import NO_KERNELS, TritonKernels
from engine.worker.process.worker import Worker
from engine.worker.weights.checkpoint import Checkpoint
from tests.engine.worker.cuda.launching import StandInDevice
from tests.engine.worker.cuda.standing import StandingGpu, StandingTransport, gpu_settings
from tests.engine.worker.process.fleet import Fleet, placements

FLOAT32: Mapping[str, object] = {"dtype": "float32"}  # so that sums can be compared


class Watched(StandingGpu):
    """A GPU whose transport is known."""

    def tensor_transport(self, dtype: torch.dtype, sums: ChoosesSums) -> StandingTransport:
        self.carried = super().tensor_transport(dtype, sums)
        return self.carried


@contextmanager
def gpus(
    model: Path,
    stages: int,
    ranks: int,
    changes: Mapping[str, object] = FLOAT32,
    kernels: Sequence[TritonKernels] = (),
    *,
    has_graphs: bool = False,
    on_one_machine: bool = False,
) -> Iterator[tuple[Fleet, list[Watched]]]:
    """A worker on each of so many GPUs; `changes` are fields of their settings, `kernels` those of
    each worker. With `has_graphs` attention can be captured. Workers that are not `on_one_machine`
    do not see each other's GPUs."""
    preferred = Checkpoint.open(str(model)).preferred_format
    devices = [Watched(total_bytes=1 << 32) for _ in range(stages * ranks)]
    with socket.socket() as listener, ThreadPoolExecutor(len(devices)) as threads:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        rendezvous = f"127.0.0.1:{listener.getsockname()[1]}"
        places = placements(stages, ranks, rendezvous, listener.fileno())
        if on_one_machine:
            places = [
                replace(place, num_local_workers=len(places), local_index=place.index)
                for place in places
            ]
            for index, gpu in enumerate(devices):
                gpu.of_it.device = torch.device("cpu", index)

        def load(index: int) -> Worker:
            settings = gpu_settings(model, placement=places[index], **changes)
            own = kernels[index] if kernels else NO_KERNELS
            device = CudaDevice(settings, devices[index], preferred, own)
            if has_graphs:
                device = StandInDevice(settings, devices[index])
            return Worker.load(settings, lambda what, done, total: None, device)

        workers = list(threads.map(load, range(len(devices))))
        yield Fleet(workers, threads, ranks), devices
