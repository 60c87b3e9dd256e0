"""Reports of load runs, compared with results computed by hand."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from gateway.commands.bench.load import RequestResult
from gateway.commands.bench.plot import draw
from gateway.commands.bench.report import read_report, show, summarize
from gateway.commands.bench.workload import PlannedRequest
from gateway.commands.http_client import ServerError


def answered(index: int, sent_at: float, jct: float, tokens: int) -> RequestResult:
    """One token after 1 s, then one every 0.5 s; the request is for 5 tokens."""
    return RequestResult(
        PlannedRequest(index, 0.0, 10, 5),
        sent_at=sent_at,
        first_at=sent_at + 1,
        last_at=sent_at + 1 + 0.5 * (tokens - 1),
        ended_at=sent_at + jct,
        gaps=[0.5] * (tokens - 1),
        num_events=tokens,
        usage_output=tokens,
        usage_prompt=10,
        finished_at=sent_at + 1 + 0.5 * (tokens - 1),
    )


OUTCOMES = [
    answered(0, 100.0, 4.0, 5),
    answered(1, 101.0, 9.0, 3),
    RequestResult(
        PlannedRequest(2, 0.0, 10, 5), sent_at=102.0, ended_at=102.5, error="HTTP 503: full"
    ),
]


def test_latencies_are_of_the_requests_that_succeeded() -> None:
    report = summarize(OUTCOMES, {}, "run")
    assert (report.num_ok, report.num_failed, report.num_short) == (2, 1, 1)
    assert report.errors == {"HTTP 503: full": 1}
    assert report.wall_seconds == 10.0
    assert report.output_rate == pytest.approx(0.8)
    assert report.total_rate == pytest.approx(2.8)
    assert report.at("ttft", 50) == pytest.approx(1.0)
    assert report.at("itl", 99) == pytest.approx(0.5)
    assert report.at("tpot", 50) == pytest.approx(0.5)
    assert report.at("jct", 50) == pytest.approx(6.5)
    assert report.at("jct", 90) == pytest.approx(8.5)
    assert report.at("norm", 0) == pytest.approx(0.8)
    assert report.at("norm", 100) == pytest.approx(3.0)
    assert report.ended == [(4.0, 5), (10.0, 3)]


def test_a_run_without_a_success_has_no_latencies() -> None:
    report = summarize(OUTCOMES[2:], {}, "run")
    assert (report.num_ok, report.output_rate, report.at("ttft", 50)) == (0, 0.0, None)


def test_a_report_is_read_back_from_its_file(tmp_path: Path) -> None:
    report = summarize(OUTCOMES, {"concurrency": 2}, "run", 0.25)
    report.write(tmp_path / "run.json")
    again = read_report(tmp_path / "run.json")
    assert again.quantiles == report.quantiles
    assert (again.setup, again.late_seconds) == ({"concurrency": 2}, 0.25)


def test_a_file_that_is_not_a_report_is_an_error_that_says_so(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(ServerError, match="not a report"):
        read_report(tmp_path / "x.json")
    with pytest.raises(ServerError, match="No such file"):
        read_report(tmp_path / "y.json")


def test_the_table_has_a_column_for_every_run() -> None:
    text = io.StringIO()
    reports = [summarize(OUTCOMES, {}, "before"), summarize(OUTCOMES[:1], {}, "after")]
    show(reports, Console(file=text, width=140))
    lines = {line.split("  ")[0].strip(): line.split() for line in text.getvalue().splitlines()}
    assert lines[""] == ["before", "after"]
    assert lines["requests ok / failed"][-6:] == ["2", "/", "1", "1", "/", "0"]
    assert "before: 1 × HTTP 503: full" in text.getvalue()


def test_the_plot_is_a_png_also_of_a_run_without_answers(tmp_path: Path) -> None:
    draw([summarize(OUTCOMES, {}, "a"), summarize(OUTCOMES[2:], {}, "b")], tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
