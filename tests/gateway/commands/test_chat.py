"""The terminal chat, through a pipe and at a pseudo-terminal."""

import io
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import orjson
import pytest

from gateway.commands.chat import command as chat
from gateway.commands.chat.command import StreamedAnswer
from tests.gateway.commands.conftest import Peer
from tests.gateway.commands.terminal import at_terminal, read_until


def talk(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str, *argv: str
) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    code = chat.main(list(argv))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_lines_of_a_pipe_are_messages_of_one_conversation(
    peer: Peer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = talk(
        monkeypatch, capsys, "Hi\n\nAgain\n", peer.url, "--system", "Be short.", "--seed", "5"
    )
    assert (code, out, err) == (0, "Hello!\nHello!\n", "")
    assert peer.bodies[0]["model"] == "peer"
    assert peer.bodies[0]["seed"] == 5
    assert "temperature" not in peer.bodies[0]
    assert [message["content"] for message in peer.bodies[1]["messages"]] == [
        "Be short.",
        "Hi",
        "Hello!",
        "Again",
    ]


def test_slash_commands_change_the_conversation(
    peer: Peer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = "one\n/reset\n/system Rhyme.\n/what\ntwo\n/exit\nthree\n"
    code, _, err = talk(monkeypatch, capsys, script, peer.url, "--model", "m")
    assert code == 0
    assert err == "unknown command /what; /help lists them\n"
    assert len(peer.bodies) == 2
    assert peer.bodies[1]["messages"] == [
        {"role": "system", "content": "Rhyme."},
        {"role": "user", "content": "two"},
    ]


def test_the_key_is_sent_as_a_bearer_token(
    peer: Peer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "from-env")
    talk(monkeypatch, capsys, "Hi\n", peer.url)
    talk(monkeypatch, capsys, "Hi\n", peer.url, "--api-key", "from-flag")
    sent = [headers["Authorization"] for headers in peer.headers]
    assert sent == ["Bearer from-env", "Bearer from-flag"]


def test_an_http_error_is_one_line_and_ends_a_pipe(
    peer: Peer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    peer.reject = (429, "slow down")
    code, out, err = talk(monkeypatch, capsys, "Hi\nAgain\n", peer.url)
    assert (code, out, err) == (1, "", "HTTP 429: slow down\n")
    assert len(peer.bodies) == 1


def test_an_error_in_the_stream_is_shown_after_the_text(
    peer: Peer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    peer.error_event = "the worker is gone"
    code, out, err = talk(monkeypatch, capsys, "Hi\n", peer.url)
    assert (code, out, err) == (1, "Hello!", "\nthe worker is gone\n")


def test_an_answer_cannot_move_the_cursor(
    peer: Peer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    peer.words = ["\x1b[2J", "a\tb\n", "\x07é 🐋"]
    _, out, _ = talk(monkeypatch, capsys, "Hi\n", peer.url)
    assert out == "[2Ja\tb\né 🐋\n"


def test_reasoning_is_dim_on_a_terminal_and_left_out_of_a_pipe(
    peer: Peer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    peer.deltas = [{"reasoning_content": "Hm"}, {"reasoning_content": "."}, {"content": "Yes."}]
    _, out, _ = talk(monkeypatch, capsys, "Well?\nSure?\n", peer.url)
    assert out == "Yes.\nYes.\n"
    assert peer.bodies[1]["messages"][1] == {"role": "assistant", "content": "Yes."}
    answer = StreamedAnswer(is_tty=True)
    events = [orjson.dumps({"choices": [{"delta": delta}]}) for delta in peer.deltas]
    shown = "".join(map(answer.feed, events)) + answer.finish()
    assert shown == "\x1b[2mHm.\x1b[0m\n\nYes."


def test_an_answer_cut_in_its_reasoning_ends_the_dim_text() -> None:
    answer = StreamedAnswer(is_tty=True)
    shown = answer.feed(b'{"choices": [{"delta": {"reasoning": "Hm"}}]}')
    assert shown + answer.finish() == "\x1b[2mHm\x1b[0m"


def test_a_tool_call_is_printed_and_the_next_message_is_its_result(
    peer: Peer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    (tmp_path / "tools.json").write_bytes(orjson.dumps(tools))
    peer.deltas = [
        {"content": "Let me see."},
        {"tool_calls": [{"index": 0, "id": "1", "function": {"name": "f", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a":'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": " 1}"}}]},
        {"tool_calls": [{"index": 1, "id": "2", "function": {"name": "g", "arguments": "{}"}}]},
    ]
    path = str(tmp_path / "tools.json")
    code, out, _ = talk(monkeypatch, capsys, "Hi\nfour\nfive\n", peer.url, "--tools", path)
    shown = 'Let me see.\n→ f {"a": 1}\n→ g {}\n'
    assert (code, out) == (0, shown * 2)
    assert len(peer.bodies) == 2
    assert peer.bodies[0]["tools"] == tools
    _, called, first, second = peer.bodies[1]["messages"]
    arguments = [call["function"]["arguments"] for call in called["tool_calls"]]
    assert arguments == ['{"a": 1}', "{}"]
    assert first == {"role": "tool", "tool_call_id": "1", "content": "four"}
    assert second == {"role": "tool", "tool_call_id": "2", "content": "five"}


@pytest.mark.parametrize("text", ["{", '{"a": 1}', None])
def test_a_tools_file_that_cannot_be_read_is_one_line(
    text: str | None, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "tools.json"
    if text is not None:
        path.write_text(text)
    assert chat.main(["--tools", str(path)]) == 1
    assert str(path) in capsys.readouterr().err


@contextmanager
def terminal_chat(peer: Peer, state: Path) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """`podway chat` at a pseudo-terminal: the terminal's other end, and the process."""
    env = {"XDG_STATE_HOME": str(state), "TERM": "xterm", "INPUTRC": "/dev/null"}
    with at_terminal(["chat", peer.url], env) as (master, child):
        read_until(master, rb"/exit.*> ")
        yield master, child
        os.write(master, b"\x04")
        assert child.wait(10) == 0


def test_ctrl_c_stops_the_answer_and_not_the_program(peer: Peer, tmp_path: Path) -> None:
    peer.hold = True
    with terminal_chat(peer, tmp_path) as (master, child):
        os.write(master, b"Hi\n")
        read_until(master, rb"Hello!")
        child.send_signal(signal.SIGINT)
        read_until(master, rb"\[stopped\].*> ")
        assert peer.left.wait(10), "the stream was not closed"
        peer.hold = False
        os.write(master, b"Again\n")
        read_until(master, rb"Hello!\r\n.*> ")
    assert peer.bodies[1]["messages"][1] == {"role": "assistant", "content": "Hello!"}


def test_pasted_lines_are_one_message(peer: Peer, tmp_path: Path) -> None:
    with terminal_chat(peer, tmp_path) as (master, _):
        os.write(master, b"\x1b[200~one\ntwo\nthree\x1b[201~\n")
        read_until(master, rb"Hello!\r\n.*> ")
    assert [body["messages"][0]["content"] for body in peer.bodies] == ["one\ntwo\nthree"]


def test_the_history_is_kept_between_sessions(peer: Peer, tmp_path: Path) -> None:
    with terminal_chat(peer, tmp_path) as (master, _):
        os.write(master, b"What is a pod?\n")
        read_until(master, rb"Hello!\r\n.*> ")
    history = tmp_path / "podway" / "chat_history"
    assert history.stat().st_mode & 0o777 == 0o600
    with terminal_chat(peer, tmp_path) as (master, _):
        os.write(master, b"\x1b[A\n")  # arrow up
        read_until(master, rb"Hello!\r\n.*> ")
    assert [body["messages"][0]["content"] for body in peer.bodies] == ["What is a pod?"] * 2


def test_lines_between_quotes_are_one_message(
    peer: Peer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = '"""\ndef f():\n    return 1\n\n"""\nAgain\n"""\nno end\n'
    assert talk(monkeypatch, capsys, text, peer.url)[0] == 0
    contents = [body["messages"][-1]["content"] for body in peer.bodies]
    assert contents == ["def f():\n    return 1", "Again", "no end"]


def test_an_unknown_command_names_the_nearest_one(
    peer: Peer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, _, err = talk(monkeypatch, capsys, "/sytem Rhyme.\n", peer.url)
    assert err == "unknown command /sytem; did you mean /system?\n"
