import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.commands.bench import command as bench
from gateway.commands.bench.report import read_report
from tests.gateway.commands.conftest import Peer

pytestmark = pytest.mark.usefixtures("quick_plots")


def test_a_closed_loop_writes_json_and_a_plot(
    peer: Peer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures, plot = tmp_path / "run.json", tmp_path / "run.png"
    lengths = ["--prompt-tokens", "4..6", "--output-tokens", "2"]
    results = ["--label", "seven", "--json", str(figures), "--plot", str(plot)]
    flags = ["-c", "3", "-n", "7", *lengths, *results, "--extra", '{"top_k": 3}']
    code = bench.main([peer.url, *flags])
    report = read_report(figures)
    assert code == 0
    assert (report.num_ok, report.num_failed, report.label) == (7, 0, "seven")
    assert report.setup["concurrency"] == 3
    assert "seven" in capsys.readouterr().out
    assert plot.read_bytes().startswith(b"\x89PNG")
    warm_up, *sent = peer.bodies
    assert len(sent) == 7
    assert all(len(body["prompt"]) in (4, 5, 6) and body["top_k"] == 3 for body in sent)
    assert all(body["ignore_eos"] and body["temperature"] == 0 for body in [warm_up, *sent])


def test_an_open_loop_replays_a_trace_as_chat(peer: Peer, tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text("0,3,2\n10,4,5\n")
    figures = tmp_path / "run.json"
    flags = ["--trace", str(trace), "--time-scale", "1000", "--chat", "--respect-eos"]
    assert bench.main([peer.url, *flags, "--warmup", "0", "--json", str(figures)]) == 0
    assert read_report(figures).setup["trace"] == str(trace)
    assert [body["max_tokens"] for body in peer.bodies] == [2, 5]
    assert [len(body["messages"][0]["content"].split()) for body in peer.bodies] == [3, 4]
    assert "ignore_eos" not in peer.bodies[0]


def test_poisson_arrivals_are_sent(peer: Peer, tmp_path: Path) -> None:
    figures = tmp_path / "run.json"
    assert bench.main([peer.url, "--rate", "500", "-n", "5", "--json", str(figures)]) == 0
    assert read_report(figures).num_ok == 5


def test_runs_are_compared_without_a_server(
    peer: Peer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path in paths:
        bench.main([peer.url, "-n", "2", "--json", str(path), "--label", path.stem])
    num_sent = len(peer.bodies)
    capsys.readouterr()
    plot = tmp_path / "both.png"
    assert bench.main(["--compare", *map(str, paths), "--plot", str(plot)]) == 0
    assert capsys.readouterr().out.split()[:2] == ["a", "b"]
    assert plot.exists()
    assert len(peer.bodies) == num_sent


def test_a_rejected_first_request_is_one_line(
    peer: Peer, capsys: pytest.CaptureFixture[str]
) -> None:
    peer.reject = (401, "no such key")
    assert bench.main([peer.url]) == 1
    expected = "podway bench: the first request failed: HTTP 401: no such key\n"
    assert capsys.readouterr().err == expected


def test_a_run_without_a_success_exits_with_1(
    peer: Peer, capsys: pytest.CaptureFixture[str]
) -> None:
    peer.reject = (503, "full")
    assert bench.main([peer.url, "-n", "2", "--warmup", "0"]) == 1
    assert "2 × HTTP 503: full" in capsys.readouterr().out


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reports_the_requests_that_have_ended(
    ending: signal.Signals, peer: Peer, tmp_path: Path
) -> None:
    figures = tmp_path / "run.json"
    peer.hold_from = 5  # the warm-up and three requests end; the others stay open
    flags = [peer.url, "-n", "40", "-c", "2", "--json", str(figures)]
    code = "import sys, gateway.__main__ as m; sys.exit(m.run(['bench', *sys.argv[1:]]))"
    default = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    command = [sys.executable, "-c", default + code, *flags]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for _ in range(2):  # a client sends a request once it has counted its last one
        assert peer.held.acquire(timeout=60), "no request is held"
    child.send_signal(ending)
    out, err = child.communicate(timeout=60)
    assert child.returncode == 130
    assert "requests ok / failed" in out
    report = read_report(figures)
    assert f"interrupted; {report.num_ok} of 40 requests have ended" in err
    assert report.num_ok == 3
    assert report.num_failed == 0
    assert report.setup["interrupted"] is True


@pytest.mark.parametrize("flag", ["--json", "--plot"])
def test_a_result_file_in_a_missing_directory_is_rejected_before_the_run(
    flag: str, peer: Peer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "missing"
    with pytest.raises(SystemExit) as ended:
        bench.main([peer.url, flag, str(missing / "run")])
    assert ended.value.code == 1
    assert f"argument {flag}: directory {missing} does not exist" in capsys.readouterr().err
    assert peer.bodies == []


def test_offline_help_needs_no_shape(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        bench.main(["--offline", "--help"])
    assert ended.value.code == 0
    assert "--batch-sizes" in capsys.readouterr().out


def test_offline_without_a_shape_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        bench.main(["--offline"])
    assert ended.value.code == 1
    assert "--offline needs a SHAPE" in capsys.readouterr().err


def test_a_plot_without_matplotlib_is_rejected_before_the_load(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("gateway.settings.flags.find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        bench.main(["http://127.0.0.1:1", "--plot", "a.png"])
    assert "--plot: needs matplotlib: pip install 'podway[plots]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--rate", "abc"], "--rate: must be a number above 0, not 'abc'"),
        (["--rate", "0"], "--rate: must be a number above 0, not '0'"),
        (["-c", "1.5"], "--concurrency: must be a whole number, at least 1, not '1.5'"),
        (["--warmup", "x"], "--warmup: must be a whole number, at least 0, not 'x'"),
        (["--seed", "x"], "--seed: must be a whole number, not 'x'"),
        (["--temperature", "hot"], "--temperature: must be a number, not 'hot'"),
        (["--prompt-tokens", "9..3"], "--prompt-tokens: must be a length such as 128 or a range"),
        (["-n", "0"], "--requests: must be a whole number, at least 1, not '0'"),
        (["-c", "2", "--rate", "1"], "--rate: not allowed with argument -c/--concurrency"),
        (["--extra", "[]"], "--extra: must be a JSON object"),
        (["--extra", "{"], "--extra: is not JSON"),
        (["--timeout", "inf"], "--timeout: must be a number above 0, not 'inf'"),
        (["--concurency", "4"], "unknown flag --concurency; did you mean --concurrency?"),
        (["--plot", "x.gif"], "--plot: must end in .png, .pdf, .svg, not 'x.gif'"),
    ],
)
def test_a_wrong_flag_is_rejected_with_what_is_allowed(
    flags: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        bench.main(flags)
    assert ended.value.code == 1
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1
