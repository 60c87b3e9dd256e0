from ctypes import c_float
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from engine.lora import LoraSpec
from engine.step import SampleSpec, Step, StepId
from engine.worker.cuda.kernels.library import TritonKernels
from engine.worker.cuda.model.loras import CudaLoras
from engine.worker.cuda.step import transfers
from tests.engine.worker.cuda.adapters import an_adapter
from tests.engine.worker.cuda.launching import on_stand_ins
from tests.engine.worker.cuda.standin import StandInStreams
from tests.engine.worker.process.driving import GREEDY, Driver, load_worker
from tests.models.checkpoints import make_checkpoint
from tests.models.loras import make_lora


def decode(driver: Driver, loras: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The tokens of a prompt and five decodes of one request for each adapter."""
    feeds, found = [[3 + i, 7, 11] for i in range(len(loras))], []
    for number in range(6):
        entries = tuple(
            driver.entry(i, feed, SampleSpec(GREEDY))._replace(lora_id=lora_id)
            for i, (feed, lora_id) in enumerate(zip(feeds, loras, strict=True))
        )
        found.append(driver.worker.run(Step(StepId(number), entries)).tokens)
        feeds = [[token] for token in found[-1]]
    return found


class Table(NamedTuple):
    """See `kernels.lora.LoraTable`."""

    entries: Tensor
    blocks: Tensor
    max_ranks: int


def floats_at(address: int, *shape: int) -> Tensor:
    count = prod(shape)
    return torch.frombuffer((c_float * count).from_address(address), dtype=torch.float32).view(
        shape
    )


def add_low_rank(x: Tensor, y: Tensor, table: Table, slots: Tensor) -> None:
    """Plain torch, with what a kernel would read from the device's memory when it runs."""
    entries, blocks = table.entries.numpy(), table.blocks.numpy()
    for row, slot in enumerate(slots.numpy()):
        if slot < 0:
            continue
        address, ranks, *parts = (int(number) for number in entries[slot])
        if not ranks:
            continue
        inner = floats_at(address, ranks, x.shape[1]) @ x[row]
        for part in sorted({int(each[0]) for each in blocks}):
            address, first, count = parts[3 * part : 3 * part + 3]
            own = blocks[blocks[:, 0] == part]
            start, end = int(own[0, 1]), int(own[:, 3].max())
            if address:
                factor = floats_at(address, end - start, count)
                y[row, start:end] += factor @ inner[first : first + count]


KERNELS = TritonKernels(
    lora=SimpleNamespace(add_low_rank=add_low_rank, LoraTable=Table, COLUMNS=16)  # type: ignore[arg-type]
)


class Waits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts copies from the host to the device, on meta here, for which torch would wait: those
    that are not given to the streams."""

    def __init__(self, streams: StandInStreams) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._streams = streams
        self._copy = streams.copy
        self._is_given = False
        self.count = 0
        streams.copy = self._given  # type: ignore[method-assign]

    def _given(self, target: Tensor, source: Tensor) -> None:
        self._is_given = True
        self._copy(target, source)
        self._is_given = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        places = {each.device.type for each in args if isinstance(each, Tensor)}
        if "_to_copy" in str(func):
            places.add(torch.device((kwargs or {}).get("device") or "cpu").type)
        if len(places) > 1 and not self._is_given:
            self.count += 1
        return func(*args, **(kwargs or {}))


def test_an_adapter_is_copied_to_the_gpu_without_waiting_for_it() -> None:
    streams = StandInStreams()
    streams.device = torch.device("meta")
    loras = CudaLoras(streams, torch.bfloat16, KERNELS.lora, 8)
    factors = an_adapter(12, [4, 6], [2, 3], torch.float32, seed=1)
    slots = loras.slots([4, 6])
    assert slots is not None
    with Waits(streams) as waits:
        for slot in range(3):
            moved = loras.low_rank(factors.down, factors.ups)
            slots.put(slot, moved)
    assert (waits.count, streams.num_host_waits) == (0, 0)
    weights = [moved.down, *(up.weight for up in moved.ups)]
    assert {(each.device.type, each.dtype) for each in weights} == {("meta", torch.bfloat16)}


def test_a_large_factor_is_copied_through_several_pinned_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transfers, "EXACT_BYTES", 64)
    streams = StandInStreams()
    source = torch.arange(200.0).view(20, 10).t()
    assert torch.equal(transfers.put(streams, source, torch.bfloat16), source.bfloat16())
    assert streams.pinned_bytes == 400
    assert max(each.nbytes for each in streams._pinned.values()) < 64


@pytest.mark.parametrize("weights", ["float32", "int4"])
def test_decodes_with_adapters_replay_graphs_that_were_captured_before_some_were_loaded(
    tmp_path: Path, weights: str
) -> None:
    base = make_checkpoint(tmp_path / "base")
    cpu = load_worker(base, weights=weights, activation_bits="14")
    specs = [
        LoraSpec(number, "it", str(make_lora(tmp_path / str(number), seed=number)))
        for number in (1, 2, 3)
    ]
    on_gpu = on_stand_ins(base, KERNELS, max_batch_size=6, weights=weights, loras=(specs[0],))
    cpu.load_lora(specs[0])
    for spec in specs[1:]:
        assert cpu.load_lora(spec).error == on_gpu.worker.load_lora(spec).error == ""
    graphs = on_gpu.device.streams.graphs
    for loras in ((1, 1, 2), (0, 1, 3), (0, 0, 0, 0, 2), (0, 0)):
        before = sum(graph.num_replays for graph in graphs)
        found = decode(Driver(on_gpu), loras)  # type: ignore[arg-type]
        assert found == decode(Driver(cpu), loras)
        num_eager = 1 if any(loras) else 0  # the prompts
        assert sum(graph.num_replays for graph in graphs) - before == 6 - num_eager
    for worker in (cpu, on_gpu.worker):
        worker.unload_lora(2)
        worker.load_lora(specs[1]._replace(lora_id=4, path=specs[2].path))
    assert decode(Driver(on_gpu), (4, 1)) == decode(Driver(cpu), (4, 1))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("cuda_graphs", "weights"), [(True, "float32"), (False, "float32"), (True, "int4")]
)
def test_tokens_are_those_of_the_cpu_and_without_kernels_adapters_replay_no_graph(
    tmp_path: Path, cuda_graphs: bool, weights: str
) -> None:
    base = make_checkpoint(tmp_path / "base")
    cpu = load_worker(base, weights=weights, activation_bits="14")
    on_gpu = on_stand_ins(base, cuda_graphs=cuda_graphs, max_batch_size=6, weights=weights)
    for lora_id in (1, 2):
        spec = LoraSpec(lora_id, "it", str(make_lora(tmp_path / str(lora_id), seed=lora_id)))
        assert cpu.load_lora(spec).error == on_gpu.worker.load_lora(spec).error == ""
    for loras, replays in (((1, 1, 2), 0), ((0, 1, 2), 0), ((0, 0, 0, 0, 2), 0), ((0, 0), 6)):
        before = sum(graph.num_replays for graph in on_gpu.device.streams.graphs)
        found = decode(Driver(on_gpu), loras)  # type: ignore[arg-type]
        assert found == decode(Driver(cpu), loras)
        after = sum(graph.num_replays for graph in on_gpu.device.streams.graphs)
        assert after - before == replays * cuda_graphs
