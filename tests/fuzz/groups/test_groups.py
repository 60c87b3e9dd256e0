from tests.fuzz.groups.case import play
from tests.fuzz.playing import play_all

NUM_CASES = 40


def test_several_models_lose_nothing_under_deaths_unloads_and_cancels() -> None:
    counts = play_all(play, range(NUM_CASES))
    for name in ("complete", "failed", "cancelled", "deaths", "loads"):
        assert counts[name] > 20, counts
    assert counts["moved"] > 5, counts
