import os
import re
import subprocess
import sys

import pytest

from engine.errors import StartupError
from gateway import __main__ as command_line
from gateway.commands.table import COMMANDS


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command_line.run(["--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    for name, (_, text) in COMMANDS.items():
        assert re.search(rf"^  {name} {{2,}}{re.escape(text)}$", shown, re.MULTILINE)


def test_no_command_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command_line.run([])
    assert "commands:" in capsys.readouterr().out


def test_help_imports_no_large_module() -> None:
    heavy = {"torch", "numpy", "pydantic", "aiohttp", "starlette", "rich", "asyncio"}
    code = (
        "import sys\nfrom gateway.__main__ import run\n"
        "try:\n    run(['--help'])\nexcept SystemExit:\n    pass\n"
        f"loaded = {heavy!r} & sys.modules.keys()\nassert not loaded, loaded\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_a_worker_is_started_before_the_modules_of_the_server_are_imported() -> None:
    code = (
        "import sys\nfrom gateway import __main__\nfrom gateway.serve import start\n"
        "loaded = {'asyncio', 'pydantic', 'uvicorn', 'numpy'} & sys.modules.keys()\n"
        "assert not loaded, loaded\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_output_that_nothing_reads_is_no_bug() -> None:
    command = [sys.executable, "-m", "gateway", "help"]
    env, pipe = {**os.environ, "PYTHONUNBUFFERED": "1"}, subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, env=env) as child:
        assert child.stdout is not None
        child.stdout.close()
        assert child.stderr is not None
        assert child.stderr.read() == b""
    assert child.returncode == command_line.EXIT_UNREAD


def test_version_is_that_of_the_distribution() -> None:
    command = [sys.executable, "-m", "gateway", "--version"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout.startswith("podway 0.")


def test_an_unknown_command_names_the_nearest_one_in_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        command_line.run(["sevre"])
    assert ended.value.code == 1
    error = capsys.readouterr().err
    assert "did you mean serve?" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("raised", "code", "says"),
    [
        (StartupError("no such model"), 1, "podway: no such model\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_an_error_that_ends_a_command_becomes_an_exit_code(
    raised: BaseException,
    code: int,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def command(argv: list[str]) -> int:
        assert argv == ["--flag"]
        raise raised

    monkeypatch.setattr(command_line, "failing", command, raising=False)
    monkeypatch.setitem(COMMANDS, "chat", ("gateway.__main__:failing", ""))
    assert command_line.run(["chat", "--flag"]) == code
    assert capsys.readouterr().err == says


def test_a_bug_is_logged_and_exits_with_1(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def command(argv: list[str]) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr(command_line, "broken", command, raising=False)
    monkeypatch.setitem(COMMANDS, "chat", ("gateway.__main__:broken", ""))
    assert command_line.run(["chat"]) == 1
    assert "ZeroDivisionError" in caplog.text
