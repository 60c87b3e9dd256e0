"""The front door: commands, exit codes, and how little it loads."""

import subprocess
import sys

import pytest

from engine.errors import StartupError
from gateway import __main__ as door


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        door.run(["--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert all(command in shown for command in door.COMMANDS)


def test_no_command_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        door.run([])
    assert "commands:" in capsys.readouterr().out


def test_help_loads_nothing_heavy() -> None:
    heavy = {"torch", "numpy", "pydantic", "aiohttp", "starlette", "rich", "asyncio"}
    code = (
        "import sys\nfrom gateway.__main__ import run\n"
        "try:\n    run(['--help'])\nexcept SystemExit:\n    pass\n"
        f"loaded = {heavy!r} & sys.modules.keys()\nassert not loaded, loaded\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_version_is_that_of_the_distribution() -> None:
    command = [sys.executable, "-m", "gateway", "--version"]
    said = subprocess.run(command, check=True, capture_output=True, text=True)
    assert said.stdout.startswith("podway 0.")


def test_an_unknown_command_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        door.run(["sevre"])
    assert ended.value.code == 1
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("raised", "code", "says"),
    [
        (StartupError("no such model"), 1, "podway: no such model\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_what_ends_a_command_early_becomes_an_exit_code(
    raised: BaseException,
    code: int,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def command(argv: list[str]) -> int:
        assert argv == ["--flag"]
        raise raised

    monkeypatch.setattr(door, "refusing", command, raising=False)
    monkeypatch.setitem(door.COMMANDS, "chat", ("gateway.__main__:refusing", ""))
    assert door.run(["chat", "--flag"]) == code
    assert capsys.readouterr().err == says


def test_a_bug_is_logged_and_is_no_success(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def command(argv: list[str]) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr(door, "broken", command, raising=False)
    monkeypatch.setitem(door.COMMANDS, "chat", ("gateway.__main__:broken", ""))
    assert door.run(["chat"]) == 1
    assert "ZeroDivisionError" in caplog.text
