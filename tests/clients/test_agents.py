"""Coding agents, offline: a tool call and its result, and a plain answer.

For the tool call the model is scripted: it calls the agent's tool, and then ends the conversation.
With the built-in model a proxy asks for the call (`tests.clients.forcing`), which a grammar forces.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from adapters.dialects.choosing import choose_dialect
from tests.adapters.images.pictures import encoded, noise
from tests.clients.agents import (
    AIDER,
    CLAUDE_CODE,
    CODEX,
    CODEX_WEBSOCKET,
    GOOSE,
    OPENCODE,
    QWEN_CODE,
    SCRIPT,
    Agent,
    call,
    claude_flags,
    events,
)
from tests.clients.forcing import forcing
from tests.gateway.images.requests import seen
from tests.gateway.rig import MODEL, Setting
from tests.gateway.scripted_model import ScriptedDecoder
from tests.gateway.serve.live import listening

HERMES = choose_dialect("", "hermes", "think")
ANSWER = "All done."
RESULT = "from-the-tool"
SETTING = Setting(
    step=0.0005,
    context=1 << 18,
    num_blocks=1 << 19,
    max_queue_tokens=1 << 20,
    dialect=HERMES,
)


def run_with_a_tool(agent: Agent, directory: Path) -> list[Any]:
    """The agent's events; the last two requests that the server got are checked."""
    prepared = [""] if agent is CODEX_WEBSOCKET else []  # a prompt for which nothing is generated
    setting = replace(SETTING, texts=(*prepared, agent.call, ANSWER))
    with listening(setting, drain_seconds=1.0) as live:
        output = agent.run(live.url.removesuffix("/v1"), MODEL, directory)
    assert len(live.rig.ended) == 2 + len(prepared)
    first, second = live.rig.ended[-2:]
    assert RESULT not in bytes(first.spec.prompt).decode()
    assert RESULT in bytes(second.spec.prompt).decode()
    assert second.num_cached > agent.repeated * first.prompt_len
    return list(events(output))


@pytest.mark.parametrize("agent", [CODEX, CODEX_WEBSOCKET], ids=["http", "websocket"])
def test_codex_calls_a_tool_and_reads_its_output(agent: Agent, tmp_path: Path) -> None:
    found = run_with_a_tool(agent, tmp_path)
    items = [event["item"] for event in found if event["type"] == "item.completed"]
    (command,) = [item for item in items if item["type"] == "command_execution"]
    assert (command["aggregated_output"], command["exit_code"]) == (f"{RESULT}\n", 0)
    assert (items[-1]["type"], items[-1]["text"]) == ("agent_message", ANSWER)


def test_claude_code_calls_a_tool_and_reads_its_output(tmp_path: Path) -> None:
    found = run_with_a_tool(CLAUDE_CODE, tmp_path)
    (tool,) = [event for event in found if event["type"] == "user"]
    assert tool["message"]["content"][0]["content"] == RESULT
    assert (found[-1]["subtype"], found[-1]["result"]) == ("success", ANSWER)


def test_claude_code_shows_the_model_an_image_that_it_reads(tmp_path: Path) -> None:
    picture = tmp_path / "picture.png"
    picture.write_bytes(encoded(noise(64, 48)))
    reading = replace(
        CLAUDE_CODE,
        flags=partial(claude_flags, tool="Read"),
        call=call("Read", file_path=str(picture)),
    )
    setting = replace(SETTING, texts=(reading.call, ANSWER), decoder=ScriptedDecoder())
    with listening(setting, drain_seconds=1.0) as live:
        output = reading.run(live.url.removesuffix("/v1"), MODEL, tmp_path)
    (sent, _) = seen(live.rig)[0]
    with Image.open(BytesIO(sent)) as image:
        assert image.size == (64, 48)
    assert list(events(output))[-1]["result"] == ANSWER


def test_opencode_calls_a_tool_and_reads_its_output(tmp_path: Path) -> None:
    found = run_with_a_tool(OPENCODE, tmp_path)
    (tool,) = [event["part"] for event in found if event["type"] == "tool_use"]
    assert tool["state"]["output"] == f"{RESULT}\n"
    (text,) = [event["part"]["text"] for event in found if event["type"] == "text"]
    assert text == ANSWER


def test_qwen_code_calls_a_tool_and_reads_its_output(tmp_path: Path) -> None:
    found = run_with_a_tool(QWEN_CODE, tmp_path)
    (tool,) = [event for event in found if event["type"] == "user"]
    assert RESULT in tool["message"]["content"][0]["content"]
    assert (found[-1]["subtype"], found[-1]["result"]) == ("success", ANSWER)


def test_goose_calls_a_tool_and_reads_its_output(tmp_path: Path) -> None:
    messages = [event["message"] for event in run_with_a_tool(GOOSE, tmp_path)[:-1]]
    parts = [part for message in messages for part in message["content"]]
    (result,) = [part["toolResult"]["value"] for part in parts if part["type"] == "toolResponse"]
    assert (result["content"][0]["text"], result["isError"]) == (RESULT, False)
    assert "".join(part["text"] for part in parts if part["type"] == "text") == ANSWER


def test_aider_writes_a_file_runs_it_and_reads_its_output(tmp_path: Path) -> None:
    run_with_a_tool(AIDER, tmp_path)
    assert (tmp_path / "script.py").read_text() == SCRIPT


def texts(output: str) -> Iterator[str]:
    """The messages of the model, in any agent's events."""
    for event in events(output):
        match event:
            case {"type": "result", "result": str(text)}:
                yield text
            case {"item": {"type": "agent_message", "text": str(text)}}:
                yield text
            case {"type": "message", "message": {"content": [{"type": "text", "text": str(text)}]}}:
                yield text


@pytest.mark.parametrize("agent", [CODEX, CLAUDE_CODE, GOOSE], ids=lambda agent: agent.name)
def test_the_builtin_model_calls_a_tool_that_its_grammar_forces_and_then_answers(
    agent: Agent, server_url: str, tmp_path: Path
) -> None:
    """One agent for each of Responses, Messages and chats: their prompts are long."""
    with forcing(server_url, agent.call) as forced:
        output = agent.run(forced.url, "builtin", tmp_path)
    assert forced.num_forced == 1
    assert any(RESULT in body.replace(f"echo {RESULT}", "") for body in forced.results)
    assert any(texts(output))
