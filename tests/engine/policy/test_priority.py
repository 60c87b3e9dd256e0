from engine.policy import PolicySettings
from engine.policy.priority import LowestPriorityFirst
from engine.request import State
from tests.scheduling import a_request, a_scheduler, a_spec, ends, play, run_iteration


def test_lower_priority_values_go_first_and_equal_ones_in_order_of_arrival() -> None:
    policy = LowestPriorityFirst()
    requests = [a_request(n, 1, 9, priority=p) for n, p in enumerate([0, 5, -1, 0, 5])]
    for request in requests:
        policy.arrive(request, 0.0)
    assert [request.request_id for request in policy.order(0.0)] == [2, 0, 3, 1, 4]
    policy.leave(requests[2], 0.0)
    assert [request.request_id for request in policy.order(0.0)] == [0, 3, 1, 4]


def test_an_urgent_request_runs_from_the_next_iteration_on() -> None:
    arrivals = [(0.0, a_spec(1, 5)), (1.5, a_spec(1, 3, priority=-1))]
    assert ends(play(a_scheduler(LowestPriorityFirst()), arrivals)) == [8.0, 5.0]


def test_an_urgent_request_preempts_a_less_urgent_one() -> None:
    scheduler = a_scheduler(LowestPriorityFirst(), num_blocks=9)
    lesser = scheduler.add(a_spec(4, 6), 0.0)
    now = run_iteration(scheduler, 0.0)
    urgent = scheduler.add(a_spec(6, 1, priority=-1), now)
    run_iteration(scheduler, now)
    assert (urgent.state, lesser.state) == (State.FINISHED, State.WAITING)


def test_a_starving_request_is_promoted_before_all_classes_until_it_ends() -> None:
    flood = [(float(second), a_spec(1, 1)) for second in range(40)]
    arrivals = sorted([*flood, (0.0, a_spec(1, 3, priority=9))], key=lambda arrival: arrival[0])
    scheduler = a_scheduler(LowestPriorityFirst(settings=PolicySettings(starvation_seconds=10.0)))
    (starved,) = (r for r in play(scheduler, arrivals) if r.spec.priority)
    assert (starved.times.first_token_at, starved.times.last_token_at) == (11.0, 13.0)
