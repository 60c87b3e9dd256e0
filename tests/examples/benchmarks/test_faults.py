"""The benchmarks of faults and of long runs, on a load of seconds."""

from pathlib import Path

from tests.examples.running import run_module


def test_texts_are_unchanged_when_workers_are_killed() -> None:
    """Each kill waits for a restarted worker; every text is compared with its own reference."""
    load = ("--kills", "2", "--streams", "6", "--bodies", "6")
    shown = run_module("benchmarks.kill_workers", *load)
    assert "| workers killed | 2" in shown
    assert "| failed or different | 0 |" in shown


def test_requests_cancelled_by_their_clients_leave_nothing_behind(tmp_path: Path) -> None:
    flags = ("--requests", "150", "--out", tmp_path)
    server_flags = ("--pipeline-stages", "2", "--cost-model", "none")
    shown = run_module("benchmarks.soak", *flags, "--", *server_flags)
    assert "0 failures" in shown
    assert (tmp_path / "soak.json").exists()


def test_lookahead_is_measured_off_and_on(tmp_path: Path) -> None:
    flags = ("--clients", "2", "--rounds", "1", "--seconds", "0.5", "--out", tmp_path)
    shown = run_module("benchmarks.lookahead", *flags)
    assert shown.splitlines()[-1].startswith("| 2 |")
    assert (tmp_path / "lookahead.json").exists()
