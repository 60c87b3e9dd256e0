"""The fewest replicas that meet goals."""

from typing import cast

import pytest

from engine.errors import InvalidRequest
from engine.research.fleet.figures import FleetFigures
from engine.research.fleet.plan import Goals, fewest_replicas


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
