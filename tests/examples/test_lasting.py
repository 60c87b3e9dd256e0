"""The examples that look at what a server outlives, in short."""

import sys
from pathlib import Path

from tests.examples.test_examples import EXAMPLES, run


def test_95_nobody_notices_that_workers_are_killed() -> None:
    """A few kills, whenever the machine has come up again; every text is held against its own."""
    kill = EXAMPLES / "95_kill_workers.py"
    shown = run(sys.executable, kill, "--kills", "2", "--streams", "6", "--bodies", "6")
    assert "| workers killed | 2" in shown
    assert "| failed or different | 0 |" in shown


def test_96_nothing_is_left_of_requests_that_left_early(tmp_path: Path) -> None:
    soak = (EXAMPLES / "96_soak.py", "--requests", "150", "--out", tmp_path)
    shown = run(sys.executable, *soak, "--", "--pipeline-stages", "2", "--cost-model", "none")
    assert "0 failures" in shown
    assert (tmp_path / "soak.json").exists()


def test_97_lookahead_is_measured_off_and_on(tmp_path: Path) -> None:
    measure = EXAMPLES / "97_lookahead.py"
    flags = ("--clients", "2", "--rounds", "1", "--seconds", "0.5", "--out", tmp_path)
    shown = run(sys.executable, measure, *flags)
    assert shown.splitlines()[-1].startswith("| 2 |")
    assert (tmp_path / "lookahead.json").exists()
