"""The number of replicas: over time by waiting tokens, and the fewest that meet goals."""

from typing import cast

import pytest

from engine.errors import InvalidRequest
from engine.research.fleet.autoscaler import Autoscaler, AutoscaleSettings, Scale
from engine.research.fleet.figures import FleetFigures
from engine.research.fleet.plan import Goals, fewest_replicas

SETTINGS = AutoscaleSettings(
    2, 10, target_tokens=100.0, start_seconds=30.0, interval=10.0, calm_seconds=60.0
)


def test_a_fleet_grows_by_half_after_the_start_delay() -> None:
    scaler = Autoscaler(SETTINGS)
    assert scaler.update(5.0, 10_000.0) == Scale(2, 0)  # not before the interval
    assert scaler.update(10.0, 10_000.0) == Scale(2, 1)
    assert scaler.update(39.0, 0.0) == Scale(2, 1)
    assert scaler.update(40.0, 0.0) == Scale(3, 0)


def test_a_fleet_stays_within_its_bounds() -> None:
    scaler = Autoscaler(SETTINGS)
    sizes = [sum(scaler.update(10.0 * n, 1e9)) for n in range(100)]
    assert max(sizes) == 10
    sizes = [sum(scaler.update(1000.0 + 10.0 * n, 0.0)) for n in range(100)]
    assert min(sizes) == sizes[-1] == 2


def test_a_fleet_shrinks_only_after_a_calm() -> None:
    scaler = Autoscaler(SETTINGS)
    for n in range(20):
        scaler.update(10.0 * n, 1e9)
    before = scaler.update(200.0, 500.0).active
    assert scaler.update(210.0, 0.0).active >= before
    assert scaler.update(250.0, 0.0).active >= before
    before = scaler.update(259.0, 0.0).active
    assert scaler.update(270.0, 0.0).active == before - 1


def test_a_fleet_grows_before_its_kv_memory_is_full() -> None:
    scaler = Autoscaler(SETTINGS)
    assert scaler.update(10.0, 0.0, usage=0.59) == Scale(2, 0)
    assert scaler.update(20.0, 0.0, usage=0.61) == Scale(2, 1)


def test_a_fleet_shrinks_only_as_far_as_its_kv_memory_allows() -> None:
    scaler = Autoscaler(SETTINGS)
    for n in range(20):
        scaler.update(10.0 * n, 1e9)
    used = 5.9 * 0.9 * 0.6  # of the slots of one replica: six replicas are enough
    sizes: list[int] = []
    for n in range(30):
        usage = used / (sizes[-1] if sizes else 10)
        sizes.append(scaler.update(300.0 + 10.0 * n, 0.0, usage).active)
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == 6


def test_bounds_that_cannot_be_kept_are_rejected() -> None:
    with pytest.raises(InvalidRequest, match="1 <= least <= most replicas, not 3 and 2"):
        AutoscaleSettings(3, 2)


class _Figures:
    """Figures of a fleet whose TTFT falls with the number of replicas."""

    num_arrived = num_finished = 1

    def __init__(self, replicas: int) -> None:
        self.replicas = replicas

    def at(self, measure: str, point: str) -> float:
        return 100.0 / self.replicas


@pytest.mark.parametrize("limit", [0.9, 1.0, 3.0, 33.0, 100.0])
@pytest.mark.parametrize("start", [1, 7, 100, 500])
def test_the_search_finds_the_fewest_replicas_from_any_start(limit: float, start: int) -> None:
    goals = Goals.parse(f"ttft.p99={limit}")
    fewest = next(n for n in range(1, 200) if 100.0 / n <= limit)
    plan = fewest_replicas(lambda n: cast("FleetFigures", _Figures(n)), goals, start, 1000)
    assert plan.replicas == fewest
    assert len(plan.runs) < 20


def test_the_search_gives_up_at_the_most_replicas() -> None:
    plan = fewest_replicas(
        lambda n: cast("FleetFigures", _Figures(n)), Goals.parse("ttft.p99=0.1"), 1, 50
    )
    assert plan.replicas is None
    assert max(plan.runs) == 50


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ttft=2", "'ttft=2' is not a goal such as ttft.p99=2; the latencies are ttft, itl"),
        ("ttft.p42=2", "the points mean, p50, p90, p95, p99"),
        ("ttft.p99=soon", "'ttft.p99=soon' has no number of seconds"),
        ("ttft.p99=2,itl.p99=0", "'itl.p99=0' must be above 0 seconds"),
    ],
)
def test_a_goal_that_cannot_be_read_is_rejected(text: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        Goals.parse(text)
