import asyncio
from typing import Any

import orjson
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from adapters.dialects.choosing import choose_dialect
from engine.request import Abort
from gateway.schema.anthropic.request import decode_anthropic
from gateway.schema.decoding import UnknownFields
from tests.gateway.answers import answer_to
from tests.gateway.rig import MODEL, STEP, USER, Rig, Setting, played

PATH = "/v1/messages"
COUNT = f"{PATH}/count_tokens"
HERMES = choose_dialect("", "hermes", "think")
TOOL = {"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
LONG = "a long story " * 10


def ask(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 100, "messages": USER, **fields}


async def created(rig: Rig, **fields: Any) -> Any:
    exchange = await rig.client.post(PATH, ask(**fields))
    result = exchange.json
    assert exchange.status == 200, result
    Message.model_validate(result, strict=True)
    return result


async def streamed(rig: Rig, **fields: Any) -> list[Any]:
    async with rig.client.post(PATH, ask(stream=True, **fields)) as exchange:
        events = []
        async for chunk in exchange.chunks():
            for frame in chunk.split(b"\n\n"):
                frame = frame[frame.find(b"event: ") :]  # after the event's number
                if frame.startswith(b"event: "):
                    kind, _, data = frame.removeprefix(b"event: ").partition(b"\ndata: ")
                    events.append(parsed(kind.decode(), data))
    return events


def parsed(kind: str, data: bytes) -> Any:
    event: Any = TypeAdapter(Any).validate_json(data)
    assert event["type"] == kind
    if kind not in ("ping", "error"):
        EVENT.validate_python(event)
    return event


def prompts(rig: Rig) -> list[str]:
    return [bytes(request.spec.prompt).decode() for request in rig.ended]


@played()
async def test_a_message_gets_a_message(rig: Rig) -> None:
    result = await created(rig, system="Be brief.", metadata={"user_id": "me"})
    assert result["content"] == [{"type": "text", "text": "Hello!"}]
    assert (result["stop_reason"], result["stop_sequence"]) == ("end_turn", None)
    assert result["usage"] == {
        "input_tokens": len("system:Be brief.\nuser:hi\n"),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": len("Hello!") + 1,
        "output_tokens_details": {"thinking_tokens": 0},
    }
    assert prompts(rig) == ["system:Be brief.\nuser:hi\n"]


@played()
async def test_the_events_of_a_text_are_in_order(rig: Rig) -> None:
    events = await streamed(rig)
    assert [event["type"] for event in events] == [
        *("message_start", "ping", "content_block_start"),
        *["content_block_delta"] * len("Hello!"),
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    assert "".join(e["delta"]["text"] for e in events[3:-3]) == "Hello!"
    assert events[0]["message"]["content"] == []
    assert events[0]["message"]["usage"]["input_tokens"] == len("user:hi\n")
    assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == len("Hello!") + 1


ALL = "<think>Hm.</think>Well." + CALL


@played(Setting(texts=(ALL,), dialect=HERMES))
async def test_reasoning_text_and_calls_are_separate_blocks(rig: Rig) -> None:
    fields = {"tools": [TOOL], "thinking": {"type": "enabled", "budget_tokens": 50}}
    result = await created(rig, **fields)
    thought, text, call = result["content"]
    assert (thought["type"], thought["thinking"]) == ("thinking", "Hm.")
    assert text == {"type": "text", "text": "Well."}
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "add", {"a": 1})
    assert result["stop_reason"] == "tool_use"
    events = await streamed(rig, **fields)
    blocks: list[str] = ["", "", ""]
    for event in events:
        if event["type"] == "content_block_delta":
            delta = event["delta"]
            said = {"text_delta": "text", "thinking_delta": "thinking"}
            name = said.get(delta["type"], "partial_json")
            blocks[event["index"]] += delta.get(name, "")
    assert blocks == ["Hm.", "Well.", '{"a": 1}']
    kinds = [event["type"] for event in events]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 3
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


@played(Setting(texts=("<think>Hm.</think>Well.",), dialect=HERMES))
async def test_omitted_thinking_is_left_out(rig: Rig) -> None:
    fields = {"thinking": {"type": "adaptive", "display": "omitted"}}
    result = await created(rig, **fields)
    assert [block.get("thinking") for block in result["content"]] == ["", None]
    assert result["usage"]["output_tokens_details"]["thinking_tokens"] > 0
    events = await streamed(rig, **fields)
    assert "Hm" not in str(events)


@played(Setting(texts=("<think>Hm.</think>Well.",), dialect=HERMES))
async def test_thinking_whose_updates_are_requested_is_shown(rig: Rig) -> None:
    result = await created(rig, thinking={"type": "adaptive", "display": "updates"})
    assert [block.get("thinking") for block in result["content"]] == ["Hm.", None]


@pytest.mark.parametrize(
    ("fields", "reason", "sequence"),
    [
        ({"max_tokens": 3}, "max_tokens", None),
        ({"stop_sequences": ["lo"]}, "stop_sequence", "lo"),
    ],
)
@played()
async def test_the_stop_reason_is_reported(
    rig: Rig, fields: dict[str, Any], reason: str, sequence: str | None
) -> None:
    for result in (await created(rig, **fields), (await streamed(rig, **fields))[-2]["delta"]):
        assert (result["stop_reason"], result["stop_sequence"]) == (reason, sequence)


@played(Setting(dialect=HERMES))
async def test_blocks_are_converted_to_chat_messages(rig: Rig) -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "c", "citations": None},
                {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "t1",
                    "content": [{"type": "text", "text": "d"}],
                    "cache_control": {"type": "ephemeral"},
                },
                {"type": "tool_result", "tool_use_id": "t1", "content": "e", "is_error": True},
                {"type": "text", "text": "f"},
            ],
        },
    ]
    system = [{"type": "text", "text": "S", "cache_control": {"type": "ephemeral"}}]
    await created(rig, messages=messages, system=system, tools=[TOOL])
    assert prompts(rig) == [
        "tools:add\nsystem:S\nuser:a\nb\nassistant:c\ntool:d\ntool:Error: e\nuser:f\n"
    ]


@played()
async def test_an_assistant_message_at_the_end_is_continued(rig: Rig) -> None:
    await created(rig, messages=[*USER, {"role": "assistant", "content": "Once upon"}])
    assert prompts(rig) == ["user:hi\nassistant:Once upon"]


@pytest.mark.parametrize(
    ("choice", "must_call"),
    [
        ({"type": "any"}, True),
        ({"type": "tool", "name": "add", "disable_parallel_tool_use": True}, True),
        ({"type": "auto"}, False),
        ({"type": "none"}, False),
    ],
)
@played(Setting(texts=(CALL,), dialect=HERMES))
async def test_tool_choice_works_as_in_chat(
    rig: Rig, choice: dict[str, Any], must_call: bool
) -> None:
    await created(rig, tools=[TOOL], tool_choice=choice)
    assert (rig.ended[0].spec.grammar is not None) == must_call


@played(Setting(texts=("{}",)))
async def test_a_format_constrains_the_text(rig: Rig) -> None:
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    await created(rig, output_config={"format": {"type": "json_schema", "schema": schema}})
    assert rig.ended[0].spec.grammar is not None


@played()
async def test_count_tokens_generates_nothing(rig: Rig) -> None:
    body = {"model": MODEL, "messages": USER, "system": "Be brief."}
    result = (await rig.client.post(COUNT, body)).json
    assert result == {"input_tokens": len("system:Be brief.\nuser:hi\n")}
    assert not rig.ended


@pytest.mark.parametrize("path", [PATH, COUNT])
@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "content[0].source"),
        ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, "content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "content[0].text"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": 1.5}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"stop_sequences": [str(i) for i in range(17)]}, "stop_sequences"),
        ({"tools": [{"type": "computer_20250124", "name": "computer"}]}, "tools[0].type"),
        ({"tools": [{"name": "a"}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"thinking": {"type": "maybe"}}, "thinking.type"),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 99}, "max_tokens": 98},
            "'thinking.budget_tokens': expected at most 'max_tokens' (98).",
        ),
        ({"thinking": {"type": "adaptive", "display": "all"}}, "thinking.display"),
        ({"output_config": {"effort": "immense"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
        ({"container": "c"}, "container"),
        ({"service_tier": "fast"}, "service_tier"),
        ({"regex": "a"}, "regex"),
    ],
)
def test_errors_name_the_field_in_anthropics_shape(
    path: str, fields: dict[str, Any], named: str
) -> None:
    answer = answer_to(path, ask(**fields), Setting(dialect=HERMES))
    result = answer.json
    assert answer.status == 400
    assert (result["type"], result["error"]["type"]) == ("error", "invalid_request_error")
    assert named in result["error"]["message"]
    assert result["request_id"] == answer.headers["request-id"]


def test_an_error_in_a_schema_names_its_field() -> None:
    schema = {"enum": orjson.loads("[" * 100 + "]" * 100)}
    answer = answer_to(
        PATH, ask(output_config={"format": {"type": "json_schema", "schema": schema}})
    )
    assert answer.status == 400
    assert "Invalid 'output_config.format.schema': " in answer.json["error"]["message"]


@played()
async def test_max_tokens_is_required_except_for_counting(rig: Rig) -> None:
    body = {"model": MODEL, "messages": USER}
    assert "max_tokens" in (await rig.client.post(PATH, body)).json["error"]["message"]
    assert (await rig.client.post(COUNT, body)).status == 200


@played()
async def test_edits_that_keep_everything_are_accepted(rig: Rig) -> None:
    edits = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    await created(rig, context_management=edits)


@played(Setting(keys=("a",)))
async def test_every_error_has_anthropics_type(rig: Rig) -> None:
    for method, path, headers, status, kind in [
        ("POST", PATH, {}, 401, "authentication_error"),
        ("POST", f"{PATH}/batches", {"x-api-key": "a"}, 404, "not_found_error"),
        ("GET", PATH, {"x-api-key": "a"}, 405, "invalid_request_error"),
    ]:
        exchange = await rig.client.send(method, path, [b"{}"], headers)
        result = exchange.json
        assert (exchange.status, result["error"]["type"]) == (status, kind)
    exchange = await rig.client.post(PATH, ask(model="claude"), {"x-api-key": "a"})
    assert exchange.json["error"]["type"] == "not_found_error"


@played(Setting(texts=(LONG,)))
async def test_a_failing_stream_ends_with_an_error_event(rig: Rig) -> None:
    async with rig.client.post(PATH, ask(stream=True)) as exchange:
        await exchange.start()
        await rig.service.groups.drain(0)
        body = await exchange.read()
    last = body.rstrip(b"\n").split(b"\n\n")[-1]
    event = parsed("error", last.partition(b"event: error\ndata: ")[2])
    assert event["error"]["type"] == "overloaded_error"


@pytest.mark.parametrize("stream", [False, True])
@played(Setting(texts=(LONG,)))
async def test_a_disconnect_ends_the_request(rig: Rig, stream: bool) -> None:
    async with rig.client.post(PATH, ask(stream=stream)):
        await asyncio.sleep(3.5 * STEP)
    await asyncio.sleep(STEP)
    assert [request.abort for request in rig.ended] == [Abort.CLIENT_GONE]


@pytest.mark.parametrize(
    "source",
    [
        {"type": "text", "media_type": "text/plain", "data": "All is well."},
        {"type": "content", "content": "All is well."},
        {"type": "content", "content": [{"type": "text", "text": "All is well."}]},
    ],
)
@played()
async def test_a_document_of_plain_text_is_text(rig: Rig, source: dict[str, Any]) -> None:
    document = {"type": "document", "title": "Report", "source": source}
    content = [document, {"type": "text", "text": "Is it?"}]
    await created(rig, messages=[{"role": "user", "content": content}])
    assert prompts(rig) == ["user:Report\nAll is well.\nIs it?\n"]


@pytest.mark.parametrize(
    "source", [{"type": "base64", "media_type": "application/pdf", "data": "JVBE"}, {}, "text"]
)
def test_another_document_is_refused_by_name(source: object) -> None:
    content = [{"type": "document", "source": source}]

    body = ask(messages=[{"role": "user", "content": content}])
    answer = answer_to(PATH, body)
    error = answer.json["error"]
    assert answer.status == 400
    assert "'messages[0].content[0].source': only plain text is supported" in error["message"]


def test_tools_that_clients_run_become_functions_with_their_arguments() -> None:
    tools = [
        {"type": "bash_20250124", "name": "bash"},
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"},
        {"type": "web_search_20250305", "name": "web_search"},
    ]
    request = decode_anthropic(orjson.dumps(ask(tools=tools)), UnknownFields())
    plan = request.as_chat().tool_plan()
    assert [function.name for function in plan.offered] == ["bash", "str_replace_based_edit_tool"]
    bash, editor = (function.parameters for function in plan.offered)
    assert bash is not None
    assert editor is not None
    assert bash["properties"].keys() == {"command", "restart"}
    assert editor["required"] == ["command", "path"]
