import json
from typing import Any

import pytest

from gateway.schema.responses.client_tools import call_fields
from tests.gateway.responses.asking import HERMES, PATH
from tests.gateway.rig import MODEL, Rig, Setting, play, played

IGNORED = "x-podway-ignored-fields"
ADD = {"type": "function", "name": "add", "parameters": {"type": "object"}}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}
GITHUB = {
    "type": "namespace",
    "name": "mcp__github__",
    "description": "GitHub.",
    "tools": [{**ADD, "name": "search", "strict": False}],
}
# The tools of a first request of Codex CLI.
CODEX = [
    {**ADD, "name": "exec_command", "strict": False},
    {**PATCH, "defer_loading": False},
    {"type": "web_search", "external_web_access": False},
    {"type": "local_shell"},
    GITHUB,
]


def call(name: str, arguments: object) -> str:
    body = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{body}\n</tool_call>"


def setting(*texts: str) -> Setting:
    return Setting(texts=texts or ("Hello!",), dialect=HERMES)


async def posted(rig: Rig, path: str = PATH, **fields: Any) -> tuple[int, Any, dict[str, str]]:
    exchange = await rig.client.post(path, {"model": MODEL, "input": "hi", **fields})
    return exchange.status, exchange.json, exchange.headers


async def events_of(rig: Rig, **fields: Any) -> list[Any]:
    body = {"model": MODEL, "input": "hi", "stream": True, **fields}
    return (await rig.client.post(PATH, body)).events


@played(setting())
async def test_codex_is_served_and_tools_of_a_server_are_ignored(rig: Rig) -> None:
    fields: dict[str, Any] = {
        "tools": CODEX,
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "k",
        "client_metadata": {"x-codex-installation-id": "1"},
    }
    status, body, headers = await posted(rig, **fields)
    assert status == 200, body
    assert headers[IGNORED] == "client_metadata, tools[].web_search, tools[].local_shell"
    assert [tool["type"] for tool in body["tools"]] == ["function", "custom", "namespace"]
    await events_of(rig, **fields)
    for request in rig.ended:
        prompt = bytes(request.spec.prompt).decode()
        assert prompt.startswith("tools:exec_command,apply_patch,mcp__github__search\n")


@played(Setting(dialect=HERMES, rejects_unknown_fields=True))
async def test_a_strict_server_rejects_tools_of_a_server(rig: Rig) -> None:
    status, body, _ = await posted(rig, tools=[ADD, {"type": "web_search"}])
    assert (status, body["error"]["param"]) == (400, "tools[1].type")


def test_a_call_of_a_custom_tool_has_its_input_as_text() -> None:
    patch = "*** Begin\n+é\n"
    item = {"type": "custom_tool_call", "name": "apply_patch", "input": patch}

    async def scene(rig: Rig) -> None:
        _, body, _ = await posted(rig, tools=[PATCH])
        (made,) = body["output"]
        assert {name: made[name] for name in item} == item
        events = await events_of(rig, tools=[PATCH])
        kinds = [event["type"].removeprefix("response.") for event in events]
        assert kinds[2:6] == [
            "output_item.added",
            "custom_tool_call_input.delta",
            "custom_tool_call_input.done",
            "output_item.done",
        ]
        assert events[4]["input"] == events[3]["delta"] == patch
        results = {"type": "custom_tool_call_output", "call_id": made["call_id"], "output": "ok"}
        more = {"previous_response_id": body["id"], "tools": [PATCH]}
        status, body, _ = await posted(rig, input=[results], **more)
        assert (status, body["output"][0]["content"][0]["text"]) == (200, "Done.")

    texts = [call("apply_patch", {"input": patch})] * 2
    play(scene, setting(*texts, "Done."))


def test_a_custom_call_that_is_cut_off_keeps_what_was_generated() -> None:
    async def scene(rig: Rig) -> None:
        _, body, _ = await posted(rig, tools=[PATCH])
        assert body["output"][0]["input"] == '{"input": "*** Beg'

    text = call("apply_patch", {"input": "*** Begin"})
    play(scene, setting(text[: text.index("Beg") + 3]))


@played(setting(call("mcp__github__search", {"q": "x"}), "Done."))
async def test_a_call_in_a_namespace_has_name_and_namespace(rig: Rig) -> None:
    _, body, _ = await posted(rig, tools=[GITHUB])
    (made,) = body["output"]
    assert (made["type"], made["name"]) == ("function_call", "search")
    assert made["namespace"] == "mcp__github__"
    result = {"type": "function_call_output", "call_id": made["call_id"], "output": "none"}
    history = [{"role": "user", "content": "hi"}, made, result]
    status, body, _ = await posted(rig, input=history, tools=[GITHUB])
    assert (status, body["output"][0]["content"][0]["text"]) == (200, "Done.")


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([{"type": "robot"}], "tools[0].type"),
        ([{"type": "custom"}], "tools[0].name"),
        ([{"type": "function", "name": "a b"}], "tools[0].name"),
        ([{**GITHUB, "tools": [{"type": "web_search"}]}], "tools[0].tools[0].type"),
        ([{**GITHUB, "tools": [{"type": "function"}]}], "tools[0].tools[0].name"),
    ],
)
@played(setting())
async def test_the_error_names_an_invalid_tool(rig: Rig, tools: list[Any], param: str) -> None:
    status, body, _ = await posted(rig, tools=tools)
    assert (status, body["error"]["param"]) == (400, param)


@played(setting())
async def test_input_tokens_are_counted_without_generating(rig: Rig) -> None:
    status, body, _ = await posted(rig, instructions="Be brief.")
    assert status == 200
    fields = {"instructions": "Be brief.", "tools": [ADD]}
    status, counted, _ = await posted(rig, "/v1/responses/input_tokens", **fields)
    num_tokens = len("tools:add\n") + body["usage"]["input_tokens"]
    assert (status, counted) == (
        200,
        {"object": "response.input_tokens", "input_tokens": num_tokens},
    )
    more = {"previous_response_id": body["id"]}
    _, counted, _ = await posted(rig, "/v1/responses/input_tokens", **more)
    assert counted["input_tokens"] == len("user:hi\nassistant:Hello!\nuser:hi\n")
    assert len(rig.ended) == 1


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        ("/v1/responses/compact", {}, "Compaction is not supported"),
    ],
)
@played()
async def test_what_is_not_supported_is_a_400_that_says_so(
    rig: Rig, path: str, fields: dict[str, Any], message: str
) -> None:
    status, body, _ = await posted(rig, path, **fields)
    assert status == 400
    assert body["error"]["message"].startswith(message)


SHELL: dict[str, Any] = {"type": "shell", "environment": {"type": "local"}}
FILES: dict[str, Any] = {"type": "apply_patch"}
RESULT = {"stdout": "a.py\n", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}
UPDATE = {"type": "update_file", "path": "a.py", "diff": "@@\n-1\n+2\n"}


@played(setting(call("shell", {"commands": ["ls"], "timeout_ms": 9}), "One."))
async def test_commands_of_a_shell_and_their_results_are_items_of_their_own(rig: Rig) -> None:
    events = await events_of(rig, tools=[SHELL])
    added = next(e for e in events if e["type"] == "response.output_item.added")
    assert added["item"]["action"]["commands"] == []
    first = events[-1]["response"]
    (item,) = first["output"]
    assert (item["type"], item["status"]) == ("shell_call", "completed")
    limits = {"timeout_ms": 9, "max_output_length": None}
    assert item["action"] == {"commands": ["ls"], **limits}
    result = {"type": "shell_call_output", "call_id": item["call_id"], "output": [RESULT]}
    more = {"previous_response_id": first["id"], "tools": [SHELL]}
    status, _, _ = await posted(rig, input=[result], **more)
    assert status == 200
    prompt = bytes(rig.ended[-1].spec.prompt).decode()
    assert prompt.startswith("tools:shell\n")
    assert json.loads(prompt.rpartition("tool:")[2]) == [RESULT]


@played(setting(call("apply_patch", UPDATE), "One."))
async def test_patches_of_files_and_their_results_are_items_of_their_own(rig: Rig) -> None:
    choice = {"type": "apply_patch"}
    status, first, _ = await posted(rig, tools=[FILES, SHELL], tool_choice=choice)
    assert status == 200, first
    (item,) = first["output"]
    assert item["type"] == "apply_patch_call"
    assert item["operation"] == UPDATE
    kind, call_id = "apply_patch_call_output", item["call_id"]
    result = {"type": kind, "call_id": call_id, "status": "failed", "output": "No such file."}
    status, _, _ = await posted(rig, input=[item, result], tools=[FILES])
    assert status == 200
    assert bytes(rig.ended[-1].spec.prompt).endswith(b"tool:failed\nNo such file.\n")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{**SHELL, "environment": {"type": "container_auto"}}]}, "tools[0].environment"),
        ({"tools": [{"type": "programmatic_tool_calling"}]}, "tools[0].type"),
        ({"input": [{"type": "shell_call", "call_id": "c"}]}, "input[0].action"),
        ({"input": [{"type": "shell_call", "call_id": "c", "action": {}}]}, "input[0].action"),
        ({"input": [{"type": "shell_call_output", "call_id": "c", "output": "x"}]}, "input[0].out"),
    ],
)
@played(setting())
async def test_what_no_client_can_run_is_named(
    rig: Rig, fields: dict[str, Any], param: str
) -> None:
    status, body, _ = await posted(rig, **fields)
    assert status == 400
    assert body["error"]["param"].startswith(param)


@pytest.mark.parametrize(
    ("arguments", "commands"),
    [("{", []), ('{"commands": "ls"}', ["ls"]), ("[]", []), ('{"commands": [1]}', ["1"])],
)
def test_arguments_of_any_form_become_an_action(arguments: str, commands: list[str]) -> None:
    assert call_fields("shell", arguments)["action"]["commands"] == commands
