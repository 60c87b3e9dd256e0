"""Quantized weights are cached for the next start, and a broken cache never prevents one."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.worker.ports import Shard, TensorSlice, WeightSource
from engine.worker.process.worker import Worker
from engine.worker.weights import quantized_cache as module
from engine.worker.weights.checkpoint import Checkpoint
from engine.worker.weights.formats.int8 import INT8, Int8Weight, quantize
from engine.worker.weights.source import Weights
from tests.checkpoints import make_checkpoint
from tests.engine.worker.process.driving import Driver, settings_for

NAME = "model.layers.1.mlp.down_proj.weight"  # [32, 48]
TOKENS = [3, 14, 15, 92, 65, 35]


class Opened(NamedTuple):
    """A source of quantized weights, and the source of floats that it quantizes."""

    source: WeightSource
    below: Weights

    def load(self, columns: range | None = None) -> Int8Weight:
        found = self.source.weight(TensorSlice(NAME, (32, 48), columns=columns))
        assert isinstance(found, Int8Weight)
        return Int8Weight(found.values.clone(), found.scales.clone())

    @property
    def has_read(self) -> bool:
        return self.below.num_loaded > 0


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    return make_checkpoint(directory)


@contextmanager
def opened(checkpoint: Path, cache: Path, rank: int = 0, num_ranks: int = 1) -> Iterator[Opened]:
    found = Checkpoint.open(str(checkpoint))
    weights = found.open_weights(torch.float32, lambda *_: None)
    assert isinstance(weights, Weights)
    shard = replace(Shard.whole(found.family.shape), rank=rank, num_ranks=num_ranks)
    with found.converted(weights, INT8, shard, str(cache)) as source:
        yield Opened(source, weights)


def load(checkpoint: Path, cache: str) -> Tensor:
    """The logits of a worker that is started so."""
    settings = settings_for(checkpoint, "cpu", weights="int8")
    return Driver(Worker.load(replace(settings, cache_dir=cache), lambda *_: None)).logits(
        (0, TOKENS)
    )[0]


def cache_files(cache: Path) -> list[Path]:
    return sorted((cache / module.FOLDER).glob("*"))


def same(one: Int8Weight, other: Int8Weight) -> bool:
    return torch.equal(one.values, other.values) and torch.equal(one.scales, other.scales)


def test_the_second_start_loads_what_the_first_quantized(checkpoint: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with opened(checkpoint, cache) as first:
        original = first.load()
        assert first.has_read
    with opened(checkpoint, cache) as second:
        assert same(second.load(), original)
        assert not second.has_read
    plain = load_file(checkpoint / "model.safetensors")[NAME]
    assert same(original, quantize(plain))
    assert len(cache_files(cache)) == 1


def test_a_worker_computes_the_same_logits_from_the_cache(checkpoint: Path, tmp_path: Path) -> None:
    without, first, second = (
        load(checkpoint, cache) for cache in ("", str(tmp_path), str(tmp_path))
    )
    assert torch.equal(first, second)
    assert torch.equal(first, without)


def test_each_rank_has_its_own_cache_file(checkpoint: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    parts = [range(24), range(24, 48)]
    for rank, part in enumerate(parts):
        with opened(checkpoint, cache, rank, 2) as first:
            original = first.load(part)
        with opened(checkpoint, cache, rank, 2) as second:
            assert same(second.load(part), original)
            assert not second.has_read
    assert len(cache_files(cache)) == 2


def test_a_slice_that_was_not_cached_is_quantized(checkpoint: Path, tmp_path: Path) -> None:
    with opened(checkpoint, tmp_path) as first:
        first.load(range(24))
    with opened(checkpoint, tmp_path) as second:
        assert second.load().shape == (32, 48)
        assert second.has_read


def test_a_changed_checkpoint_is_quantized_again(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(checkpoint, tmp_path) as first:
        before = first.load()
    path = checkpoint / "model.safetensors"
    tensors = load_file(path)
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, path)
    os.utime(path, ns=(1, 1))
    for has_read in (True, False):
        with opened(checkpoint, tmp_path) as again:
            assert not same(again.load(), before)
            assert again.has_read is has_read
    assert "quantized again" in caplog.text
    assert len(cache_files(tmp_path)) == 1


@pytest.mark.parametrize("harm", ["cut", "empty", "text", "foreign", "folder"])
def test_a_broken_or_foreign_cache_file_is_logged_and_replaced(
    checkpoint: Path, tmp_path: Path, harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(checkpoint, tmp_path) as first:
        original = first.load()
    (path,) = cache_files(tmp_path)
    content = path.read_bytes()
    if harm == "foreign":
        save_file({NAME: torch.ones(3)}, path)
    elif harm == "folder":
        path.unlink()
        path.mkdir()
    else:
        path.write_bytes({"cut": content[:-5], "empty": b"", "text": b"hello, world" * 9}[harm])
    with opened(checkpoint, tmp_path) as again:
        assert same(again.load(), original)
        assert again.has_read
    assert str(path) in caplog.text
    if harm == "folder":
        return  # which stays
    with opened(checkpoint, tmp_path) as healed:
        healed.load()
        assert not healed.has_read


def test_one_line_is_logged_where_no_cache_can_be_written(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with opened(checkpoint, blocked) as source:
        assert source.load().shape == (32, 48)
    lines = [one for one in caplog.records if one.levelno >= logging.WARNING]
    assert len(lines) == 1
    assert "not cached for the next start" in lines[0].getMessage()


def test_a_full_disk_costs_only_the_cache_file(
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(module._CacheWriter, "_write", full)
    with opened(checkpoint, tmp_path) as source:
        first = source.load()
        assert same(source.load(), first)
    assert cache_files(tmp_path) == []
    assert caplog.text.count("no space left") == 1


def test_a_start_that_fails_leaves_no_file_behind(checkpoint: Path, tmp_path: Path) -> None:
    def start() -> None:
        with opened(checkpoint, tmp_path) as source:
            source.load()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        start()
    assert cache_files(tmp_path) == []


def test_two_starts_at_once_do_not_interfere(checkpoint: Path, tmp_path: Path) -> None:
    with opened(checkpoint, tmp_path) as one, opened(checkpoint, tmp_path) as other:
        assert same(one.load(), other.load())
    with opened(checkpoint, tmp_path) as later:
        later.load()
        assert not later.has_read
    assert len(cache_files(tmp_path)) == 1
