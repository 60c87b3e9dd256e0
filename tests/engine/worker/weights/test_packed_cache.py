import faulthandler
import json
import logging
import mmap
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf.constants import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.errors import StartupError, WorkerLost
from engine.worker.cpu import device as cpu_device
from engine.worker.cpu.device import CpuDevice
from engine.worker.ports import PreferredFormat, Shard
from engine.worker.process.worker import Worker
from engine.worker.weights import packed_file
from engine.worker.weights.checkpoint import Checkpoint
from engine.worker.weights.packed_file import PackedEntry
from engine.worker.weights.source import Weights
from engine.worker_settings import WorkerSettings
from tests.engine.transport.process_memory import (
    cached_pages,
    frees_cached_pages,
    write_to_disk,
)
from tests.engine.worker.process.driving import Driver, settings_for
from tests.engine.worker.weights.packed_files import (
    LARGE,
    add,
    cache_of,
    cached_files,
    flip,
    opened,
    until_published,
)
from tests.models.checkpoints import make_checkpoint
from tests.models.gguf_files import Gguf
from tests.worker_settings import changed

TOKENS = [3, 14, 15, 92, 65, 35]
FORMATS = ["float32", "int8", "int4"]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    return make_checkpoint(directory)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def cached(checkpoint: Path, cache: Path | str, weights: str = "float32") -> WorkerSettings:
    """Settings with this cache."""
    return changed(settings_for(checkpoint, "cpu", weights=weights), packed_cache=str(cache))


def logits(checkpoint: Path, cache: Path | str, weights: str = "float32") -> Tensor:
    """The logits of a worker that is started so."""
    worker = Worker.load(cached(checkpoint, cache, weights), lambda *_: None)
    until_published()
    return Driver(worker).logits((0, TOKENS))[0]


def build(checkpoint: Path, cache: Path, weights: str = "float32", **values: object) -> int:
    """Build a model as a worker does; returns how many elements were read from the checkpoint."""
    found, settings = Checkpoint.open(str(checkpoint)), cached(checkpoint, cache, weights)
    settings = changed(settings, **values)
    device = CpuDevice(settings, PreferredFormat())
    source = found.open_weights(torch.float32, lambda *_: None)
    assert isinstance(source, Weights)
    shard = Shard.whole(found.family.shape)
    packed = found.packed_cache(shard, settings)
    with device.source(source, packed, 1) as deferred:
        found.family.build(deferred, shard, device.operators())
    until_published()
    return source.num_loaded


def test_a_gguf_file_of_several_formats_is_found_in_the_cache(tmp_path: Path, cache: Path) -> None:
    """A fused linear of weights in two formats is several entries of the file."""
    path = tmp_path / "model.gguf"
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    Gguf("llama", Kind.Q4_K, kinds={"attn_v": Kind.Q6_K}, changes=sizes).write(path)
    plain = logits(path, "", "auto")
    assert torch.equal(logits(path, cache, "auto"), plain)
    (file,) = cached_files(cache)
    written = file.stat().st_ino
    assert torch.equal(logits(path, cache, "auto"), plain)
    assert [one.stat().st_ino for one in cached_files(cache)] == [written]


@pytest.mark.parametrize("weights", FORMATS)
def test_the_second_start_reads_no_matrix_and_computes_the_same_logits(
    checkpoint: Path, cache: Path, weights: str
) -> None:
    without, first = logits(checkpoint, "", weights), logits(checkpoint, cache, weights)
    assert torch.equal(first, without)
    assert torch.equal(logits(checkpoint, cache, weights), without)
    assert len(cached_files(cache)) == 1
    first_build = build(checkpoint, cache / "other", weights)
    second_build = build(checkpoint, cache / "other", weights)
    assert second_build < first_build / 2  # the embedding and the norms


@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("weights", FORMATS)
def test_the_first_start_frees_the_cache_of_what_it_has_packed_and_nobody_else_reads(
    tmp_path: Path, cache: Path, weights: str, num_replicas: int
) -> None:
    """Their memory is used for packed weights; rows of the embedding are read from the file."""
    if not frees_cached_pages(tmp_path):
        pytest.skip("the file system frees no single pages")
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 1024}
    checkpoint = make_checkpoint(tmp_path / "large", max_shard_size="600KB", **sizes)
    paths = sorted(checkpoint.glob("*.safetensors"))
    assert len(paths) > 1
    for path in paths:
        write_to_disk(path, path.read_bytes())
    build(checkpoint, cache, weights, num_replicas=num_replicas)
    kept = {path: cached_pages(path) for path in paths}
    for path in paths:
        for name, run in whole_pages(path).items():
            is_linear = "proj" in name or "lm_head" in name
            is_freed = is_linear and num_replicas == 1
            assert kept[path].isdisjoint(run) if is_freed else kept[path].issuperset(run), name


def whole_pages(path: Path) -> dict[str, range]:
    """The numbers of the pages that only one tensor of a safetensors file has."""
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    places = {
        name: each["data_offsets"]
        for name, each in json.loads(content[8:start]).items()
        if name != "__metadata__"
    }
    size = mmap.PAGESIZE
    return {
        name: range(-(-(start + first) // size), (start + last) // size)
        for name, (first, last) in places.items()
    }


def test_pages_of_packed_weights_are_not_counted_as_available_for_kv(
    checkpoint: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_device, "available_bytes", lambda: LARGE)
    found = Checkpoint.open(str(checkpoint))
    packed = found.packed_cache(Shard.whole(found.family.shape), cached(checkpoint, cache))
    for is_scarce in (True, False):  # the first writes to the file's pages, the second maps them
        available = 0 if is_scarce else LARGE
        monkeypatch.setattr(packed_file, "available_bytes", lambda found=available: found)
        device = CpuDevice(settings_for(checkpoint, "cpu"), PreferredFormat())
        weights = found.open_weights(torch.float32, lambda *_: None)
        with device.source(weights, packed, 1) as deferred:
            found.family.build(deferred, Shard.whole(found.family.shape), device.operators())
        until_published()
        (path,) = cached_files(cache)
        left = device.kv_capacity(lambda: None).most
        assert 0 <= LARGE - left <= path.stat().st_size
        assert LARGE - left > path.stat().st_size // 2


def test_each_format_has_its_own_file(checkpoint: Path, cache: Path) -> None:
    for weights in FORMATS:
        build(checkpoint, cache, weights)
    assert len(cached_files(cache)) == len(FORMATS)


def test_a_checkpoint_with_one_changed_byte_is_packed_again(checkpoint: Path, cache: Path) -> None:
    """The new file has the size and the modification time of the old one."""
    before = logits(checkpoint, cache)
    path = checkpoint / "model.safetensors"
    stat, content = path.stat(), bytearray(path.read_bytes())
    content[-1] ^= 0x10
    new = path.with_suffix(".edited")
    new.write_bytes(content)
    os.utime(new, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    new.rename(path)
    assert path.stat().st_size == stat.st_size
    expected = logits(checkpoint, "")
    assert not torch.equal(expected, before)
    assert torch.equal(logits(checkpoint, cache), expected)
    assert torch.equal(logits(checkpoint, cache), expected)
    assert len(cached_files(cache)) == 1


def test_a_checkpoint_that_is_changed_in_place_is_packed_again(
    checkpoint: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = logits(checkpoint, cache)
    path = checkpoint / "model.safetensors"
    stat = path.stat()
    save_file({name: tensor * 2 for name, tensor in load_file(path).items()}, path)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert not torch.equal(logits(checkpoint, cache), before)
    assert "packed again" in caplog.text


@pytest.mark.parametrize("harm", ["cut", "empty", "text", "header", "folder"])
def test_a_broken_cache_file_is_logged_and_replaced(
    checkpoint: Path, cache: Path, harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    original = build(checkpoint, cache)
    (path,) = cached_files(cache)
    content = path.read_bytes()
    if harm == "folder":
        path.unlink()
        path.mkdir()
    else:
        damaged = content.replace(b"float32", b"float33")
        broken = {"cut": content[:-5], "empty": b"", "text": b"hello " * 99, "header": damaged}
        path.write_bytes(broken[harm])
    again = build(checkpoint, cache)
    assert again == original
    assert str(path) in caplog.text
    if harm != "folder":  # which stays
        assert build(checkpoint, cache) < original / 2


def test_no_step_is_answered_from_damaged_weights_which_are_packed_again(
    checkpoint: Path, cache: Path
) -> None:
    expected = logits(checkpoint, cache)
    (path,) = cached_files(cache)
    flip(path, path.stat().st_size // 3)
    settings = changed(settings_for(checkpoint, "cpu"), packed_cache=str(cache))
    worker = Worker.load(settings, lambda *_: None)
    with pytest.raises(WorkerLost, match=r"are damaged at byte [\d,]+ or behind it"):
        worker.check()
    assert not path.exists()
    for _ in ("packed", "mapped"):
        worker = Worker.load(settings, lambda *_: None)
        until_published()
        worker.check()
        assert torch.equal(Driver(worker).logits((0, TOKENS))[0], expected)


def test_one_line_is_logged_where_no_file_can_be_created(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert torch.equal(logits(checkpoint, blocked), logits(checkpoint, ""))
    lines = [one for one in caplog.records if one.levelno >= logging.WARNING]
    assert len(lines) == 1
    assert "packed weights are not cached for the next start" in lines[0].getMessage()


def test_a_full_disk_costs_only_the_cache_file(
    checkpoint: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = logits(checkpoint, "")
    free = iter(range(2))

    def allocate(file: int, start: int, size: int) -> None:
        if next(free, None) is None:
            raise OSError("no space left on device")
        os.ftruncate(file, start + size)

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    assert torch.equal(logits(checkpoint, cache), expected)
    assert cached_files(cache) == []
    assert caplog.text.count("no space left") == 1


def test_weights_beyond_the_limit_are_not_cached(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = cache_of(tmp_path, "weights", max_bytes=1 << 20)
    with cache.open("layout", 2 << 20) as file:
        add(file, "key", 1.0)
    assert cached_files(tmp_path / "cache") == []
    assert "more than --packed-cache-size 1.0 MiB" in caplog.text


def test_mapped_weights_cannot_be_written_to(checkpoint: Path, tmp_path: Path) -> None:
    cache = cache_of(tmp_path, "weights")
    with opened(cache) as new:
        add(new, "key", 1.0)
    child = os.fork()
    if child == 0:
        with cache.open("layout", 1) as file:
            found = file.find("key")
            assert found is not None
            faulthandler.disable()
            found.tensors["packed"][0] = 2.0  # ends the process
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)


def test_experts_stay_on_the_disk_if_the_file_is_larger_than_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = cache_of(tmp_path, "weights")
    sizes = {"first": 1000, "expert": 50_000, "second": 3000}
    monkeypatch.setattr(packed_file, "available_bytes", lambda: 0)  # it is not packed in memory
    with opened(cache) as file:
        monkeypatch.setattr(packed_file, "available_bytes", lambda: LARGE)
        for key, size in sizes.items():
            packed = torch.frombuffer(file.grow(size), dtype=torch.uint8)[:size].fill_(7)
            file.add(key, PackedEntry("int8", {"packed": packed}, {}, key == "expert"))
        assert file.resident_bytes == sum(sizes.values())
    with opened(cache) as file:
        assert file.resident_bytes == sum(sizes.values())
    monkeypatch.setattr(packed_file, "available_bytes", lambda: 10_000)
    with opened(cache) as file:
        assert file.resident_bytes == 4000
        found = file.find("expert")
        assert found is not None
        assert found.is_sparse
        assert found.tensors["packed"].sum() == 350_000


def test_only_the_experts_of_a_mixture_may_stay_on_the_disk(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = make_checkpoint(tmp_path, "qwen3_moe")
    plain = logits(checkpoint, "", "int8")
    assert torch.equal(logits(checkpoint, cache, "int8"), plain)
    monkeypatch.setattr(packed_file, "available_bytes", lambda: 0)
    found = Checkpoint.open(str(checkpoint))
    shape = found.family.shape
    settings = cached(checkpoint, cache, "int8")
    device = CpuDevice(settings, PreferredFormat())
    source = found.open_weights(torch.float32, lambda *_: None)
    packed = found.packed_cache(Shard.whole(shape), settings)
    with device.source(source, packed, 1) as deferred:
        found.family.build(deferred, Shard.whole(shape), device.operators())
        resident, whole = device._store.file_bytes, device._store._file.num_bytes
    inner, hidden = 64, 32  # padded to whole panels
    experts = 3 * 8 * (2 * inner * hidden + hidden * 40)
    assert resident < whole - experts
    assert torch.equal(logits(checkpoint, cache, "int8"), plain)


def test_idle_experts_need_no_memory_if_they_are_mapped_from_a_file(
    checkpoint: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.worker.weights.random.available_bytes", lambda: 1000)
    settings = settings_for(checkpoint, "cpu")
    with pytest.raises(StartupError, match="the model's weights need"):
        CpuDevice(settings).check_weights(1500, 600)
    CpuDevice(changed(settings, packed_cache=str(cache))).check_weights(1500, 600)
