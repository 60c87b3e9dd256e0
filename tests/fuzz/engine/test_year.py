"""A day of the year in virtual time; `python -m tests.fuzz.engine.year` plays all of it."""

from tests.fuzz.engine.year import BUSIEST, play, requests_of


def test_a_day_of_load_and_faults_ends_with_nothing_lost() -> None:
    counts = play(1, 7)
    assert counts["hours"] == 24
    assert counts["kills"] > 1
    sent = sum(map(requests_of, range(24)))
    ends = sum(
        count for name, count in counts.items()
        if name in ("finished", "left") or name.startswith(("ended: ", "rejected: "))
    )  # fmt: skip
    assert ends >= sent
    assert counts["finished"] > sent / 2
    assert counts["slots read"] > 10_000


def test_nights_and_weekends_are_quiet() -> None:
    week = [requests_of(hour) for hour in range(7 * 24)]
    assert max(week) == BUSIEST
    assert sum(week[5 * 24 :]) < sum(week[:48]) / 2
    assert requests_of(7 * 24) == requests_of(0)
