"""Coding agents: how each is run without a terminal and without a network."""

import json
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
CLIENTS = Path(os.environ.get("CLIENTS", HERE.parents[1] / ".venv-clients"))
PROMPT = "Run a command."
COMMAND = "echo from-the-tool"
SECONDS = 240.0
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")  # Qwen Code uses them for 127.0.0.1, too
NO_NETWORK = {  # nothing listens there
    **dict.fromkeys(PROXIES, "http://127.0.0.1:9"),
    "NO_PROXY": "127.0.0.1,localhost",
}


@dataclass(frozen=True, slots=True)
class Agent:
    """`flags` and `environment` are for the server's address (without /v1) and a model."""

    name: str
    flags: Callable[[str, str], list[str]]
    environment: Callable[[str, str], Mapping[str, str]]
    call: str  # what the model writes, so that the agent runs COMMAND or edits a file
    programs: str = "node_modules/.bin"
    repeated: float = 0.9  # of a prompt, at the start of the next one

    def run(self, server: str, model: str, directory: Path) -> str:
        """Give it `PROMPT`; all that it prints, JSON lines of most. It must exit with 0."""
        program = CLIENTS.resolve() / self.programs / self.name
        if not program.exists():
            pytest.skip(f"{self.name} is not installed: make clients")
        home = directory / "home"
        home.mkdir()
        environ = {"PATH": os.environ["PATH"], "HOME": str(home), **NO_NETWORK}
        environ.update(self.environment(server, model))
        ended: subprocess.CompletedProcess[str] = subprocess.run(
            [program, *self.flags(server, model), PROMPT],
            env=environ,
            cwd=directory,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
        return ended.stdout


def events(output: str) -> Iterator[Any]:
    """The JSON objects among the printed lines."""
    return (json.loads(line) for line in output.splitlines() if line.startswith("{"))


def call(tool: str, **arguments: str) -> str:
    """A call of a tool, as models of the Hermes dialect write it."""
    made = {"name": tool, "arguments": arguments}
    return f"<tool_call>\n{json.dumps(made)}\n</tool_call>"


def _codex_flags(server: str, model: str, more: str = "") -> list[str]:
    wire = f'wire_api="responses"{more}'
    provider = f'{{name="Podway",base_url="{server}/v1",env_key="PODWAY_KEY",{wire}}}'
    config = {
        "model_provider": '"podway"',
        "model_providers.podway": provider,
        "analytics.enabled": "false",
        "check_for_update_on_startup": "false",
    }
    flags = [part for name, value in config.items() for part in ("-c", f"{name}={value}")]
    fixed = ["--json", "--skip-git-repo-check", "--ephemeral", "-s", "danger-full-access"]
    return ["exec", *fixed, "-m", model, *flags]


def claude_flags(server: str, model: str, tool: str = "Bash") -> list[str]:
    """Flags of Claude Code, which may use one tool."""
    shown = ["--output-format", "stream-json", "--verbose"]
    return [*shown, "--tools", tool, f"--allowedTools={tool}", "--model", model, "-p"]


def _claude_environment(server: str, model: str) -> dict[str, str]:
    return {
        "ANTHROPIC_BASE_URL": server,
        "ANTHROPIC_AUTH_TOKEN": "any",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "256",
    }


def _qwen_flags(server: str, model: str) -> list[str]:
    access = ["--auth-type", "openai", "--openai-base-url", f"{server}/v1"]
    return [*access, "--openai-api-key", "any", "-m", model, "-y", "-o", "stream-json"]


def _opencode_environment(server: str, model: str) -> dict[str, str]:
    limit = {"context": 32768, "output": 256}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{server}/v1", "apiKey": "any"},
        "models": {model: {"limit": limit}},
    }
    config = {
        "provider": {"podway": provider},
        "model": f"podway/{model}",
        "small_model": f"podway/{model}",
        "permission": {"bash": "allow"},
        "autoupdate": False,
        "share": "disabled",
    }
    switches = ("AUTOUPDATE", "MODELS_FETCH", "LSP_DOWNLOAD", "DEFAULT_PLUGINS")
    return {
        "OPENCODE_CONFIG_CONTENT": json.dumps(config),
        **{f"OPENCODE_DISABLE_{name}": "1" for name in switches},
    }


def _goose_environment(server: str, model: str) -> dict[str, str]:
    provider = {"PROVIDER": "openai", "MODEL": model, "MODE": "auto", "TELEMETRY_OFF": "true"}
    switches = {f"GOOSE_DISABLE_{name}": "true" for name in ("KEYRING", "SESSION_NAMING")}
    variables = {f"GOOSE_{name}": value for name, value in provider.items()}
    return {**variables, **switches, "OPENAI_HOST": server, "OPENAI_API_KEY": "any"}


def _goose_flags(server: str, model: str) -> list[str]:
    shown = ["--output-format", "stream-json"]
    return ["run", "--no-session", "--with-builtin", "developer", *shown, "-t"]


def _aider_flags(server: str, model: str) -> list[str]:
    switches = ("git", "check-update", "show-release-notes", "show-model-warnings", "analytics")
    fixed = [f"--no-{name}" for name in (*switches, "fancy-input", "pretty", "detect-urls")]
    tested = ["--auto-test", "--test-cmd", "python3 script.py", "script.py"]
    named = ["--model", f"openai/{model}", "--edit-format", "whole", "--yes-always"]
    return [*fixed, *named, *tested, "--message"]


CODEX = Agent(
    "codex",
    _codex_flags,
    lambda server, model: {"PODWAY_KEY": "any"},
    call("exec_command", cmd=COMMAND),
)
CODEX_WEBSOCKET = replace(
    CODEX, flags=lambda server, model: _codex_flags(server, model, ",supports_websockets=true")
)
CLAUDE_CODE = Agent(
    "claude",
    claude_flags,
    _claude_environment,
    call("Bash", command=COMMAND, description="Echo"),
)
QWEN_CODE = Agent(
    "qwen",
    _qwen_flags,
    lambda server, model: {"QWEN_TELEMETRY_ENABLED": "false", **dict.fromkeys(PROXIES, "")},
    call("run_shell_command", command=COMMAND, description="Echo", is_background="false"),
)
OPENCODE = Agent(
    "opencode",
    lambda server, model: ["run", "--format", "json", "--title", "Test"],
    _opencode_environment,
    call("bash", command=COMMAND, description="Echo"),
)
GOOSE = Agent("goose", _goose_flags, _goose_environment, call("shell", command=COMMAND))
# It has no tools: it writes the file, runs it, and sends what that printed.
SCRIPT = 'import sys\n\nsys.exit("-".join(["from", "the", "tool"]))\n'
AIDER = Agent(
    "aider",
    _aider_flags,
    lambda server, model: {
        "OPENAI_API_BASE": f"{server}/v1",
        "OPENAI_API_KEY": "any",
        "LITELLM_LOCAL_MODEL_COST_MAP": "true",
    },
    f"script.py\n```\n{SCRIPT}```\n",
    programs="aider/bin",
    repeated=0.5,  # the files come before the conversation
)
