from itertools import pairwise

from engine.simulated.trace import Arrival
from engine.simulated.virtual_loop import run_virtual
from examples.benchmarks.virtual_time.phases import (
    H100,
    Hardware,
    Outcome,
    Way,
    offered,
    play,
    rows_of,
    ways_of,
)
from examples.benchmarks.virtual_time.phases_page import rate_of

ARRIVALS = [Arrival(0.1 * number, 1000, 20) for number in range(10)]


def gaps_of(outcome: Outcome) -> list[float]:
    return [later - time for time, later in pairwise(outcome.times)]


def test_both_ways_produce_all_tokens_and_only_equal_replicas_decode_beside_prompts() -> None:
    equal = run_virtual(play(2, Way(), ARRIVALS))
    apart = run_virtual(play(2, Way(prefills=1), ARRIVALS))
    for outcomes in (equal, apart):
        assert [len(one.times) for one in outcomes] == [20] * 10
    prompt = H100.model.compute(1000, 0)
    assert max(max(gaps_of(one)) for one in equal) > prompt
    assert max(max(gaps_of(one)) for one in apart) < prompt


def test_a_prompt_is_loaded_and_not_computed_again_by_the_replica_that_decodes() -> None:
    (outcome,) = run_virtual(play(2, Way(prefills=1), [Arrival(0.0, 100_000, 3)]))
    assert gaps_of(outcome)[0] < 0.1 * H100.model.compute(100_000, 0)


def test_replicas_of_one_core_take_what_a_server_has_measured() -> None:
    cpu = Hardware.cpu()
    (outcome,) = run_virtual(play(2, Way(prefills=1), [Arrival(0.0, 1000, 3)], cpu))
    first, *later = outcome.times
    alone = cpu.model.compute(1000, 0)
    assert alone <= first < 1.05 * alone
    assert len(later) == 2


def test_poisson_arrivals_are_the_same_requests_without_their_bursts() -> None:
    bursts = [Arrival(float(number // 10), 100 + number, 2) for number in range(500)]
    found = offered(bursts, 5.0, is_poisson=True)
    assert [one.prompt_len for one in found] == [one.prompt_len for one in bursts]
    gaps = [later.at - one.at for one, later in pairwise(found)]
    assert min(gaps) > 0.0
    assert 0.18 < sum(gaps) / len(gaps) < 0.22
    faster = offered(bursts, 10.0, is_poisson=True)
    assert [round(one.at / 2, 9) for one in found] == [round(one.at, 9) for one in faster]


def test_only_the_ways_that_are_named_are_played_again() -> None:
    rows = rows_of("code", ARRIVALS, [1.0], 2, 5.0, H100, ["1 prefill", "chunks of 512"])
    assert [row["way"] for row in rows] == ["chunks of 512", "1 prefill, 1 decode"]
    assert [way.prefills for way in ways_of(16)][4:] == [4, 6, 8, 10, 12, 14, 15]


def test_a_rate_is_sustained_below_the_first_one_at_which_too_few_meet_the_goals() -> None:
    rows = [{"rate": rate, "x": share} for rate, share in ((1, 0.95), (2, 0.8), (3, 0.95))]
    assert rate_of(rows, "x") == 1
    assert rate_of(rows[1:], "x") == 0
