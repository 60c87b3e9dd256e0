import re
import subprocess

import pytest

from gateway.commands import completion
from gateway.commands.table import COMMANDS
from gateway.console import ROOT


@pytest.fixture(scope="module")
def script() -> str:
    return completion.bash(completion.all_flags())


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("podway si", {"simulate"}),
        ("podway bench --conc", {"--concurrency"}),
        ("podway serve --max-batch-", {"--max-batch-size", "--max-batch-tokens"}),
        ("podway simulate --arrivals ", {"poisson", "gamma", "steady"}),
        ("podway simulate --arrivals g", {"gamma"}),
        ("podway chat http", set()),
    ],
)
def test_bash_completes_commands_flags_and_values(
    script: str, line: str, expected: set[str]
) -> None:
    words = line.split(" ")
    quoted = " ".join(f"'{word}'" for word in words)
    program = f"{script}\nCOMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _podway"
    program += '\nprintf "%s\\n" "${COMPREPLY[@]}"'
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == expected


def test_every_shell_gets_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    for shell in ("bash", "zsh", "fish"):
        assert completion.main([shell]) == 0
        text = capsys.readouterr().out
        assert all(command in text for command in COMMANDS)
        assert "max-batch-tokens" in text


def test_help_texts_are_quoted_for_fish() -> None:
    flags = {"chat": [completion.FlagInfo("--x", "it's a \\ test", ("a", "b"))]}
    line = completion.fish(flags).splitlines()[-1]
    assert line.endswith("-l x -d 'it\\'s a \\\\ test' -x -a 'a b'")


PAGES = (
    "README.md",
    "gateway/README.md",
    "gateway/PROTECTION.md",
    "engine/README.md",
    "engine/kv/README.md",
    "adapters/models/FAMILIES.md",
    "adapters/attention/README.md",
)
OTHERS = {"--profile", "--offline", "--limits"}  # of docker compose, and of podway bench --offline


@pytest.mark.parametrize("page", PAGES)
def test_the_flags_that_a_page_names_exist(page: str) -> None:
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", (ROOT / page).read_text()))
    known = {info.flag for infos in completion.all_flags().values() for info in infos}
    assert named - OTHERS <= known


def test_completion_has_the_help_of_flags_that_the_usual_help_leaves_out() -> None:
    helps = {info.flag: info.help for info in completion.all_flags()["serve"]}
    assert helps["--max-queue-tokens"].startswith("maximum tokens")
