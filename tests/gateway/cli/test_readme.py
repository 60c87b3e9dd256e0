import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

from engine.policy import POLICIES
from gateway.commands.table import COMMANDS

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text(encoding="utf-8")
ADDRESS = "http://127.0.0.1:8000"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def block_with(word: str, language: str) -> str:
    (block,) = (block for block in blocks(language) if word in block)
    return block


def test_the_curl_line_streams_an_answer(server_url: str) -> None:
    command = block_with("curl -N", "sh").replace(ADDRESS, server_url)
    shown = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert shown.stdout.count('"content":') > 1
    assert shown.stdout.strip().endswith("data: [DONE]")


def test_the_line_that_changes_the_policy_works(server_url: str) -> None:
    command = block_with("/admin/policy", "sh").replace(ADDRESS, server_url)
    policies = []
    for line in (command, command.replace("mlfq", "fcfs")):
        shown = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True)
        policies.append(json.loads(shown.stdout)["policy"])
    assert policies == ["mlfq", "fcfs"]


def test_every_policy_has_its_row() -> None:
    assert set(re.findall(r"^\| `(\w+)` \|", README, re.MULTILINE)) == set(POLICIES)


def test_the_python_lines_stream_an_answer(server_url: str) -> None:
    program = block_with("from openai import", "python").replace(ADDRESS, server_url)
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.strip()


def test_chat_answers_a_pipe(server_url: str) -> None:
    command = [sys.executable, "-m", "gateway", "chat", server_url]
    shown = subprocess.run(command, input="Hello!\nHi!\n", capture_output=True, text=True)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert len(shown.stdout.splitlines()) >= 2


def test_bench_measures_the_server(server_url: str, tmp_path: Path) -> None:
    lines = block_with("podway bench", "sh").replace("\\\n", "").splitlines()
    for line in lines[:2]:
        words = shlex.split(line.replace(ADDRESS, server_url))[1:]
        command = [sys.executable, "-m", "gateway", *words, "-n", "4", "--ids", "97..122"]
        if "--rate" in words:
            command += ["--rate", "50"]
        shown = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert shown.returncode == 0, shown.stderr
        assert "4 / 0" in shown.stdout
    assert (tmp_path / "a.png").exists()


PAGES = sorted(
    path.relative_to(ROOT)
    for pattern in ("*.md", "[aegt]*/**/README.md")  # not those of installed packages
    for path in ROOT.glob(pattern)
    if "node_modules" not in path.parts
)


def test_every_link_within_the_repository_leads_somewhere() -> None:
    link = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#[^)]*)?\)")
    links = [(page, to) for page in PAGES for to in link.findall((ROOT / page).read_text("utf-8"))]
    assert [
        (page, to) for page, to in links if not (ROOT / page).parent.joinpath(to).exists()
    ] == []


def test_every_numbered_example_is_short_and_named() -> None:
    scripts = sorted(path for path in (ROOT / "examples").iterdir() if path.name[0].isdigit())
    named = re.findall(r"`(\d\d_\w+\.\w+)`", README)
    assert named == [path.name for path in scripts]
    assert len(scripts) <= 12
    assert [path.name for path in scripts if len(path.read_text().splitlines()) >= 80] == []


def test_the_commands_and_flags_that_it_names_exist() -> None:
    commands = re.findall(r"(?<!from )podway ([a-z]+)\b", README)
    assert set(commands) == set(COMMANDS)
    named = set(re.findall(r"podway serve [^\n]*?(--[\w-]+)", README)) | {"--no-prefix-cache"}
    helped = subprocess.run(
        [sys.executable, "-m", "gateway", "serve", "--help"], capture_output=True, text=True
    )
    assert all(flag in helped.stdout for flag in named)


def test_it_is_under_200_lines() -> None:
    assert len(README.splitlines()) < 200
