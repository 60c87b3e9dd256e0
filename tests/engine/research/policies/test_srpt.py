"""The oracle: least remaining work first, and only in a simulation."""

import pytest

from engine.policy import POLICIES, RESEARCH, PolicySettings, build, name_of
from engine.policy.fcfs import FirstComeFirstServed
from engine.research.policies.srpt import ShortestRemainingFirst
from tests.scheduling import HAND_COST, a_scheduler, a_spec, ends, play


def test_the_shortest_remaining_work_goes_first() -> None:
    arrivals = [(0.0, a_spec(1, 10)), (0.5, a_spec(7, 1)), (1.5, a_spec(1, 2)), (7.0, a_spec(1, 6))]
    requests = play(a_scheduler(ShortestRemainingFirst(HAND_COST)), arrivals)
    assert ends(requests) == [22.0, 5.0, 7.0, 13.0]


def test_a_starvation_limit_can_be_set() -> None:
    flood = [(float(second), a_spec(1, 1)) for second in range(30)]
    arrivals = sorted([*flood, (0.0, a_spec(1, 3))], key=lambda arrival: arrival[0])

    def end(settings: PolicySettings) -> float | None:
        requests = play(a_scheduler(ShortestRemainingFirst(HAND_COST, settings)), arrivals)
        return max(requests, key=lambda request: request.produced).times.last_token_at

    assert end(PolicySettings()) == 33.0
    assert end(PolicySettings(starvation_seconds=10.0)) == 13.0


def test_an_oracle_cannot_be_built_for_serving() -> None:
    assert "srpt" not in POLICIES
    with pytest.raises(ValueError, match=r"not 'srpt' \(simulation only\)"):
        build("srpt", HAND_COST)
    assert name_of(build("srpt", HAND_COST, serves=False)) == "srpt"


@pytest.mark.parametrize("name", [*POLICIES, *RESEARCH])
def test_every_name_in_the_tables_can_be_built(name: str) -> None:
    policy = build(name, HAND_COST, serves=False)
    assert list(policy.order(0.0)) == []
    assert name_of(policy) == name


def test_a_policy_in_no_table_is_named_by_its_class() -> None:
    class LastComeFirstServed(FirstComeFirstServed):
        pass

    assert name_of(LastComeFirstServed()) == "LastComeFirstServed"


def test_the_error_for_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"one of fcfs, mlfq, .*, not 'lifo'$"):
        build("lifo", HAND_COST)
