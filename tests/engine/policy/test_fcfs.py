from collections import Counter
from collections.abc import Iterator, Sequence
from random import Random

from engine.policy.fcfs import FirstComeFirstServed
from engine.policy.settings import PolicySettings
from engine.request import Request, State
from tests.scheduling import a_request, a_scheduler, a_spec, planned, run_iteration


def served(policy: FirstComeFirstServed) -> str:
    """The clients in the order in which their requests start; each ends with its prompt."""
    order = ""
    while request := next(policy.order(0.0), None):
        policy.start(request)
        compute(policy, request, request.remaining)
        policy.leave(request, 0.0)
        order += request.spec.client
    return order


def compute(policy: FirstComeFirstServed, request: Request, num_tokens: int) -> None:
    request.num_computed += num_tokens
    policy.ran(request, num_tokens, 0.0, 0.0)


def arrivals(policy: FirstComeFirstServed, clients: str) -> None:
    for number, client in enumerate(clients):
        policy.arrive(a_request(number, 1, 9, client=client), 0.0)


def churn(
    policy: FirstComeFirstServed, random: Random, clients: str, lengths: Sequence[int]
) -> Iterator[list[Request]]:
    """A thousand arrivals; requests are found, start, run and leave at random. Yields the live
    ones, in the order of their arrival."""
    live: list[Request] = []
    for number in range(1000):
        request = a_request(number, random.choice(lengths), 9, client=random.choice(clients))
        live.append(request)
        policy.arrive(request, 0.0)
        for request in random.sample(live, min(len(live), random.randint(0, 3))):
            policy.found(request, request.remaining)
            if random.random() < 0.8:
                policy.start(request)
                compute(policy, request, random.randint(0, request.remaining))
        if random.random() < 0.9:
            policy.leave(live.pop(random.randrange(len(live))), 0.0)
        yield live


def test_requests_of_one_client_are_in_the_order_of_arrival_whatever_starts_and_ends() -> None:
    policy = FirstComeFirstServed()
    for live in churn(policy, Random(0), "a", (5,)):
        assert list(policy.order(0.0)) == live


def test_the_keys_of_many_clients_are_ascending_in_the_order() -> None:
    policy = FirstComeFirstServed()
    for live in churn(policy, Random(1), "abcdefgh", (1, 5, 200)):
        order = list(policy.order(0.0))
        assert Counter(order) == Counter(live)
        keys = policy.sort_keys(order, 0.0)
        assert keys == sorted(keys)


def test_clients_take_turns_while_requests_of_several_wait() -> None:
    policy = FirstComeFirstServed()
    arrivals(policy, "aaaabbc")
    assert served(policy) == "abcabaa"


def test_a_request_beside_thousands_of_another_client_is_the_next_to_start() -> None:
    policy = FirstComeFirstServed()
    arrivals(policy, "a" * 2048)
    order = policy.order(0.0)
    for request in [next(order) for _ in range(16)]:
        policy.start(request)
        compute(policy, request, 1)
    policy.arrive(a_request(2048, 1, 9, client="b"), 0.0)
    waiting = [request.spec.client for request in policy.order(0.0) if request.request_id >= 16]
    assert waiting[:2] in (["b", "a"], ["a", "b"])


def test_a_client_that_was_away_has_earned_no_turns() -> None:
    policy = FirstComeFirstServed()
    arrivals(policy, "a" * 8)
    served(policy)
    arrivals(policy, "aaaabbbb")
    assert served(policy) == "abababab"


def test_a_second_request_starts_though_new_clients_come_without_end() -> None:
    policy = FirstComeFirstServed()
    second = a_request(1, 1, 9, client="a")
    policy.arrive(a_request(0, 1, 9, client="a"), 0.0)
    policy.arrive(second, 0.0)
    for number in range(2, 20):
        policy.arrive(a_request(number, 1, 9, client=f"new {number}"), 0.0)
        request = next(policy.order(0.0))
        policy.start(request)
        compute(policy, request, 1)
        policy.leave(request, 0.0)
        if request is second:
            return
    raise AssertionError("it was overtaken by every new client")


def test_a_long_prompt_ends_though_short_ones_of_other_clients_come_without_end() -> None:
    policy = FirstComeFirstServed()
    long = a_request(0, 100, 9, client="long")
    policy.arrive(long, 0.0)
    policy.start(long)
    for number in range(1, 200):
        short = a_request(number, 10, 9, client=f"new {number}")
        policy.arrive(short, 0.0)
        request = next(each for each in policy.order(0.0) if each.remaining)
        policy.start(request)
        compute(policy, request, 10)
        if not long.remaining:
            assert 10 < number < 100
            return
    raise AssertionError("it was overtaken by every new client")


def test_prompts_of_equal_length_are_computed_one_after_another() -> None:
    policy = FirstComeFirstServed()
    first, second = (a_request(number, 100, 9, client=str(number)) for number in range(2))
    policy.arrive(first, 0.0)
    policy.start(first)
    compute(policy, first, 10)
    policy.arrive(second, 0.0)
    policy.start(second)
    computed = []
    while request := next((each for each in policy.order(0.0) if each.remaining), None):
        compute(policy, request, 10)
        computed.append(request)
    assert computed == [first] * 9 + [second] * 10


def test_a_short_prompt_goes_before_what_is_left_of_a_long_one() -> None:
    """An iteration computes 20 tokens; the long prompt of 200 was there before."""
    scheduler = a_scheduler(FirstComeFirstServed(), max_batch_tokens=20, max_batch_size=4)
    long = scheduler.add(a_spec(200, 2, client="long"), 0.0)
    now = run_iteration(scheduler, 0.0)
    short = scheduler.add(a_spec(5, 1, client="short"), now)
    now = run_iteration(scheduler, now)
    assert short.state is State.FINISHED
    assert long.num_computed == 35


def test_prompts_of_equal_length_start_one_after_another_whatever_clients_they_are_of() -> None:
    """As if all were one client's: none gets a first piece before the one ahead of it has ended."""

    def first_tokens(clients: str) -> list[float | None]:
        scheduler = a_scheduler(FirstComeFirstServed(), max_batch_tokens=20, max_batch_size=8)
        requests = [scheduler.add(a_spec(100, 2, client=client), 0.0) for client in clients]
        now = 0.0
        while any(each.state is not State.FINISHED for each in requests):
            now = run_iteration(scheduler, now)
        return [request.times.first_token_at for request in requests]

    assert first_tokens("abcdefgh") == first_tokens("aaaaaaaa")


def test_a_long_prompt_that_is_found_in_the_cache_need_not_wait_for_another_one() -> None:
    policy = FirstComeFirstServed()
    computing, cached, fresh = (a_request(n, 500, 9, client=str(n)) for n in range(3))
    policy.arrive(computing, 0.0)
    assert policy.found(computing, 500)
    policy.start(computing)
    compute(policy, computing, 100)
    policy.arrive(cached, 0.0)
    policy.arrive(fresh, 0.0)
    assert policy.found(cached, 10)
    assert not policy.found(fresh, 500)
    assert list(policy.order(0.0)) == [cached, computing, fresh]
    assert policy.found(fresh, 500), "it has its place now"


def test_tokens_in_the_cache_are_not_counted() -> None:
    policy = FirstComeFirstServed()
    fresh, cached = (
        a_request(number, size, 9, client=str(number)) for number, size in enumerate((100, 500))
    )
    policy.arrive(fresh, 0.0)
    policy.arrive(cached, 0.0)
    policy.start(fresh)
    cached.num_computed = 490
    policy.start(cached)
    assert list(policy.order(0.0)) == [cached, fresh]


class Counted(FirstComeFirstServed):
    """Counts the requests that are found."""

    count = 0

    def found(self, request: Request, num_tokens: int) -> bool:
        self.count += 1
        return super().found(request, num_tokens)


def test_few_of_the_many_prompts_that_may_not_start_are_looked_at_in_a_plan() -> None:
    policy = Counted()
    scheduler = a_scheduler(policy, max_batch_tokens=20, max_batch_size=4)
    scheduler.add(a_spec(100, 2, client="first"), 0.0)
    now = run_iteration(scheduler, 0.0)
    for _ in range(1000):
        scheduler.add(a_spec(200, 2, client="many"), now)
    before = policy.count
    run_iteration(scheduler, now)
    assert 1 <= policy.count - before <= scheduler.settings.scan_limit


def test_a_prompt_that_is_put_behind_others_starts_if_none_of_them_can_go_on() -> None:
    """The first one is in flight, and its result may be long in coming."""
    scheduler = a_scheduler(FirstComeFirstServed(), max_batch_tokens=20, max_batch_size=4)
    scheduler.add(a_spec(100, 2, client="first"), 0.0)
    assert scheduler.plan(0.0) is not None
    other = scheduler.add(a_spec(200, 2, client="other"), 0.0)
    iteration = planned(scheduler)
    assert iteration.requests == (other,)


def test_many_prompts_of_one_client_delay_that_of_another_by_one_turn() -> None:
    """Four seats, one token an iteration; a hundred requests were there before."""
    scheduler = a_scheduler(FirstComeFirstServed(), max_batch_size=4)
    flood = [scheduler.add(a_spec(1, 2, client="many"), 0.0) for _ in range(100)]
    now = run_iteration(scheduler, 0.0)
    other = scheduler.add(a_spec(1, 2, client="other"), now)
    while other.state is not State.FINISHED:
        now = run_iteration(scheduler, now)
    assert sum(request.state is State.FINISHED for request in flood) <= 8
    assert len(scheduler.pool) == 100 - sum(each.state.is_terminal for each in flood)


def decoding(policy: FirstComeFirstServed, requests: Sequence[Request]) -> None:
    """These requests arrive, and their prompts of one token are computed."""
    for request in requests:
        policy.arrive(request, 0.0)
        policy.start(request)
        compute(policy, request, 1)


def test_above_the_number_of_seats_each_client_has_an_equal_share_of_them() -> None:
    policy = FirstComeFirstServed(settings=PolicySettings(seats=6))
    many = [a_request(number, 1, 9, client="many") for number in range(6)]
    decoding(policy, many)
    assert [*policy.order(0.0)] == many
    pair = [a_request(number, 1, 9, client="pair") for number in (6, 7)]
    decoding(policy, pair[:1])
    policy.arrive(pair[1], 0.0)  # its prompt is not computed
    assert [*policy.order(0.0)] == [*many[:3], *pair, *many[3:]]
    lone = a_request(8, 1, 9, client="lone")
    policy.arrive(lone, 0.0)
    assert [*policy.order(0.0)] == [*many[:2], *pair, lone, *many[2:]]
    policy.leave(lone, 0.0)
    for request in pair:
        policy.leave(request, 0.0)
    assert [*policy.order(0.0)] == many


def test_seats_that_are_left_go_to_a_second_request_before_the_third_of_another_client() -> None:
    policy = FirstComeFirstServed(settings=PolicySettings(seats=3))
    first = [a_request(number, 1, 9, client="a") for number in range(3)]
    second = [a_request(number, 1, 9, client="b") for number in range(3, 5)]
    decoding(policy, [*first, *second])
    order = [first[0], second[0], first[1], second[1], first[2]]
    assert [*policy.order(0.0)] == order
    keys = policy.sort_keys(order, 0.0)
    assert keys == sorted(keys)


def test_long_outputs_that_have_all_seats_keep_no_other_client_waiting() -> None:
    """They pause with their KV, and go on when the seat is free again."""
    policy = FirstComeFirstServed(settings=PolicySettings(seats=8))
    scheduler = a_scheduler(policy, max_batch_size=8)
    long = [scheduler.add(a_spec(1, 50, client="long"), 0.0) for _ in range(8)]
    for at in range(3):
        run_iteration(scheduler, float(at))
    other = scheduler.add(a_spec(1, 2, client="other"), 3.0)
    before = [len(request.output) for request in long]
    for at in range(3, 5):
        run_iteration(scheduler, float(at))
    assert other.state is State.FINISHED
    assert [len(r.output) - n for r, n in zip(long, before, strict=True)] == [2] * 7 + [0]
    run_iteration(scheduler, 5.0)
    assert len(long[-1].output) == before[-1] + 1
    assert long[-1].num_computed == len(long[-1].output)
