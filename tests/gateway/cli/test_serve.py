import asyncio
import gc
import json
import re
import signal
import socket
import ssl
import subprocess
import sys
from pathlib import Path

import aiohttp
import httpx
import psutil
import pytest

from engine.errors import StartupError
from engine.simulated.figures import SLO
from engine.simulated.replay import read_recording
from engine.simulated.verify import RecordingVerifier
from engine.transport.multiprocess import MultiprocessExecutor
from engine.transport.process import LocalLauncher
from gateway.__main__ import run
from gateway.serve import command as cli
from gateway.serve import start
from gateway.settings.settings import options
from tests.certificates import make_certificate
from tests.conftest import read_url, start_server


def test_the_whole_help_has_a_flag_for_every_setting_and_the_usual_one_at_most_60(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown = {}
    for flag in ("--help", "--help-all"):
        with pytest.raises(SystemExit) as ended:
            cli.main([flag])
        assert ended.value.code == 0
        shown[flag] = capsys.readouterr().out
        assert "(default 8000; PODWAY_PORT)" in " ".join(shown[flag].split())
    named = {flag: set(re.findall(r"--[a-z-]+", text)) for flag, text in shown.items()}
    usual = {option.flag for option in options()[1:] if not option.declared.is_advanced}
    assert usual <= named["--help"]
    assert len(re.findall(r"^  (?:-h, )?--", shown["--help"], re.MULTILINE)) <= 60
    assert {option.flag for option in options()[1:]} <= named["--help-all"]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--port", "99999"], "podway: --port must be a whole number from 0 to 65535, not '99999'"),
        (["--kv-slots", "1", "--kv-memory", "1GiB"], "podway: --kv-slots and --kv-memory exclude"),
        (["--tls-cert", "c.pem"], "podway: --tls-cert and --tls-key are used together"),
        (["--prot", "1"], "podway serve: unknown flag --prot; did you mean --port?"),
        (
            ["--max_num_seqs=8"],
            "podway serve: unknown flag --max_num_seqs; vLLM's --max_num_seqs is --max-batch-size",
        ),
        (["--quantum-ratio", "1"], "podway: --quantum-ratio must be a number above 1, not '1'"),
        (["--config", "none.toml"], "podway: cannot read the settings file none.toml"),
        (["no/such/directory"], "podway: no/such/directory is"),
        (
            ["--tls-cert", "c", "--tls-key", "k"],
            "podway: cannot read c and k for TLS: No such file",
        ),
        (["--api-key-file", "none"], "podway: cannot read the key file none: No such file"),
        (["--api-key", "a=1,a=2"], "podway: two API keys have the name 'a'"),
        (
            ["--attention", "flashinfr"],
            "podway: --attention must be one of auto, cpu, flashinfer, reference, not 'flashinfr'; "
            "did you mean flashinfer?",
        ),
        (["--tool-dialect", "hermez"], "podway: --tool-dialect must be one of auto, none, hermes"),
        (["--reasoning-dialect", "x"], "podway: --reasoning-dialect must be one of auto, none"),
        (["--record", "no/r.jsonl"], "podway: --record: directory no does not exist"),
        (["--trace", "."], "podway: --trace: . is a directory, not a file"),
        (["--chat-template", "no.jinja"], "podway: --chat-template: there is no file no.jinja"),
        (["--store", "."], "podway: cannot open"),
    ],
)
def test_an_impossible_start_is_rejected_in_one_line_before_a_model_is_loaded(
    flags: list[str],
    says: str,
    bare: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(gc, "disable", lambda: None)
    monkeypatch.setattr(sys, "setswitchinterval", lambda _: None)
    monkeypatch.setattr(LocalLauncher, "prepare", lambda _: None)
    monkeypatch.setattr(cli, "_set_up_logging", lambda _: None)
    monkeypatch.delattr(MultiprocessExecutor, "start")
    code: object
    try:
        code = run(["serve", *flags])
    except SystemExit as ended:  # raised by the parser of flags
        code = ended.code
    shown = capsys.readouterr()
    assert code == 1
    assert shown.err.splitlines()[-1].startswith(says)
    assert "Traceback" not in shown.err
    assert shown.out == ""


def test_a_port_in_use_is_rejected_in_a_line_of_the_log(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        failed = subprocess.run(
            [sys.executable, "-m", "gateway", "serve", f"--port={port}", "--log-format=json"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
    assert failed.returncode == 1
    lines = [json.loads(line) for line in failed.stderr.splitlines()]
    assert lines[-1]["level"] == "critical"
    assert f"cannot listen on 127.0.0.1:{port}" in lines[-1]["message"]
    assert failed.stdout == ""


async def test_keys_are_reloaded_on_sighup_and_ctrl_c_ends_the_server_with_130(
    tmp_path: Path,
) -> None:
    """Its whole log may be JSON."""
    certificate, key = make_certificate(tmp_path, "one")
    keys = tmp_path / "keys.toml"
    keys.write_text('[old]\nkey = "k1"')
    trust = ssl.create_default_context(cafile=certificate)
    flags = ("--tls-cert", str(certificate), "--tls-key", str(key), "--api-key-file", str(keys))
    with start_server(tmp_path, *flags, "--log-format", "json") as server:
        url = read_url(server)
        assert url.startswith("https://")

        async def status(shown: str) -> int:
            headers = {"authorization": f"Bearer {shown}"}
            async with (
                aiohttp.ClientSession(headers=headers) as session,
                session.get(f"{url}/v1/models", ssl=trust) as response,
            ):
                return response.status

        assert (await status("k1"), await status("k2")) == (200, 401)
        for text, says in (
            ('[new]\nkey = "k2"', "reloaded 1 API keys"),
            ("[new", "keeping the old API keys"),
        ):
            keys.write_text(text)
            server.send_signal(signal.SIGHUP)
            while says not in server.log.read_text():  # noqa: ASYNC110 # of another process
                await asyncio.sleep(0.02)
            assert (await status("k1"), await status("k2")) == (401, 200)
        server.send_signal(signal.SIGINT)
        assert server.wait(60) == 130
        lines = [json.loads(line) for line in server.log.read_text().splitlines()]
        assert not any("exception" in line for line in lines)
        assert any("weights: " in line.get("message", "") for line in lines), "progress"


async def test_a_recording_of_a_server_is_reproduced_event_by_event(tmp_path: Path) -> None:
    """Also of an answer that was running when the server was told to end."""
    path = tmp_path / "record.jsonl"
    flags = ("--record", str(path), "--max-batch-size", "2", "--cost-model", "auto")
    with start_server(tmp_path, *flags) as server:
        url = read_url(server)
        assert server.stdout is not None
        cost = next(line for line in server.stdout if line.startswith("  cost"))
        assert "measured in" in cost or str(tmp_path.parent / "cache" / "costs") in cost
        async with aiohttp.ClientSession() as session:

            async def ask(prompt: str, max_tokens: int) -> None:
                body = {"model": "builtin", "prompt": prompt, "max_tokens": max_tokens}
                async with session.post(f"{url}/v1/completions", json=body) as answer:
                    assert answer.status == 200

            async def leave() -> None:
                body = {"model": "builtin", "prompt": "a", "max_tokens": 900, "stream": True}
                async with session.post(f"{url}/v1/completions", json=body) as answer:
                    await answer.content.readline()

            prompt = "the harbour " * 20
            await asyncio.gather(*(ask(prompt, 5 + index) for index in range(5)), leave())
            async with session.post(f"{url}/admin/policy", json={"policy": "mlfq"}) as switched:
                assert switched.status == 200
            await asyncio.gather(*(ask(prompt, 5 + index) for index in range(5)))
            last = {"model": "builtin", "prompt": "a", "max_tokens": 60, "ignore_eos": True}
            async with session.post(
                f"{url}/v1/completions", json=last | {"stream": True}
            ) as answer:
                assert await answer.content.readline() == b"id: 0\n"
                server.send_signal(signal.SIGTERM)
                assert (await answer.content.read()).strip().endswith(b"data: [DONE]")
        assert server.wait(60) == 0
    recording = read_recording(path)
    followed = RecordingVerifier(recording).verify(SLO())
    assert followed.difference is None
    assert followed.figures is not None
    assert followed.figures.num_arrived == 12
    assert followed.figures.cached_tokens > 0
    assert {row.switched for row in recording.rows} == {None, "mlfq"}
    assert "harbour" not in path.read_text()


def test_a_start_that_fails_leaves_no_worker_process() -> None:
    children = psutil.Process().children()
    with pytest.raises(StartupError, match="--port must be"):
        start.main(["--port", "99999"])
    assert psutil.Process().children() == children


def test_a_request_does_not_wait_until_the_first_start_has_measured_the_machine(
    tmp_path: Path,
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = ("--port", str(port), "--cost-model", "auto", "--cache-dir", str(tmp_path / "cache"))
    with start_server(tmp_path, *flags) as child:
        while True:
            try:
                answer = httpx.get(f"http://127.0.0.1:{port}/v1/models", timeout=60)
                break
            except httpx.ConnectError:  # it does not listen yet
                assert child.poll() is None, child.log.read_text()
        assert answer.status_code == 200
        assert child.stdout is not None
        banner = "".join(iter(child.stdout.readline, "\n"))
        child.send_signal(signal.SIGTERM)
        assert child.wait(60) == 0
    assert "a default, fitted while serving, since a request came before it was measured" in banner
    assert not list(tmp_path.glob("cache/costs/*"))
