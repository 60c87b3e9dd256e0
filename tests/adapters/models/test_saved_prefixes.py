"""Prefixes in the tiers below the device, for every kind of layer group: windows, recurrent states
and layers that read the KV of others. What comes back is what was computed."""

import logging
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import pytest

from engine.errors import StartupError
from engine.request import RequestSpec
from engine.step import HASH_VERSION
from engine.worker.process.kept_kv import check_kept
from engine.worker.process.stage_kv import StageKV
from engine.worker.process.worker import Worker
from engine.worker_settings import Placement, WorkerSettings
from tests.engine.worker.process.driving import settings_for
from tests.inline import RequestOutcome, play
from tests.models.checkpoints import make_checkpoint
from tests.scheduling import GREEDY
from tests.worker_settings import changed, worker_settings

KINDS = ["llama", "gemma3", "gemma4", "qwen3_5"]
CHAT = tuple(range(3, 75))
OTHERS = [tuple(range(first, first + 70)) for first in (20, 25, 10, 15)]


def settings(directory: Path, kind: str) -> WorkerSettings:
    model = make_checkpoint(directory / "model", kind)
    return changed(settings_for(model), block_size=4, kv_slots=2048, num_states=12, threads=1)


def disk(directory: Path) -> dict[str, Any]:
    return {"disk_kv": str(directory / "disk"), "disk_kv_memory": 4 << 20}


def serve(worker: Worker, *prompts: tuple[int, ...], **options: object) -> list[RequestOutcome]:
    specs = [RequestSpec(prompt, 9, GREEDY) for prompt in prompts]
    return play(worker, specs, max_batch_tokens=64, **options)  # type: ignore[arg-type]


def next_message(first: RequestOutcome) -> tuple[int, ...]:
    """The next prompt of a chat: the first one, its answer, and a new message."""
    return (*CHAT, *first.tokens, *range(40, 53))


def end(worker: Worker) -> None:
    """As at the end of the process."""
    worker.parts.kept.close()


@pytest.mark.parametrize("kind", KINDS)
def test_after_a_restart_the_next_message_of_a_chat_finds_its_prefix_on_the_disk(
    tmp_path: Path, kind: str
) -> None:
    without = settings(tmp_path, kind)
    (first,) = serve(Worker.load(without, lambda *_: None), CHAT)
    (expected,) = serve(Worker.load(without, lambda *_: None), next_message(first))
    on_disk = changed(without, **disk(tmp_path))
    worker = Worker.load(on_disk, lambda *_: None)
    serve(worker, CHAT)
    end(worker)
    worker = Worker.load(on_disk, lambda *_: None)
    (found,) = serve(worker, next_message(first))
    end(worker)
    assert found.request.num_cached == (len(CHAT) + 8) // 4 * 4
    assert found.tokens == expected.tokens


@pytest.mark.parametrize("other", ["version of hashes", "KV dtype", "no latent vectors"])
def test_files_of_another_version_or_kind_of_kv_are_not_read(
    tmp_path: Path, other: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    variant = "deepseek_v2" if other == "no latent vectors" else "llama"
    on_disk = changed(settings(tmp_path, variant), **disk(tmp_path))
    worker = Worker.load(on_disk, lambda *_: None)
    serve(worker, CHAT)
    end(worker)
    again = Worker.load(on_disk, lambda *_: None)
    end(again)
    if other == "KV dtype":
        on_disk = changed(on_disk, kv_cache_dtype="float16")
    elif other == "no latent vectors":
        name = "engine.worker.process.build.cached_shape"
        monkeypatch.setattr(name, lambda shape, *_, **__: shape.expanded())
    else:
        monkeypatch.setattr("engine.worker.process.kept_kv.HASH_VERSION", HASH_VERSION + 1)
    later = Worker.load(on_disk, lambda *_: None)
    end(later)
    assert [any(one.report.tiers.disk_hashes) for one in (again, later)] == [True, False]
    assert "the KV of other models, KV dtypes or versions is not used" in caplog.text


def test_what_was_changed_on_the_disk_is_computed_again(tmp_path: Path) -> None:
    on_disk = changed(settings(tmp_path, "llama"), **disk(tmp_path))
    worker = Worker.load(on_disk, lambda *_: None)
    (first,) = serve(worker, CHAT)
    end(worker)
    (blocks,) = (tmp_path / "disk").glob("*/blocks")
    blocks.write_bytes(b"\xff" * blocks.stat().st_size)
    worker = Worker.load(on_disk, lambda *_: None)
    assert any(worker.report.tiers.disk_hashes)
    assert serve(worker, CHAT)[0].tokens == first.tokens
    end(worker)


@pytest.mark.parametrize("kind", KINDS)
def test_an_evicted_prefix_comes_back_from_the_host(tmp_path: Path, kind: str) -> None:
    base = changed(settings(tmp_path, kind), num_states=8)
    (alone,) = serve(Worker.load(base, lambda *_: None), CHAT)
    worker = Worker.load(changed(base, host_kv_memory=4 << 20), lambda *_: None)
    num_blocks = 48 * len(worker.report.windows)
    prompts = (CHAT, *OTHERS, CHAT)
    for saves_on_host, cached in ((False, 0), (True, 68)):
        first, *_, last = serve(
            worker, *prompts, num_blocks=num_blocks, max_batch_size=1, saves_on_host=saves_on_host
        )
        assert last.request.num_cached == cached
        assert first.tokens == last.tokens == alone.tokens


def test_too_little_disk_for_a_snapshot_is_an_error_at_start(tmp_path: Path) -> None:
    base = changed(settings(tmp_path, "qwen3_5"), disk_kv=str(tmp_path / "disk"))
    with pytest.raises(StartupError, match="for snapshots are less than one snapshot"):
        Worker.load(changed(base, disk_kv_memory=1000), lambda *_: None)


def test_a_disk_tier_of_a_worker_beside_others_is_an_error_at_start() -> None:
    settings = worker_settings(placement=Placement(num_ranks=2))
    with pytest.raises(StartupError, match="--disk-kv needs a single worker"):
        check_kept(settings, "--disk-kv", create_autospec(StageKV))
