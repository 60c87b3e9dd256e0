from typing import Any

import pytest

from tests.gateway.answers import answer_to
from tests.gateway.rig import CHAT, MODEL, TEXT, Rig, Setting, chat, played, text

IGNORED = "x-podway-ignored-fields"
CALL = {"name": "f", "arguments": "{}", "parsed_arguments": {}}
HI = {"role": "user", "content": "hi"}

# What clients send: the body's fields, and the names that the header has.
SENT: dict[str, tuple[str, dict[str, Any], str]] = {
    "gradio's history": (
        CHAT,
        {"messages": [{**HI, "metadata": None, "options": None}, {**HI, "metadata": {}}]},
        "messages[].metadata, messages[].options",
    ),
    "LiteLLM": (
        CHAT,
        {"messages": [{**HI, "provider_specific_fields": {"a": 1}}]},
        "messages[].provider_specific_fields",
    ),
    "a cache mark on a part": (
        CHAT,
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "hi", "cache_control": {"type": "e"}}],
                }
            ]
        },
        "messages[].content[].cache_control",
    ),
    "openai's parse()": (
        CHAT,
        {
            "messages": [
                HI,
                {
                    "role": "assistant",
                    "content": None,
                    "parsed": None,
                    "tool_calls": [{"id": "1", "type": "function", "function": CALL}],
                    "reasoning_details": [{"type": "reasoning.text"}],
                },
                {"role": "tool", "tool_call_id": "1", "content": "x"},
            ]
        },
        "messages[].parsed, messages[].tool_calls[].function.parsed_arguments, "
        "messages[].reasoning_details",
    ),
    "SGLang's fields": (
        CHAT,
        {"no_stop_trim": True, "separate_reasoning": True, "return_hidden_states": False},
        "no_stop_trim, separate_reasoning, return_hidden_states",
    ),
    "llama.cpp's fields": (TEXT, {"cache_prompt": True, "mirostat": 0}, "cache_prompt, mirostat"),
    "any other": (CHAT, {"foo": {"a": 1}, "temprature": 1}, "foo, temprature"),
    "hints": (CHAT, {"verbosity": "low"}, "verbosity"),
    "hints of responses": (
        "/v1/responses",
        {"input": "hi", "text": {"verbosity": "high"}, "store": False},
        "text.verbosity",
    ),
    "Anthropic's server tools": (
        "/v1/messages",
        {
            "messages": [HI],
            "max_tokens": 5,
            "tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 5}],
        },
        "tools[].max_uses, tools[].web_search_20250305",
    ),
    "neutral values": (CHAT, {"use_beam_search": False, "echo": False}, "use_beam_search, echo"),
    "Codex": (
        "/v1/responses",
        {"input": [{**HI, "x": 1}], "client_metadata": {"a": "b"}, "store": False},
        "input[].x, client_metadata",
    ),
    "Goose's thinking": (
        "/v1/messages",
        {
            "messages": [HI],
            "max_tokens": 5,
            "thinking": {"type": "adaptive", "block_binding": {"type": "auto"}},
        },
        "thinking.block_binding",
    ),
    "edits of the context": (
        "/v1/messages",
        {
            "messages": [HI],
            "max_tokens": 5,
            "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]},
        },
        "context_management",
    ),
    "compaction": (
        "/v1/responses",
        {"input": "hi", "context_management": [{"type": "compaction"}], "store": False},
        "context_management",
    ),
    "Anthropic's clients": (
        "/v1/messages",
        {"messages": [{**HI, "x": 1}], "max_tokens": 5},
        "messages[].x",
    ),
}


def body_of(path: str, fields: dict[str, Any]) -> dict[str, Any]:
    base = {CHAT: chat, TEXT: text}.get(path)
    return {**(base() if base else {"model": MODEL}), **fields}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("path", "fields", "names"), SENT.values(), ids=SENT)
@played()
async def test_fields_of_clients_are_ignored_and_named(
    rig: Rig, path: str, fields: dict[str, Any], names: str, stream: bool
) -> None:
    exchange = await rig.client.post(path, body_of(path, {**fields, "stream": stream}))
    assert exchange.status == 200
    assert exchange.headers[IGNORED] == names


HINTS = {name for name in SENT if name.startswith("hints")}  # known fields


@pytest.mark.parametrize("name", sorted(SENT.keys() - HINTS))
def test_a_strict_server_rejects_them_by_name(name: str) -> None:
    path, fields, names = SENT[name]

    answer = answer_to(path, body_of(path, fields), Setting(rejects_unknown_fields=True))
    error = answer.json["error"]
    assert answer.status == 400
    assert names.split(", ")[0].rpartition(".")[2] in error["message"]
    assert IGNORED not in answer.headers


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"use_beam_search": True}, "use_beam_search"),
        (CHAT, {"grammar": "root ::= x"}, "grammar"),
        (CHAT, {"stream_options": {"usage": True}, "stream": True}, "stream_options.usage"),
        (CHAT, {"response_format": {"type": "text", "strict": True}}, "response_format.strict"),
        (CHAT, {"messages": [{**HI, "x": 1, "role": "robot"}]}, "messages[0].role"),
        (CHAT, {"messages": [{**HI, "x": 1}], "unknown": 1, "regex": "a"}, "regex"),
    ],
)
def test_other_unknown_fields_and_unsupported_values_stay_errors(
    path: str, fields: dict[str, Any], param: str
) -> None:
    answer = answer_to(path, body_of(path, fields))
    error = answer.json["error"]
    assert (answer.status, error["param"]) == (400, param)


@played()
async def test_a_request_without_unknown_fields_has_no_such_header(rig: Rig) -> None:
    exchange = await rig.client.post(CHAT, chat())
    assert IGNORED not in exchange.headers


@played()
async def test_the_header_names_at_most_sixteen_fields(rig: Rig) -> None:
    unknown: dict[str, Any] = {f"x{i}": 1 for i in range(20)} | {"é\n": 1, "y" * 200: 1}
    exchange = await rig.client.post(CHAT, chat(messages=[{**HI, **unknown}]))
    *named, rest = exchange.headers[IGNORED].split(", ")
    assert named == [f"messages[].x{i}" for i in range(16)]
    assert rest == "6 more"
