from tests.fuzz.playing import play_all
from tests.fuzz.replicas.case import play

NUM_CASES = 30


def test_replicas_lose_nothing_under_deaths_moves_and_cancels() -> None:
    counts = play_all(play, range(NUM_CASES))
    for name in ("complete", "failed", "cancelled", "deaths", "moved", "recomputed", "cached"):
        assert counts[name] > 10, counts
