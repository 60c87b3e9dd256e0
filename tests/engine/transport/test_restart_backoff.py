import pytest

from engine.errors import Unavailable
from engine.transport.worker_group import KILLS, RestartBackoff


def test_pauses_double_up_to_a_maximum_and_are_reset_by_progress() -> None:
    backoff = RestartBackoff(max_restarts=3, first_pause=1.0, max_pause=5.0)
    assert [backoff.next_pause() for _ in range(6)] == [0.0, 1.0, 2.0, 4.0, 5.0, 5.0]
    backoff.progressed()
    assert [backoff.next_pause() for _ in range(2)] == [0.0, 1.0]


def test_a_crash_loop_ends_after_the_maximum_number_of_restarts() -> None:
    backoff = RestartBackoff(max_restarts=3)
    for _ in range(3):
        backoff.crashed()
        backoff.next_pause()
    backoff.crashed()
    with pytest.raises(Unavailable, match="restarted 3 times in a row without completing a step"):
        backoff.next_pause()


def test_kills_from_outside_end_a_crash_loop_only_after_many() -> None:
    backoff = RestartBackoff(max_restarts=2)
    for _ in range(2 * KILLS):
        backoff.crashed(is_kill=True)
        backoff.next_pause()
    backoff.crashed(is_kill=True)
    with pytest.raises(Unavailable, match="restarted 20 times in a row"):
        backoff.next_pause()


def test_pauses_stay_short_while_workers_are_only_killed_from_outside() -> None:
    backoff = RestartBackoff(max_restarts=3, max_kill_pause=2.0)
    pauses = []
    for is_kill in (True, True, True, True, True, False):
        backoff.crashed(is_kill=is_kill)
        pauses.append(backoff.next_pause())
    assert pauses == [0.0, 1.0, 2.0, 2.0, 2.0, 16.0]


def test_progress_ends_a_crash_loop() -> None:
    backoff = RestartBackoff(max_restarts=1)
    for _ in range(50):
        backoff.progressed()
        backoff.crashed()
        backoff.next_pause()


def test_pauses_stay_finite_after_thousands_of_restarts() -> None:
    backoff = RestartBackoff(max_restarts=1)
    assert max(backoff.next_pause() for _ in range(5000)) == 30.0


def test_without_restarts_there_is_no_first_one() -> None:
    with pytest.raises(Unavailable, match="restarts are disabled"):
        RestartBackoff(max_restarts=0).next_pause()
