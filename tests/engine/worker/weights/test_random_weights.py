import gc
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.errors import StartupError
from engine.worker.cpu.linears import packed_store
from engine.worker.ports import TensorSlice, dequantize, format_of
from engine.worker.process.worker import Worker
from engine.worker.weights import random as random_weights
from engine.worker.weights.formats import FORMATS
from engine.worker.weights.random import SPREAD, RandomWeights
from engine.worker_settings import WorkerSettings
from tests.engine.worker.process.driving import Driver, load_worker
from tests.models.checkpoints import make_checkpoint


def source(dtype: torch.dtype = torch.float32) -> RandomWeights:
    return RandomWeights(dtype, lambda *_: None)


def load(name: str, *shape: int, rows: range | None = None, columns: range | None = None) -> Tensor:
    return source().tensor(TensorSlice(name, shape, rows, columns))


def test_a_slice_equals_that_part_of_the_whole_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_weights, "CHUNK", 100)
    whole = load("a.weight", 37, 24)
    assert torch.equal(load("a.weight", 37, 24, rows=range(5, 30)), whole[5:30])
    assert torch.equal(load("a.weight", 37, 24, columns=range(8, 16)), whole[:, 8:16])
    part = TensorSlice("a.weight", (24, 37), rows=range(8, 16), is_transposed=True)
    assert torch.equal(source().weight(part), whole[:, 8:16].t())
    bias = load("a.bias", 37)
    assert torch.equal(load("a.bias", 37, rows=range(5, 30)), bias[5:30])


def test_memory_is_used_again_only_when_a_tensor_and_its_views_are_gone() -> None:
    weights, size = source(), (512, 512)
    first = weights.tensor(TensorSlice("a.weight", size))
    expected, view = first.clone(), first[3:5].t()
    address = first.data_ptr()
    del first
    second = weights.tensor(TensorSlice("b.weight", size))
    assert second.data_ptr() != address
    assert torch.equal(view.t(), expected[3:5])
    del view
    gc.collect()
    third = weights.tensor(TensorSlice("c.weight", size))
    assert third.data_ptr() == address
    assert torch.equal(third, load("c.weight", *size))
    assert torch.equal(second, load("b.weight", *size))


def test_a_tied_head_is_the_embedding_generated_before() -> None:
    weights, part = source(), TensorSlice("embed.weight", (64, 32))
    embedding = weights.tensor(part)
    assert weights.weight(part) is embedding


def test_rows_that_are_looked_up_are_those_of_the_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_weights, "CHUNK", 100)
    ids = torch.tensor([3, 0, 36, 3])
    for part in (
        TensorSlice("a.weight", (37, 24)),
        TensorSlice("a.weight", (40, 24), rows=range(2, 39), columns=range(8, 16)),
    ):
        for dtype in (torch.float32, torch.bfloat16):
            found = source(dtype).lookup(part)(ids)
            assert torch.equal(found, source(dtype).tensor(part)[ids])


def test_a_model_is_made_in_blocks_that_are_small_beside_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The numbers of a matrix exist in float32 only for some rows at a time, and not afterwards."""
    prompt, chunk, max_made = list(range(3000, 3040)), 1 << 14, 1 << 16
    monkeypatch.setattr(random_weights, "CHUNK", chunk)
    whole = load_worker("random:TINY", attention="cpu", weights="int8")
    sizes: list[int] = []
    buffers: set[random_weights._Buffers] = set()
    take = random_weights._Buffers.take

    def recorded(self: random_weights._Buffers, size: int, start: int, stop: int) -> object:
        sizes.append(size)
        buffers.add(self)
        return take(self, size, start, stop)

    monkeypatch.setattr(random_weights._Buffers, "take", recorded)
    monkeypatch.setattr(packed_store, "MAX_MADE", max_made)
    worker = load_worker("random:TINY", attention="cpu", weights="int8")
    assert sum(sizes) > 32_000 * 64  # the head
    assert max(sizes) <= max_made + 2 * chunk
    assert [each._free for each in buffers] == [[]]
    assert Driver(worker).generate(0, prompt, 8) == Driver(whole).generate(0, prompt, 8)


def test_blocks_of_rows_are_joined_in_every_format() -> None:
    part = TensorSlice("a.weight", (96, 64))
    whole = source().tensor(part)
    for format in FORMATS.values():
        blocks = [
            format.convert(source().tensor(block))
            for block in packed_store.row_blocks(part, 40 * 64)
        ]
        assert len(blocks) == 3
        joined, expected = packed_store.join_rows(blocks), format.convert(whole)
        assert format_of(joined) == format_of(expected)
        assert torch.equal(dequantize(joined), dequantize(expected))


def test_tensors_differ_by_name_and_have_the_spread_of_fresh_checkpoints() -> None:
    one, other = load("a.weight", 512, 512), load("b.weight", 512, 512)
    assert not torch.equal(one, other)
    assert one.abs().max() <= SPREAD
    assert one.std().item() == pytest.approx(0.02, rel=0.01)
    assert one.mean().item() == pytest.approx(0.0, abs=1e-4)
    assert torch.equal(load("norm.weight", 8), torch.ones(8))
    assert source(torch.bfloat16).tensor(TensorSlice("a.weight", (8, 8))).dtype == torch.bfloat16


def test_a_tensor_larger_than_the_available_memory_is_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(random_weights, "available_bytes", lambda: 1000)
    with pytest.raises(StartupError, match=r"tensor a.weight needs 1024 bytes, but 1000 bytes of"):
        load("a.weight", 16, 16)


def test_a_model_larger_than_the_available_memory_is_rejected_before_it_is_generated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(random_weights, "available_bytes", lambda: 1 << 23)
    with pytest.raises(
        StartupError, match=r"the model's weights need [\d.]+ MiB, but 8.0 MiB of memory"
    ):
        load_worker("random:TINY", attention="cpu")


def test_a_worker_generates_from_a_random_shape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    worker = load_worker("random:TINY", attention="cpu")
    assert worker.report.num_parameters == 4_170_048
    prompt = list(range(3000, 3040))
    tokens = Driver(worker).generate(0, prompt, 8)
    assert tokens == Driver(load_worker("random:TINY"), seed=1).generate(0, prompt, 8)
    assert len(set(tokens)) > 1


def test_a_checkpoint_larger_than_the_available_memory_is_rejected_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path)
    progress: list[str] = []
    monkeypatch.setattr(random_weights, "available_bytes", lambda: 1000)
    with pytest.raises(StartupError, match=r"the model's weights need .* 1000 bytes of memory"):
        Worker.load(WorkerSettings(model=str(tmp_path)), lambda label, *_: progress.append(label))
    assert "weights" not in progress
