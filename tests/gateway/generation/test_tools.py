import json
from typing import Any

import pytest

from adapters.dialects.choosing import choose_dialect
from engine.step import GrammarKind
from tests.gateway.answers import answer_to
from tests.gateway.rig import CHAT, USER, Rig, Setting, chat, played
from tests.gateway.serve.assembling import assembled

F = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
G = {"type": "function", "function": {"name": "g", "description": "Goes."}}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [F]}}
NAMED_FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "s", "schema": {"type": "object"}},
}
HERMES = choose_dialect("", "hermes", "think")


def hermes(*texts: str) -> Setting:
    return Setting(texts=texts or ("Hello!",), dialect=HERMES)


async def reply_to(rig: Rig, **fields: Any) -> Any:
    """The whole reply, after the stream of the same request was found to say the same."""
    exchange = await rig.client.post(CHAT, chat(**fields))
    reply = exchange.json
    assert exchange.status == 200, reply
    *chunks, _ = (await rig.client.post(CHAT, chat(stream=True, **fields))).events
    for choice in reply["choices"]:
        streamed = assembled(chunks, choice["index"])
        message = {**choice["message"]}
        del message["annotations"]
        for calls in (message.get("tool_calls"), streamed["message"].get("tool_calls")):
            for call in calls or ():
                assert call.pop("id").startswith("call_")
        assert streamed["message"] == message
        assert streamed["finish_reason"] == choice["finish_reason"]
    return reply


def told_grammar(rig: Rig) -> Any:
    grammar = rig.ended[0].spec.grammar
    assert grammar is not None
    return grammar.kind, json.loads(grammar.text) if grammar.text else None


@played(hermes("Let me see.\n" + CALL))
async def test_a_tool_call_is_returned_and_the_template_sees_the_tools(rig: Rig) -> None:
    reply = await reply_to(rig, tools=[F, G])
    (choice,) = reply["choices"]
    assert choice["message"]["content"] == "Let me see."
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": '{"a": 1}'}
    assert choice["finish_reason"] == "tool_calls"
    assert rig.ended[0].spec.grammar is None
    assert bytes(rig.ended[0].spec.prompt).startswith(b"tools:f,g\n")


@played(hermes(CALL))
async def test_without_callable_tools_call_syntax_is_content(rig: Rig) -> None:
    for fields in ({}, {"tools": [F], "tool_choice": "none"}):
        (choice,) = (await reply_to(rig, **fields))["choices"]
        assert choice["message"]["content"] == CALL
        assert choice["finish_reason"] == "stop"
    shown = [bytes(ended.spec.prompt).startswith(b"tools:f\n") for ended in rig.ended]
    assert shown == [False, False, True, True]  # the prefix is that of other choices


@played(hermes(CALL))
async def test_a_call_of_a_tool_that_may_not_be_called_is_content(rig: Rig) -> None:
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [G]}}
    for fields in ({"tools": [G]}, {"tools": [F, G], "tool_choice": allowed}):
        (choice,) = (await reply_to(rig, **fields))["choices"]
        assert choice["message"]["content"] == CALL
        assert "tool_calls" not in choice["message"]
    assert bytes(rig.ended[-1].spec.prompt).startswith(b"tools:f,g\n"), "whichever are allowed"


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"tools": [F, G], "tool_choice": "required"}, ["f", "g"]),
        ({"tools": [F, G], "tool_choice": {"type": "function", "function": {"name": "f"}}}, ["f"]),
        ({"tools": [F, G], "tool_choice": ALLOWED}, ["f"]),
        ({"functions": [F["function"]], "function_call": {"name": "f"}}, ["f"]),
    ],
)
def test_a_required_call_is_constrained_to_the_tools(
    fields: dict[str, Any], names: list[str]
) -> None:
    answer = answer_to(CHAT, chat(**fields), hermes(CALL))
    message = answer.json["choices"][0]["message"]
    assert message["content"] is None
    kind, tags = told_grammar(answer.rig)
    assert kind is GrammarKind.TAGS
    assert [begin["begin"].split('"')[3] for begin in tags["structures"]] == names
    assert (tags["at_least"], tags["has_text"]) == (1, False)
    is_one = "functions" in fields or fields["tool_choice"] not in ("required", ALLOWED)
    assert tags["at_most"] == (1 if is_one else None)


@played(hermes())
async def test_a_strict_tools_arguments_are_constrained(rig: Rig) -> None:
    strict = {"type": "function", "function": {**F["function"], "strict": True}}  # type: ignore[dict-item]
    await reply_to(rig, tools=[strict, G])
    kind, tags = told_grammar(rig)
    assert (kind, tags["at_least"], tags["has_text"]) == (GrammarKind.TAGS, 0, True)
    assert bytes(rig.ended[0].spec.prompt).startswith(b"tools:f,g\n")


@played(hermes(CALL + CALL + " and more"))
async def test_without_parallel_calls_the_output_ends_after_the_first(rig: Rig) -> None:
    (choice,) = (await reply_to(rig, tools=[F], parallel_tool_calls=False))["choices"]
    assert len(choice["message"]["tool_calls"]) == 1
    assert choice["finish_reason"] == "tool_calls"
    (choice,) = (await reply_to(rig, tools=[F]))["choices"]
    assert len(choice["message"]["tool_calls"]) == 2
    assert rig.ended[0].produced < rig.ended[-1].produced


@played(hermes(CALL + CALL))
async def test_legacy_functions_get_a_function_call(rig: Rig) -> None:
    (choice,) = (await reply_to(rig, functions=[F["function"]]))["choices"]
    assert choice["message"]["function_call"] == {"name": "f", "arguments": '{"a": 1}'}
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "function_call"


@played()
async def test_a_legacy_call_and_its_result_are_rendered_as_tool_messages(rig: Rig) -> None:
    messages = [
        *USER,
        {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "function", "name": "f", "content": "9"},
    ]
    exchange = await rig.client.post(CHAT, chat(messages=messages))
    assert exchange.status == 200 or exchange.json
    assert bytes(rig.ended[0].spec.prompt) == b"user:hi\nassistant:\ntool:9\n"


@played(hermes("<think>Hm.</think>\n\nYes."))
async def test_reasoning_is_separate_and_counted(rig: Rig) -> None:
    reply = await reply_to(rig)
    (choice,) = reply["choices"]
    assert choice["message"]["content"] == "Yes."
    assert choice["message"]["reasoning_content"] == "Hm."
    assert choice["message"]["reasoning"] == "Hm."
    usage = reply["usage"]
    # From the token that completes the opening mark to the one that completes the other.
    assert usage["completion_tokens_details"]["reasoning_tokens"] == len(">Hm.</think>")
    assert usage["completion_tokens"] == len("<think>Hm.</think>\n\nYes.") + 1


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"response_format": {"type": "json_object"}}, GrammarKind.JSON_OBJECT, ""),
        ({"response_format": NAMED_FORMAT}, GrammarKind.JSON_SCHEMA, '{"type":"object"}'),
        ({"guided_json": '{"type": "object"}'}, GrammarKind.JSON_SCHEMA, '{"type": "object"}'),
        ({"guided_regex": "[0-9]+"}, GrammarKind.REGEX, "[0-9]+"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, GrammarKind.CHOICE, '["a","b"]'),
        ({"guided_grammar": 'start: "a"'}, GrammarKind.LARK, 'start: "a"'),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, GrammarKind.EBNF, 'root ::= "a"'),
        ({"structured_outputs": {"json_object": True}}, GrammarKind.JSON_OBJECT, ""),
    ],
)
@played()
async def test_every_grammar_field_reaches_the_engine(
    rig: Rig, fields: dict[str, Any], kind: GrammarKind, text: str
) -> None:
    await reply_to(rig, **fields)
    assert rig.ended[0].spec.grammar == (kind, text)


@played()
async def test_with_ignore_eos_a_grammar_ends_only_when_it_allows_nothing_else(rig: Rig) -> None:
    body = chat(guided_regex="Hi", ignore_eos=True)
    await rig.client.post(CHAT, body)
    ask = rig.ended[0].spec
    assert ask.end_ids == ask.avoided_ids == {256}


@played(hermes("{}"))
async def test_with_optional_tools_a_json_format_is_the_alternative(rig: Rig) -> None:
    await reply_to(rig, tools=[F], response_format={"type": "json_object"})
    kind, tags = told_grammar(rig)
    assert (kind, tags["answer"]) == (GrammarKind.TAGS, {"type": "object"})


def test_other_grammars_cannot_be_combined_with_tools() -> None:
    answer = answer_to(CHAT, chat(tools=[F], guided_regex="a"), hermes())
    error = answer.json["error"]
    assert (answer.status, error["param"]) == (400, "guided_regex")


CROWDED: dict[str, Any] = {"properties": {f"p{number}": {} for number in range(1000)}}
STRICT = {"name": "g", "strict": True}
CROWDED_G = {"type": "function", "function": {**STRICT, "parameters": CROWDED}}


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        (CHAT, {"tools": [F, CROWDED_G]}, "tools[1].function.parameters"),
        (
            CHAT,
            {"functions": [{**STRICT, "parameters": CROWDED}], "function_call": {"name": "g"}},
            "functions[0].parameters",
        ),
        (
            CHAT,
            {
                "tools": [F],
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "s", "schema": CROWDED},
                },
            },
            "response_format.json_schema.schema",
        ),
        (
            "/v1/responses",
            {"input": "hi", "tools": [{"type": "function", **STRICT, "parameters": CROWDED}]},
            "tools[0].parameters",
        ),
        (
            "/v1/messages",
            {"max_tokens": 9, "tools": [{**STRICT, "input_schema": CROWDED}]},
            "tools[0].input_schema",
        ),
    ],
)
def test_a_schema_that_is_too_large_beside_tools_is_named(
    path: str, fields: dict[str, Any], named: str
) -> None:
    body = chat(**fields)
    if "input" in body:
        del body["messages"]
    answer = answer_to(path, body, hermes())
    assert answer.status == 400
    said = answer.json["error"]["message"]
    assert said.startswith(f"Invalid '{named}': it has an object with 1000 properties"), said


def test_tools_are_rejected_without_a_tool_dialect_and_the_error_names_the_flag() -> None:
    answer = answer_to(CHAT, chat(tools=[F]))
    error = answer.json["error"]
    assert (answer.status, error["param"]) == (400, "tools")
    assert "--tool-dialect" in error["message"]


@played(hermes("No.", CALL))
async def test_several_choices_have_separate_calls(rig: Rig) -> None:
    first, second = (await reply_to(rig, tools=[F], n=2))["choices"]
    assert first["message"]["content"] == "No."
    assert second["message"]["tool_calls"][0]["function"]["name"] == "f"
    assert (first["finish_reason"], second["finish_reason"]) == ("stop", "tool_calls")
