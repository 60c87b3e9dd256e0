import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from engine.errors import StartupError, WorkerLost
from engine.lora import LoraReport, LoraSpec
from engine.worker_settings import KVSettings, Tiers, WorkerReport, WorkerSettings
from gateway.serve import cores, replicas
from gateway.serve.cores import Core, count_replicas, divide, num_nodes, parse_list
from gateway.serve.replicas import LorasOfReplicas, like_first, settings_of_replicas
from gateway.settings.checks import check_settings
from gateway.settings.settings import load

# Two nodes of two physical cores with two threads each, as the kernel numbers them.
MACHINE = sorted(Core(number % 4 // 2, number % 4, number) for number in range(8))
SPEC = LoraSpec(1, "poet", "/loras/poet")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> list[Core]:
    monkeypatch.setattr(cores, "cores_of_machine", lambda: MACHINE)
    monkeypatch.setattr(replicas, "cores_of_machine", lambda: MACHINE)
    return MACHINE


@pytest.mark.parametrize(
    ("count", "parts"),
    [
        (1, [{0, 4, 1, 5, 2, 6, 3, 7}]),
        (2, [{0, 4, 1, 5}, {2, 6, 3, 7}]),
        (4, [{0, 4}, {1, 5}, {2, 6}, {3, 7}]),
        (3, [{0, 4}, {1, 5, 2}, {6, 3, 7}]),
        (8, [{0}, {4}, {1}, {5}, {2}, {6}, {3}, {7}]),
    ],
)
def test_cores_are_divided_by_nodes_and_physical_cores(count: int, parts: list[set[int]]) -> None:
    assert [set(part) for part in divide(MACHINE, count)] == parts


def test_lists_of_the_kernel_are_read() -> None:
    assert parse_list("0-3,8,10-11\n") == [0, 1, 2, 3, 8, 10, 11]
    assert parse_list("\n") == []


def test_this_machine_is_read() -> None:
    found = cores.cores_of_machine()
    assert found
    assert 1 <= num_nodes(found) <= len(found)


@pytest.mark.usefixtures("machine")
def test_the_number_of_replicas_is_that_of_the_nodes_or_as_set() -> None:
    assert count_replicas(load({})) == 1
    assert count_replicas(load({"replicas": "0"})) == 2
    assert count_replicas(load({"replicas": "8"})) == 8
    with pytest.raises(StartupError, match="--replicas 9: each replica needs a core"):
        count_replicas(load({"replicas": "9"}))


@pytest.mark.usefixtures("machine")
def test_each_replica_gets_its_part_of_cores_memory_and_files() -> None:
    settings = WorkerSettings(
        "model",
        kv=KVSettings(kv_memory=1000),
        tiers=Tiers(host_kv_memory=100, disk_kv="/kv", disk_kv_memory=50),
    )
    first, second = settings_of_replicas(settings, 2)
    assert first.kv.kv_memory == 500
    assert (first.tiers.host_kv_memory, first.tiers.disk_kv_memory) == (50, 25)
    assert (first.tiers.disk_kv, second.tiers.disk_kv) == ("/kv/replica-0", "/kv/replica-1")
    assert {*first.cores, *second.cores} == {core.number for core in MACHINE}
    assert settings_of_replicas(settings, 1) == [settings]


def a_report(device: str = "cpu") -> WorkerReport:
    return WorkerReport("Llama", 1, "float32", device, "cpu", 10, 64, (1,), 40, 16, 1, 1)


def test_further_replicas_have_as_many_kv_blocks_as_the_first() -> None:
    settings = WorkerSettings("model", kv=KVSettings(kv_memory=1000))
    further = like_first(settings, a_report(), 1)
    assert (further.kv.num_blocks, further.kernels.device) == (40, "auto")


def test_further_replicas_have_the_next_gpus_of_this_machine() -> None:
    settings = WorkerSettings("model")
    found = [like_first(settings, a_report("cuda:3 (H100)"), before) for before in (1, 2, 3)]
    assert [each.kernels.device for each in found] == ["cuda:4", "cuda:5", "cuda:6"]
    on_ray = like_first(settings, a_report("cuda:0 (H100)"), 1, is_local=False)
    assert on_ray.kernels.device == "auto"


@pytest.mark.usefixtures("machine")
def test_replicas_on_a_cluster_are_not_bound_to_cores_of_this_machine() -> None:
    assert count_replicas(load({"replicas": "9", "launcher": "ray"})) == 9
    parts = settings_of_replicas(WorkerSettings("model"), 9, is_local=False)
    assert [each.cores for each in parts] == [()] * 9


@pytest.mark.parametrize(
    ("count", "flag", "value"),
    [
        ("0", "device", "cuda"),
        ("0", "launcher", "ray"),
        ("2", "record", "record.jsonl"),
        ("2", "trace", "trace.json"),
    ],
)
def test_what_is_not_possible_with_replicas_is_refused(count: str, flag: str, value: str) -> None:
    with pytest.raises(StartupError, match=f"--replicas {count} cannot be used with --{flag}"):
        check_settings(load({"replicas": count, flag: value}))
    check_settings(load({"replicas": "2", "device": "cuda", "launcher": "ray"}))


class Loader:
    """An executor that loads adapters as scripted."""

    def __init__(self, result: LoraReport | WorkerLost, failure: str | None = None) -> None:
        self.failure = failure
        self.loaded: set[int] = set()
        self._result = result

    async def load_lora(self, spec: LoraSpec) -> LoraReport:
        if isinstance(self._result, WorkerLost):
            raise self._result
        if not self._result.error:
            self.loaded.add(spec.lora_id)
        return self._result

    def unload_lora(self, lora_id: int) -> None:
        self.loaded.remove(lora_id)

    def watch_loras(self, on_lost: Callable[[LoraReport], object]) -> None:
        on_lost(LoraReport(1, "", error="gone"))


def loras_of(*loaders: Loader) -> LorasOfReplicas:
    """The loader of replicas; one whose worker is lost for good is not asked."""
    engines: Any = [SimpleNamespace(failure=each.failure) for each in loaders]
    executors: Any = loaders
    return LorasOfReplicas(engines, executors)


def test_an_adapter_is_loaded_in_all_replicas_or_in_none() -> None:
    good, bad = LoraReport(1, "digest"), LoraReport(1, "", error="no room")
    one, other = Loader(good), Loader(good)
    loras = loras_of(one, other)
    assert asyncio.run(loras.load_lora(SPEC)) == good
    assert one.loaded == other.loaded == {1}
    loras.unload_lora(1)
    assert one.loaded == other.loaded == set()

    one, other = Loader(good), Loader(bad)
    assert asyncio.run(loras_of(one, other).load_lora(SPEC)) == bad
    assert one.loaded == set()
    one, other = Loader(WorkerLost("killed")), Loader(good)
    with pytest.raises(WorkerLost, match="killed"):
        asyncio.run(loras_of(one, other).load_lora(SPEC))
    assert other.loaded == set()
    one, other = Loader(WorkerLost("killed"), failure="it dies again and again"), Loader(good)
    assert asyncio.run(loras_of(one, other).load_lora(SPEC)) == good


def test_an_adapter_that_one_replica_has_lost_is_reported() -> None:
    lost: list[LoraReport] = []
    loras_of(Loader(LoraReport(1, "digest"))).watch_loras(lost.append)
    assert [each.error for each in lost] == ["gone"]
