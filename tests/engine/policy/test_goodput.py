from engine.policy import PolicySettings, build, name_of
from engine.policy.fcfs import FirstComeFirstServed
from engine.policy.goodput import GoodputFirst
from engine.request import Request, RequestSpec, Times
from engine.step import RequestId
from tests.scheduling import GREEDY, HAND_COST, a_scheduler, a_spec, play


def a_policy(goal: float = 10.0, starvation_seconds: float | None = None) -> GoodputFirst:
    settings = PolicySettings(starvation_seconds, ttft_goal=goal)
    return GoodputFirst(FirstComeFirstServed(), FirstComeFirstServed(), HAND_COST, settings)


def arrived(policy: GoodputFirst, number: int, at: float, prompt_len: int = 1) -> Request:
    spec = RequestSpec((1,) * prompt_len, 9, GREEDY)
    request = Request(RequestId(number), spec, Times(at))
    policy.arrive(request, at)
    return request


def test_a_waiting_request_that_cannot_be_in_time_is_behind_those_that_can() -> None:
    """A prompt of 11 tokens takes 6 s, so that it has to start within 4 s of its arrival."""
    policy = a_policy()
    long, short = arrived(policy, 0, 0.0, 11), arrived(policy, 1, 0.0)
    assert list(policy.order(4.0)) == [long, short]
    assert list(policy.order(4.1)) == [short, long]
    new = arrived(policy, 2, 9.5)
    assert list(policy.order(9.5)) == [new, long, short]


def test_a_request_with_kv_stays_among_those_in_time() -> None:
    policy = a_policy()
    started, other = arrived(policy, 0, 0.0), arrived(policy, 1, 5.0)
    policy.start(started)
    assert list(policy.order(12.0)) == [started, other]


def test_one_late_request_at_a_time_goes_first_after_the_starvation_limit() -> None:
    policy = a_policy(starvation_seconds=20.0)
    one, two = arrived(policy, 0, 0.0), arrived(policy, 1, 0.0)
    assert list(policy.order(10.0)) == [one, two]
    new = arrived(policy, 2, 29.5)
    assert list(policy.order(29.5)) == [new, one, two]
    assert list(policy.order(30.0)) == [one, new, two]
    assert list(policy.started_order([two, one], 30.0, reverse=True)) == [two, one]
    policy.leave(one, 30.0)
    assert list(policy.order(31.0)) == [two, new]


def test_under_overload_more_requests_meet_the_goal_than_under_fcfs() -> None:
    """Each request takes 3 s of the machine, and one arrives every 2 s."""
    arrivals = [(2.0 * number, a_spec(1, 3)) for number in range(60)]

    def num_in_time(goal: float) -> int:
        policy = build("fcfs", HAND_COST, PolicySettings(ttft_goal=goal))
        requests = play(a_scheduler(policy), arrivals)
        return sum((r.times.first_token_at or 0.0) - r.times.arrived_at <= 8.0 for r in requests)

    assert num_in_time(8.0) > 2 * num_in_time(1e9)


def test_a_policy_keeps_its_name_behind_a_goal_and_fair_shares() -> None:
    settings = PolicySettings(ttft_goal=1.0, fair_keys=True)
    assert name_of(build("mlfq", HAND_COST, settings)) == "mlfq"
