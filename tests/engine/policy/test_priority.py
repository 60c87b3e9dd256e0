"""Priorities: lower first, then arrival; the starving are rescued for good."""

from engine.policy import PolicySettings
from engine.policy.priority import LowestPriorityFirst
from engine.request import State
from tests.turns import a_request, a_scheduler, an_ask, ends, play, turn


def test_lower_goes_first_and_equals_in_order_of_arrival() -> None:
    policy = LowestPriorityFirst()
    requests = [a_request(n, 1, 9, priority=p) for n, p in enumerate([0, 5, -1, 0, 5])]
    for request in requests:
        policy.arrive(request, 0.0)
    assert [request.request_id for request in policy.order(0.0)] == [2, 0, 3, 1, 4]
    policy.leave(requests[2], 0.0)
    assert [request.request_id for request in policy.order(0.0)] == [0, 3, 1, 4]


def test_an_urgent_request_runs_from_the_next_iteration_on() -> None:
    arrivals = [(0.0, an_ask(1, 5)), (1.5, an_ask(1, 3, priority=-1))]
    assert ends(play(a_scheduler(LowestPriorityFirst()), arrivals)) == [8.0, 5.0]


def test_an_urgent_request_takes_the_memory_of_a_lesser_one() -> None:
    scheduler = a_scheduler(LowestPriorityFirst(), num_slots=9)
    lesser = scheduler.add(an_ask(4, 6), 0.0)
    now = turn(scheduler, 0.0)
    urgent = scheduler.add(an_ask(6, 1, priority=-1), now)
    turn(scheduler, now)
    assert (urgent.state, lesser.state) == (State.FINISHED, State.WAITING)


def test_who_starves_goes_ahead_of_all_and_stays_there() -> None:
    flood = [(float(second), an_ask(1, 1)) for second in range(40)]
    arrivals = sorted([*flood, (0.0, an_ask(1, 3, priority=9))], key=lambda arrival: arrival[0])
    scheduler = a_scheduler(LowestPriorityFirst(settings=PolicySettings(starvation_seconds=10.0)))
    (starved,) = (r for r in play(scheduler, arrivals) if r.spec.priority)
    assert (starved.first_token_at, starved.last_token_at) == (11.0, 13.0)
