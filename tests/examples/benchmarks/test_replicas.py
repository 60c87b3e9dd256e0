from engine.simulated.virtual_loop import run_virtual
from examples.benchmarks.virtual_time.replicas import (
    ALONE,
    DEATH_AT,
    FOLLOWING,
    MOVING,
    PREFIX,
    ROUND_ROBIN,
    SMG,
    bursts_of,
    load_of,
    play,
)


def test_placement_by_prefix_caches_more_than_round_robin() -> None:
    arrivals = load_of(2, 2 * DEATH_AT)
    ways = (MOVING, PREFIX, SMG, ROUND_ROBIN)
    ours, prefix, smg, turns = (run_virtual(play(2, way, arrivals)) for way in ways)
    assert min(each.cached_share for each in (ours, prefix, smg)) > turns.cached_share
    assert ours.jct_mean < turns.jct_mean


def test_requests_of_one_key_compute_their_common_prompt_fewer_times() -> None:
    arrivals = bursts_of(4, 60.0)
    together, alone = (run_virtual(play(4, way, arrivals)) for way in (FOLLOWING, ALONE))
    assert together.cached_share > alone.cached_share
    assert together.jct_mean < alone.jct_mean


def test_a_death_loses_no_request() -> None:
    arrivals = load_of(2, 2 * DEATH_AT)
    ours = run_virtual(play(2, MOVING, arrivals, has_death=True))
    assert ours.requests == len(arrivals)
    assert ours == run_virtual(play(2, MOVING, arrivals, has_death=True))
