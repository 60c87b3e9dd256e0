"""Rounded weights are kept for the next start, and nothing that is wrong with that stops one."""

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

from engine.worker.model.shard import Shard
from engine.worker.ports import WeightSource
from engine.worker.process.worker import Worker
from engine.worker.weights import quantized_cache as module
from engine.worker.weights.checkpoint import Checkpoint
from engine.worker.weights.int8_weight import Int8Weight, quantize
from engine.worker.weights.source import Weights
from tests.checkpoints import make_checkpoint
from tests.engine.worker.process.driving import Driver, settings_for

NAME = "model.layers.1.mlp.down_proj.weight"  # [32, 48]
TOKENS = [3, 14, 15, 92, 65, 35]


class Taking(NamedTuple):
    """A source of rounded weights, and the one below it."""

    source: WeightSource
    below: Weights

    def take(self, columns: range | None = None) -> Int8Weight:
        found = self.source.take_matrix(NAME, 32, 48, columns=columns)
        assert isinstance(found, Int8Weight)
        return Int8Weight(found.values.clone(), found.scales.clone())

    @property
    def has_read(self) -> bool:
        return self.below.num_taken > 0


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    return make_checkpoint(directory)


@contextmanager
def opened(checkpoint: Path, cache: Path, rank: int = 0, num_ranks: int = 1) -> Iterator[Taking]:
    found = Checkpoint.open(str(checkpoint))
    weights = found.open_weights(torch.float32, lambda *_: None)
    assert isinstance(weights, Weights)
    shard = replace(Shard.whole(found.family.shape), rank=rank, num_ranks=num_ranks)
    with found.quantizing(weights, shard, str(cache)) as source:
        yield Taking(source, weights)


def load(checkpoint: Path, cache: str) -> Tensor:
    """The logits of a worker that is started so."""
    settings = settings_for(checkpoint, "cpu", weights="int8")
    return Driver(Worker.load(replace(settings, cache_dir=cache), lambda *_: None)).logits(
        (0, TOKENS)
    )[0]


def kept(cache: Path) -> list[Path]:
    return sorted((cache / module.FOLDER).glob("*"))


def same(one: Int8Weight, other: Int8Weight) -> bool:
    return torch.equal(one.values, other.values) and torch.equal(one.scales, other.scales)


def test_the_second_start_finds_what_the_first_rounded(checkpoint: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with opened(checkpoint, cache) as first:
        original = first.take()
        assert first.has_read
    with opened(checkpoint, cache) as second:
        assert same(second.take(), original)
        assert not second.has_read
    plain = load_file(checkpoint / "model.safetensors")[NAME]
    assert same(original, quantize(plain))
    assert len(kept(cache)) == 1


def test_a_worker_answers_the_same_from_what_was_kept(checkpoint: Path, tmp_path: Path) -> None:
    without, first, second = (
        load(checkpoint, cache) for cache in ("", str(tmp_path), str(tmp_path))
    )
    assert torch.equal(first, second)
    assert torch.equal(first, without)


def test_each_share_has_a_file_of_its_own(checkpoint: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    parts = [range(24), range(24, 48)]
    for rank, part in enumerate(parts):
        with opened(checkpoint, cache, rank, 2) as first:
            original = first.take(part)
        with opened(checkpoint, cache, rank, 2) as second:
            assert same(second.take(part), original)
            assert not second.has_read
    assert len(kept(cache)) == 2


def test_a_part_that_was_not_kept_is_rounded(checkpoint: Path, tmp_path: Path) -> None:
    with opened(checkpoint, tmp_path) as first:
        first.take(range(24))
    with opened(checkpoint, tmp_path) as second:
        assert second.take().shape == (32, 48)
        assert second.has_read


def test_another_checkpoint_in_its_place_is_rounded_again(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(checkpoint, tmp_path) as first:
        before = first.take()
    path = checkpoint / "model.safetensors"
    tensors = load_file(path)
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, path)
    os.utime(path, ns=(1, 1))
    for has_read in (True, False):
        with opened(checkpoint, tmp_path) as again:
            assert not same(again.take(), before)
            assert again.has_read is has_read
    assert "rounded again" in caplog.text
    assert len(kept(tmp_path)) == 1


@pytest.mark.parametrize("harm", ["cut", "empty", "text", "foreign", "folder"])
def test_a_broken_or_foreign_file_is_said_to_be_so(
    checkpoint: Path, tmp_path: Path, harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(checkpoint, tmp_path) as first:
        original = first.take()
    (path,) = kept(tmp_path)
    content = path.read_bytes()
    if harm == "foreign":
        save_file({NAME: torch.ones(3)}, path)
    elif harm == "folder":
        path.unlink()
        path.mkdir()
    else:
        path.write_bytes({"cut": content[:-5], "empty": b"", "text": b"hello, world" * 9}[harm])
    with opened(checkpoint, tmp_path) as again:
        assert same(again.take(), original)
        assert again.has_read
    assert str(path) in caplog.text
    if harm == "folder":
        return  # which stays
    with opened(checkpoint, tmp_path) as healed:
        healed.take()
        assert not healed.has_read


def test_where_nothing_can_be_kept_one_line_says_so(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with opened(checkpoint, blocked) as source:
        assert source.take().shape == (32, 48)
    lines = [one for one in caplog.records if one.levelno >= logging.WARNING]
    assert len(lines) == 1
    assert "not kept for the next start" in lines[0].getMessage()


def test_a_full_disk_costs_the_file_and_nothing_else(
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(module._New, "_write", full)
    with opened(checkpoint, tmp_path) as source:
        first = source.take()
        assert same(source.take(), first)
    assert kept(tmp_path) == []
    assert caplog.text.count("no space left") == 1


def test_a_start_that_fails_leaves_nothing_behind(checkpoint: Path, tmp_path: Path) -> None:
    def start() -> None:
        with opened(checkpoint, tmp_path) as source:
            source.take()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        start()
    assert kept(tmp_path) == []


def test_two_starts_at_once_do_not_disturb_each_other(checkpoint: Path, tmp_path: Path) -> None:
    with opened(checkpoint, tmp_path) as one, opened(checkpoint, tmp_path) as other:
        assert same(one.take(), other.take())
    with opened(checkpoint, tmp_path) as later:
        later.take()
        assert not later.has_read
    assert len(kept(tmp_path)) == 1
