import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.clients.agents import CLIENTS

HERE = Path(__file__).parent
PYTHON = CLIENTS / "bin" / "python"
MODULES = CLIENTS.resolve() / "node_modules"


def printed_by(script: str, *arguments: str) -> dict[str, Any]:
    """The JSON object that a script of this folder prints."""
    program, installed = (PYTHON, PYTHON) if script.endswith(".py") else ("node", MODULES)
    if not installed.exists():
        pytest.skip("the clients are not installed: make clients")
    command = [program, HERE / script, *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


def test_litellm_gets_whole_and_streamed_answers_and_its_own_errors(server_url: str) -> None:
    answers = printed_by("litellm_calls.py", server_url)
    assert answers["whole"]
    assert answers["stream"] == answers["whole"]
    assert answers["async"] == [answers["whole"]] * 3
    assert answers["finish_reason"] == "stop"
    assert answers["stream_tokens"] == answers["completion_tokens"] > 0
    assert (answers["tool"], answers["tool_reason"]) == ("get_weather", "tool_calls")
    assert "temperature" in answers["error"]


def test_llama_index_chats_and_completes(server_url: str) -> None:
    answers = printed_by("llama_index_calls.py", server_url)
    assert answers["whole"]
    assert answers["stream"] == answers["async"] == answers["whole"]
    assert answers["text"]
    assert answers["text_stream"] == answers["text"]
    assert answers["tool"] == "get_weather"


@pytest.mark.parametrize("major", [1, 2])
def test_older_versions_of_openai_pass_the_tests_of_the_newest(major: int, server_url: str) -> None:
    """Those of decisions aside, which they do not know."""
    older = CLIENTS.resolve() / f"openai-{major}"
    if not older.exists():
        pytest.skip("the clients are not installed: make clients")
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider"]
    command += ["--noconftest", "-p", "tests.clients.shared_server"]
    command += ["-k", "not decisions", str(HERE / "test_openai_python.py")]
    path = os.pathsep.join([str(older), *filter(None, [os.environ.get("PYTHONPATH")])])
    environ = {**os.environ, "PYTHONPATH": path, "SERVER_URL": server_url}
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-1000:]
