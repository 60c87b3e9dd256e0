from typing import Any

import pytest

from engine.errors import StartupError
from engine.transport.launcher import placements

ray = pytest.importorskip("ray", reason="ray is not installed")
cluster = pytest.importorskip("adapters.cluster.ray")


class Reserved(Exception):
    """Ends a launch after the reservation."""


@pytest.mark.parametrize("gpus", [0, 1])
async def test_each_worker_reserves_its_cpus_and_gpus(
    monkeypatch: pytest.MonkeyPatch, gpus: int
) -> None:
    asked: list[dict[str, Any]] = []

    def remote(**resources: Any) -> Any:
        asked.append(resources)
        raise Reserved

    monkeypatch.setattr(ray, "init", lambda **_: None)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setattr(ray, "remote", remote)
    launcher = cluster.RayLauncher("worker", "auto", 3, gpus)
    with pytest.raises(Reserved):
        await launcher.launch(2, 1)
    await launcher.close()
    assert asked == [{"num_cpus": 3, "num_gpus": gpus, "scheduling_strategy": "SPREAD"}]


async def test_all_launchers_of_a_process_are_on_one_cluster_until_the_last_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(ray, "init", lambda address, **_: calls.append(address))
    monkeypatch.setattr(ray, "shutdown", lambda: calls.append("left"))
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    one, other = (cluster.RayLauncher("worker", "auto", 1) for _ in range(2))
    with pytest.raises(
        StartupError, match=r"--ray-address there: .* are on the Ray cluster at auto"
    ):
        cluster.RayLauncher("worker", "there", 1)
    await one.close()
    await one.close()
    assert calls == ["auto"]
    await other.close()
    assert calls == ["auto", "left"]
    await cluster.RayLauncher("worker", "there", 1).close()
    assert calls == ["auto", "left", "there", "left"]


def test_workers_on_cpus_share_their_node_and_workers_with_a_gpu_see_only_that_one() -> None:
    places = [cluster.Place(address, 1) for address in ("a", "b", "a")]
    seats = placements(3, 1)
    for has_gpus, local in ((False, [(2, 0), (1, 0), (2, 1)]), (True, [(1, 0)] * 3)):
        found = [cluster.located(seat, places, 77, has_gpus=has_gpus) for seat in seats]
        assert [(each.num_local_workers, each.local_index) for each in found] == local
        assert {each.rendezvous for each in found} == {"a:77"}
        assert [each.address for each in found] == ["a", "b", "a"]
