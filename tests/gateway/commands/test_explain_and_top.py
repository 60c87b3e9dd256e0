import io
import json
import signal
import urllib.request

import pytest
from rich.console import Console

from gateway.commands import explain, top
from tests.gateway.commands.conftest import Peer
from tests.gateway.commands.terminal import at_terminal, read_until
from tests.gateway.rig import MODEL

STATE = {
    "policy": "fcfs",
    "admission": "grow",
    "levels": [2, 0, 1],
    "counts": {"running": 2, "waiting": 1, "swapped": 0},
    "kv": {
        "device": {"free": 5, "held": 4, "cached": 0, "moving": 1, "block_size": 16},
        "host": {"free": 0, "held": 0, "cached": 0, "moving": 0, "block_size": 16},
    },
    "worker_state": "running",
    "worker_restarts": 0,
    "tokens_per_second": 12.4,
    "num_requests": 3,
    "requests": [
        {"id": 7, "label": "req_[b]", "state": "decode", "age": 2.0, "prompt": 5, "output": 9,
         "level": 2, "preemptions": 0, "waits_for": ""},
        {"id": 9, "label": "", "state": "waiting", "age": 9.0, "prompt": 6, "output": 0,
         "level": None, "preemptions": 1, "waits_for": "KV"},
    ],
}  # fmt: skip


def completed(url: str, request_id: str) -> None:
    body = {"model": "builtin", "prompt": "Hello", "max_tokens": 5, "ignore_eos": True}
    headers = {"content-type": "application/json", "x-request-id": request_id}
    data = json.dumps(body).encode()
    request = urllib.request.Request(f"{url}/v1/completions", data, headers)
    with urllib.request.urlopen(request) as response:
        assert response.status == 200


def test_a_request_is_explained_with_its_phases(
    server_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    completed(server_url, "req_explained/1")
    assert explain.main(["req_explained/1", server_url]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("It ")
    assert "5 output tokens" in shown
    for phase in ("queued", "prefill", "decode"):
        assert f"\n {phase} " in shown


def test_a_shortened_id_is_enough_if_no_other_begins_so(
    server_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for request_id in ("req_short_one", "req_short_two"):
        completed(server_url, request_id)
    assert explain.main(["req_short_o", server_url]) == 0
    assert "5 output tokens" in capsys.readouterr().out
    assert explain.main(["req_short", server_url]) == 1
    error = capsys.readouterr().err
    assert "begin with 'req_short': req_short_one, req_short_two." in error
    assert explain.main(["req_s", server_url]) == 1  # too short to look for


def test_an_unknown_request_is_one_line(
    server_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert explain.main(["req_unknown", server_url]) == 1
    error = capsys.readouterr().err
    assert error.startswith(
        "podway explain: You have no running request with the id 'req_unknown', and none of the "
        "last 1000 that ended has it."
    )
    assert error.count("\n") == 1


def test_a_bar_shows_when_a_phase_was() -> None:
    assert explain._bar(0.0, 1.0, 4.0) == "█" * 10 + "·" * 30
    assert explain._bar(2.0, 2.0, 4.0) == "·" * 20 + "█" * 20
    assert explain._bar(4.0, 0.0, 4.0) == "·" * 39 + "█"
    assert explain._bar(0.0, 0.0, 0.0) == "█" + "·" * 39


def test_the_engine_is_shown_once_in_a_pipe(
    server_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert top.main([server_url]) == 0
    shown = capsys.readouterr().out
    assert f"{MODEL}: policy fcfs, admission grow; worker running" in shown
    assert "KV device" in shown


def test_the_engine_is_shown_live_until_ctrl_c(server_url: str) -> None:
    with at_terminal(["top", server_url], {"TERM": "xterm", "COLUMNS": "100"}) as (master, child):
        read_until(master, rb"KV device.*KV device")  # at least two states
        child.send_signal(signal.SIGINT)
        read_until(master, rb"\x1b\[\?1049l")  # the terminal's normal screen is back
        assert child.wait(10) == 0


def test_requests_are_listed_by_age_with_what_they_wait_for() -> None:
    text = io.StringIO()
    Console(file=text, width=120).print(top.render({"chat": STATE}, 9))
    shown = text.getvalue()
    assert "requests: 2 running, 1 waiting, 0 swapped; 12 output tokens/s" in shown
    assert "KV device " + "█" * 20 + "▓" * 5 + "·" * 25 in shown
    assert "KV host" not in shown
    assert "requests by policy level: 0: 2, 1: 0, 2: 1" in shown
    assert "waiting           9.0" in shown
    assert "… 2 more" in shown
    text = io.StringIO()
    Console(file=text, width=120).print(top.render({"chat": STATE}))
    assert "req_[b]" in text.getvalue()


def test_requests_of_several_models_are_in_one_table() -> None:
    text = io.StringIO()
    states = {"chat": STATE, "code": {**STATE, "policy": "mlfq"}, "a[b]": None, "c": None}
    Console(file=text, width=120).print(top.render(states))
    lines = text.getvalue().splitlines()
    assert lines[0].startswith("chat: policy fcfs")
    assert any(line.startswith("code: policy mlfq") for line in lines)
    assert "not loaded: a[b], c" in lines
    assert [line.split()[0] for line in lines if line.rstrip().endswith("KV")] == ["chat", "code"]


@pytest.mark.parametrize("command", [top.main, lambda argv: explain.main(["x", *argv])])
def test_an_unreachable_server_is_one_line(
    command: object, capsys: pytest.CaptureFixture[str]
) -> None:
    assert callable(command)
    assert command(["http://127.0.0.1:9"]) == 1
    assert "cannot reach http://127.0.0.1:9: Connection refused\n" in capsys.readouterr().err


@pytest.mark.parametrize("command", [top.main, lambda argv: explain.main(["x", *argv])])
def test_a_server_of_something_else_is_one_line(
    command: object, peer: Peer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert callable(command)
    assert command([f"{peer.url}/other"]) == 1
    error = capsys.readouterr().err
    assert error.endswith("; is it a Podway server?\n")
    assert error.count("\n") == 1
