"""The shadow of FCFS: its schedule of the same requests, as their lengths become known."""

from random import Random

import pytest

from engine.policy.settings import PolicySettings
from engine.request import Request
from engine.research.policies.fcfs_shadow import FcfsShadow
from tests.scheduling import a_request, a_scheduler, a_spec, build_learned, play

SLACK = 0.1


def iterate(shadow: FcfsShadow, now: float, *requests: Request) -> None:
    """An iteration of a second returns in which each of these requests produces a token."""
    for request in requests:
        shadow.ran(0.0, 1.0, now)
        request.output.append(5)


def test_a_request_lags_once_the_shadow_has_produced_more_of_its_tokens() -> None:
    """One seat: the shadow serves the first request, the real schedule the second."""
    shadow = FcfsShadow(seats=1)
    first, second = a_request(0, 1, 9), a_request(1, 1, 9)
    for request in (first, second):
        shadow.arrive(request, 0.0)
    for now in (1.0, 2.0, 3.0, 4.0):
        iterate(shadow, now, second)
    assert list(shadow.lagging(SLACK, 4.0)) == [first]
    assert list(shadow.lagging(2.0, 4.0)) == []


def test_a_seat_is_free_from_the_round_in_which_its_request_would_have_ended() -> None:
    """The first request ends late, with two tokens; under FCFS it would have ended three rounds
    before, and the third one would have begun then."""
    shadow = FcfsShadow(seats=1)
    first, second, third = (a_request(number, 1, 9) for number in range(3))
    for request in (first, second, third):
        shadow.arrive(request, 0.0)
    iterate(shadow, 1.0, second)
    second.output = [5]
    shadow.leave(second)
    for now in (2.0, 3.0):
        iterate(shadow, now, first)
    iterate(shadow, 4.0, a_request(9, 1, 1))
    iterate(shadow, 5.0, a_request(9, 1, 1))
    shadow.leave(first)
    assert list(shadow.lagging(SLACK, 5.0)) == [third]


def test_without_requests_the_shadow_is_empty_too() -> None:
    shadow = FcfsShadow(seats=1)
    request = a_request(0, 1, 9)
    shadow.arrive(request, 0.0)
    shadow.leave(request)
    other = a_request(1, 1, 9)
    shadow.arrive(other, 0.0)
    for now in (1.0, 2.0, 3.0):
        iterate(shadow, now, a_request(9, 1, 1))
    assert list(shadow.lagging(SLACK, 3.0)) == [other]


@pytest.mark.parametrize("seed", range(2))
def test_no_completion_time_is_much_longer_than_under_fcfs(seed: int) -> None:
    """Skewed lengths under overload: at most a share of the time under FCFS longer, and a few
    iterations."""
    random = Random(seed)
    lengths = [random.choice([1, 1, 1, 2, 60]) for _ in range(150)]
    arrivals = [(6.0 * number, a_spec(1, length)) for number, length in enumerate(lengths)]

    def jcts(name: str) -> list[float]:
        settings = PolicySettings(seats=2, min_outputs=10, fcfs_slack=SLACK)
        policy = build_learned(name, settings, lengths)
        requests = play(a_scheduler(policy, max_batch_size=2), arrivals)
        return [
            (request.times.last_token_at or 0.0) - request.times.arrived_at for request in requests
        ]

    own, fcfs = jcts("gittins"), jcts("fcfs")
    assert sum(own) < sum(fcfs)
    assert all(one <= (1.0 + SLACK) * other + 20.0 for one, other in zip(own, fcfs, strict=True))


def two_prompts_behind() -> tuple[FcfsShadow, Request, Request]:
    """A shadow of two seats, and two prompts of 4 s, of which the real schedule computes none for
    3 s: it decodes another request."""
    shadow = FcfsShadow(seats=2)
    first, second, ahead = (a_request(number, 9, 9) for number in range(3))
    for request in (first, second, ahead):
        shadow.arrive(request, 4.0)
    shadow.start(ahead, 0.0)
    for now in (1.0, 2.0, 3.0):
        iterate(shadow, now, ahead)
    return shadow, first, second


def test_a_prompt_goes_first_once_the_shadow_is_about_to_be_ahead_of_it() -> None:
    """Two seats and two prompts of 4 s. While the real schedule decodes another request, the shadow
    computes the first prompt, so both have to go first; once the real schedule has computed the
    first prompt, the second one has as much time as in the shadow, and 4 s more."""
    shadow, first, second = two_prompts_behind()
    assert list(shadow.lagging(0.0, 3.0)) == [first, second]
    shadow.computed(first, 0.0)
    assert list(shadow.lagging(0.0, 3.0)) == []


def test_a_request_that_goes_first_is_not_reported_as_lagging_again() -> None:
    """Two seats and two prompts of 4 s, of which the real schedule computes none for 3 s."""
    shadow, first, second = two_prompts_behind()
    shadow.goes_first(first)
    assert list(shadow.lagging(0.0, 3.0)) == [second]
    shadow.goes_first(second)
    assert list(shadow.lagging(0.0, 3.0)) == []
