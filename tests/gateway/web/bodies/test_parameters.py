from typing import Any

import pytest

from tests.gateway.answers import answer_to
from tests.gateway.rig import CHAT, TEXT, USER, Setting, chat, text

TOOL = {"type": "function", "function": {"name": "f"}}
SCHEMA = "response_format.json_schema"
CROWDED: dict[str, Any] = {"properties": {f"p{number}": {} for number in range(1000)}}
INVALID_SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "thing"}}}


def allowed(mode: str, *tools: dict[str, Any]) -> dict[str, Any]:
    """A `tool_choice` of some tools."""
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [*tools]}}


ASKS_NOTHING: list[dict[str, Any]] = [
    {"logprobs": False, "top_logprobs": None},
    {"top_logprobs": 0},
    {"tools": []},
    {"tools": None, "tool_choice": "none", "parallel_tool_calls": True},
    {"tool_choice": "auto", "functions": [], "function_call": "none"},
    {"response_format": {"type": "text"}},
    {"modalities": ["text"]},
    {"audio": None, "prediction": None, "web_search_options": None, "moderation": None},
    {"reasoning_effort": "none", "verbosity": "medium"},
    {"verbosity": "low"},
    {"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": True}},
    {"prediction": {"type": "content", "content": "x"}},
    {"prediction": {"type": "content", "content": [{"type": "text", "text": "x"}]}},
    {"tools": [TOOL], "tool_choice": "none"},
    {"skip_special_tokens": True, "spaces_between_special_tokens": True},
    {"structured_outputs": {}, "guided_decoding_backend": "any"},
    {"include_stop_str_in_output": False, "return_token_ids": False, "prompt_logprobs": None},
    {"add_generation_prompt": True, "continue_final_message": False},
    {"user": "u", "metadata": {"a": "b"}, "store": True, "safety_identifier": "s"},
    {"prompt_cache_key": "k", "prompt_cache_retention": "24h", "prompt_cache_options": {}},
    {"service_tier": "auto"},
    {"service_tier": "default"},
    {"priority": 7, "cache_salt": "s", "ttft_deadline_ms": 1, "deadline_ms": 60000.5},
    {"priority": None, "cache_salt": None, "ttft_deadline_ms": None, "deadline_ms": None},
    {"stop": []},
    {"stop": None, "n": None, "seed": None, "temperature": None, "top_p": None},
    {"max_tokens": 5, "max_completion_tokens": 5},
    {"stream": False, "stream_options": None, "logit_bias": None},
    {"top_k": -1, "min_p": 0, "repetition_penalty": 1, "min_tokens": 0, "stop_token_ids": []},
]

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"functions": [{"name": "f"}], "tools": [TOOL]}, "functions"),
    ({"functions": [{"name": "f"}], "function_call": {"name": "g"}}, "function_call"),
    ({"functions": [{"name": "f"}], "function_call": "always"}, "function_call"),
    ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "function", "function": {"name": "no way"}}]}, "tools[0].function.name"),
    ({"tools": [TOOL, TOOL]}, "tools"),
    ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "mcp"}}, "tool_choice.type"),
    ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice"),
    (
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice",
    ),
    (
        {"tools": [TOOL], "tool_choice": allowed("often", TOOL)},
        "tool_choice.allowed_tools.mode",
    ),
    (
        {"tools": [TOOL], "tool_choice": allowed("auto", {"type": "function"})},
        "tool_choice.allowed_tools.tools[0]",
    ),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, SCHEMA + ".name"),
    ({"response_format": INVALID_SCHEMA}, SCHEMA + ".schema"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_regex": "("}, "guided_regex"),
    ({"guided_regex": "a{1000000}"}, "guided_regex"),
    ({"guided_json": CROWDED}, "guided_json"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_grammar": "start: nothing"}, "guided_grammar"),
    ({"guided_regex": "a", "guided_json": {}}, "guided_regex"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
    ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
    ({"structured_outputs": {"regex": "["}}, "structured_outputs.regex"),
    ({"structured_outputs": {"json": CROWDED}}, "structured_outputs.json"),
    ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice[0]"),
    (
        {"structured_outputs": {"json": {}, "json_object": True}},
        "structured_outputs.json_object",
    ),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
    (
        {"structured_outputs": {"disable_any_whitespace": True}},
        "structured_outputs.disable_any_whitespace",
    ),
    ({"prediction": {"type": "image", "content": "x"}}, "prediction.type"),
    ({"reasoning_effort": "huge"}, "reasoning_effort"),
    ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"chat_template": "x" * 70_000}, "chat_template"),
    ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
    ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs.self"),
    (
        {"continue_final_message": True, "add_generation_prompt": True},
        "continue_final_message",
    ),
    (
        {"continue_final_message": True, "messages": [{"role": "user", "content": " "}]},
        "continue_final_message",
    ),
    ({"function_call": {"name": "f"}}, "function_call"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"audio": {"voice": "x", "format": "wav"}}, "audio"),
    ({"web_search_options": {}}, "web_search_options"),
    ({"verbosity": "terse"}, "verbosity"),
    ({"moderation": {"model": "m"}}, "moderation"),
    ({"service_tier": "gold"}, "service_tier"),
    ({"service_tier": 1}, "service_tier"),
    ({"priority": 1.5}, "priority"),
    ({"priority": 2**63}, "priority"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"cache_salt": 1}, "cache_salt"),
    ({"ttft_deadline_ms": 0}, "ttft_deadline_ms"),
    ({"ttft_deadline_ms": "soon"}, "ttft_deadline_ms"),
    ({"deadline_ms": -1}, "deadline_ms"),
    ({"deadline_ms": 86_400_001}, "deadline_ms"),
    (
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        "stream_options.include_obfuscation",
    ),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 1.1}, "top_p"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"min_p": 2}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repeat_penalty": 11}, "repeat_penalty"),
    ({"repetition_penalty": 1.1, "repeat_penalty": 1.2}, "repeat_penalty"),
    ({"top_k": -2}, "top_k"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": 1.5}, "n"),
    ({"n": True}, "n"),
    ({"seed": 2**63}, "seed"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_completion_tokens": -1}, "max_completion_tokens"),
    ({"max_tokens": 4, "max_completion_tokens": 5}, "max_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop"),
    ({"stop": [1]}, "stop[0]"),
    ({"stop_token_ids": [257]}, "stop_token_ids[0]"),
    ({"stop_token_ids": list(range(200))}, "stop_token_ids"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"257": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": {"1": "x"}}, "logit_bias"),
    ({"logit_bias": {"٣": 1}}, "logit_bias"),
    ({"stream": "yes"}, "stream"),
    ({"metadata": {"a": 1}}, "metadata"),
    ({"input": "hi"}, "input"),
    ({"model": None}, "model"),
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [*USER, {"role": 1, "content": "x"}]}, "messages[1].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0].type"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages[0].content[0].text",
    ),
    (
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}
            ]
        },
        "messages[0].content[0].image_url",
    ),
    (
        {
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [
                        {"id": "1", "type": "custom", "function": {"name": "f", "arguments": ""}}
                    ],
                }
            ]
        },
        "messages[0].tool_calls[0].type",
    ),
]

REFUSED_IN_TEXT: list[tuple[dict[str, Any], str]] = [
    ({"logprobs": 6}, "logprobs"),
    ({"suffix": "x"}, "suffix"),
    ({"best_of": 21}, "best_of"),
    ({"best_of": 2, "n": 3}, "best_of"),
    ({"best_of": 2, "stream": True}, "best_of"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"guided_choice": [], "echo": True}, "guided_choice"),
    ({"messages": USER}, "messages"),
    ({"max_completion_tokens": 5}, "max_completion_tokens"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, SCHEMA),
    ({"response_format": INVALID_SCHEMA}, SCHEMA + ".schema"),
    ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": [[]]}, "prompt[0]"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": [1, [2]]}, "prompt"),
    ({"prompt": [257]}, "prompt[0]"),
    ({"prompt": [[1], [2, -1]]}, "prompt[1][1]"),
    ({"prompt": ["a"] * 3000}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": [1.5]}, "prompt[0]"),
]


@pytest.mark.parametrize("fields", ASKS_NOTHING, ids=lambda fields: ",".join(fields))
def test_values_without_effect_are_accepted(fields: dict[str, Any]) -> None:
    answer = answer_to(CHAT, chat(**fields))
    assert answer.status == 200, answer.json


@pytest.mark.parametrize(("fields", "param"), REFUSED)
def test_the_error_names_an_invalid_or_unsupported_field(
    fields: dict[str, Any], param: str
) -> None:
    answer = answer_to(CHAT, chat(**fields))
    error = answer.json["error"]
    assert answer.status == 400
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert param.rpartition(".")[2].partition("[")[0] in error["message"]


@pytest.mark.parametrize(("fields", "param"), REFUSED_IN_TEXT)
def test_the_error_names_an_invalid_field_of_text_completions(
    fields: dict[str, Any], param: str
) -> None:
    answer = answer_to(TEXT, text(**fields))
    assert (answer.status, answer.json["error"]["param"]) == (400, param)


@pytest.mark.parametrize("value", [-5, 0])
@pytest.mark.parametrize(
    ("path", "field"),
    [
        (CHAT, "max_tokens"),
        (CHAT, "max_completion_tokens"),
        (TEXT, "max_tokens"),
        ("/v1/responses", "max_output_tokens"),
        ("/v1/messages", "max_tokens"),
    ],
)
def test_the_error_of_an_output_without_tokens_says_the_least_that_is_allowed(
    path: str, field: str, value: int
) -> None:
    body = {CHAT: chat, TEXT: text}.get(path, chat)(**{field: value})
    if path == "/v1/responses":
        body = {"model": body["model"], "input": "x", field: value}
    answer = answer_to(path, body)
    assert answer.status == 400
    assert f"'{field}'" in answer.json["error"]["message"]
    assert "at least 1" in answer.json["error"]["message"]


def test_the_error_of_a_completion_with_echo_allows_no_tokens() -> None:
    message = answer_to(TEXT, text(echo=True, max_tokens=-1)).json["error"]["message"]
    assert "0 with 'echo'" in message


def test_the_error_of_an_invalid_role_lists_the_roles() -> None:
    body = chat(messages=[{"role": "robot", "content": "x"}])
    message = answer_to(CHAT, body).json["error"]["message"]
    assert "'developer'" in message
    assert "'function'" in message


def test_a_strict_servers_error_of_an_unknown_field_is_worded_as_openais() -> None:
    message = answer_to(CHAT, chat(foo=1), Setting(rejects_unknown_fields=True)).json["error"][
        "message"
    ]
    assert message == "Unrecognized request argument supplied: foo"


def test_messages_of_all_roles_reach_the_prompt() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "system", "content": "s"},
        {"role": "developer", "content": "d", "name": "n"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        },
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [call],
            "refusal": None,
            "audio": None,
        },
        {"role": "tool", "content": "t", "tool_call_id": "1"},
        {"role": "function", "content": "f", "name": "f"},
        {
            "role": "assistant",
            "content": [{"type": "refusal", "refusal": "no"}],
            "annotations": [],
        },
    ]
    answer = answer_to(CHAT, chat(messages=messages))
    assert answer.status == 200, answer.json
    prompt = bytes(answer.rig.ended[0].spec.prompt).decode()
    assert prompt == "system:s\ndeveloper:d\nuser:ab\nassistant:\ntool:t\ntool:f\nassistant:no\n"


def test_a_refused_value_is_repeated_unless_it_is_an_array_or_an_object() -> None:
    for field, given, shown in (
        ("modalities", ["audio"], "this value"),
        ("audio", 1, "the value 1"),
    ):
        message = answer_to(CHAT, chat(**{field: given})).json["error"]["message"]
        assert f"'{field}' is not supported with {shown}; allowed: null" in message
