import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from adapters.dialects.choosing import choose_dialect
from adapters.dialects.jinja_template import compile_request_template
from engine.errors import InvalidRequest
from gateway.generation.conversation import render_prompt, tokenize_chat
from gateway.generation.prompt import TokenizedPrompts
from gateway.groups.group import ServedModel
from gateway.ports import CallArguments, CallBegin, ChatTemplate, Dialect, Reasoning
from gateway.schema.fields.sampling import Vocabulary
from gateway.schema.openai.chat import ChatRequest, chat_of, decode_chat
from tests.gateway.generation.test_prompt import Letters

random_bits = random.Random(1).getrandbits
HERMES = choose_dialect("", "hermes", "think")
Json = dict[str, Any]
TOOL = {"type": "function", "function": {"name": "f"}}


class Lines:
    """`role:content` lines; keeps the messages that it saw."""

    def __init__(self) -> None:
        self.seen: Sequence[Mapping[str, Any]] = []
        self.variables: dict[str, Any] = {}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        self.seen, self.variables = messages, kwargs
        if messages[0]["content"] == "refuse":
            raise InvalidRequest("No.", "messages")
        return "".join(f"{m['role']}:{m['content']}\n" for m in messages) + ">" * (
            add_generation_prompt
        )

    async def render_source(
        self,
        source: str,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        template = compile_request_template(source, {"bos_token": "^"})
        return template.render(messages, add_generation_prompt=add_generation_prompt, **variables)


def served(
    letters: Letters, template: ChatTemplate | None, dialect: Dialect | None = None
) -> ServedModel:
    """A model whose requests may have a template."""
    return ServedModel(
        "m",
        0,
        "",
        Vocabulary(256, frozenset()),
        letters,
        template,
        dialect,
        trusts_request_templates=True,
    )


def message(content: str | None, role: str = "user", **more: Any) -> Json:
    return {"role": role, "content": content, **more}


HI = [message("hi")]


def request_of(messages: Sequence[Json], **fields: Any) -> ChatRequest:
    """A checked chat request."""
    return chat_of({"model": "m", "messages": messages, **fields})


async def tokenized(model: ServedModel, request: ChatRequest) -> TokenizedPrompts:
    return await tokenize_chat(model, request, request.tool_plan(), random_bits)


async def prompt_of(request: ChatRequest, letters: Letters | None = None) -> str:
    """The text of a prompt, decoded from its ids."""
    model = served(letters or Letters(), Lines())
    (prompt,) = (await tokenized(model, request)).prompts
    return "".join(map(chr, prompt))


async def test_a_conversation_is_one_prompt_without_added_special_tokens() -> None:
    letters = Letters()
    prompt = await prompt_of(request_of([message("Be brief.", "system"), *HI]), letters)
    assert prompt == "system:Be brief.\nuser:hi\n>"
    assert letters.stayed_on_the_loop


async def test_text_parts_are_joined_for_the_template() -> None:
    body = (
        b'{"model": "m", "messages": [{"role": "user", "content": ['
        b'{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]}'
    )
    assert await prompt_of(decode_chat(body)) == "user:ab\n>"


@pytest.mark.parametrize(
    "messages", [[message("x" * 5000)], [message("x" * 300)] * 20, [message("")] * 1000]
)
async def test_a_long_conversation_is_tokenized_off_the_loop(messages: list[Json]) -> None:
    letters = Letters()
    expected = "".join(f"user:{m['content']}\n" for m in messages) + ">"
    assert await prompt_of(request_of(messages), letters) == expected
    assert not letters.stayed_on_the_loop


@pytest.mark.parametrize("size", [1, 5000])
async def test_the_templates_error_is_raised_from_the_loop_and_from_a_thread(size: int) -> None:
    with pytest.raises(InvalidRequest, match=r"^No\.$"):
        await prompt_of(request_of([message("refuse"), message("x" * size)]))


async def test_a_model_without_template_points_to_completions() -> None:
    with pytest.raises(InvalidRequest, match=r"no chat template.*/v1/completions") as caught:
        await render_prompt(served(Letters(), None), request_of(HI))
    assert caught.value.param == "messages"


def call(arguments: str) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}


async def test_the_template_sees_tool_arguments_as_objects() -> None:
    lines = Lines()
    calls = [call('{"a": 1}'), call("")]
    request = request_of([*HI, message(None, "assistant", tool_calls=calls)])
    await render_prompt(served(Letters(), lines), request)
    seen = [c["function"]["arguments"] for c in lines.seen[1]["tool_calls"]]
    assert seen == [{"a": 1}, {}]
    assert calls == [call('{"a": 1}'), call("")]


@pytest.mark.parametrize("arguments", ['{"city": "Osl', "city=Oslo", '["Oslo"]', '"Oslo"', "{} {}"])
async def test_arguments_that_are_not_an_object_are_kept_as_text(arguments: str) -> None:
    lines = Lines()
    request = request_of([*HI, message(None, "assistant", tool_calls=[call(arguments)])])
    await render_prompt(served(Letters(), lines), request)
    (seen,) = lines.seen[1]["tool_calls"]
    assert seen["function"]["arguments"] == {"unparsed": arguments}


@pytest.mark.parametrize("size", [1, 5000])
async def test_an_unpaired_surrogate_is_an_invalid_request(size: int) -> None:
    with pytest.raises(InvalidRequest, match="surrogate") as caught:
        await prompt_of(request_of([message("a" * size + "\ud83d")]))
    assert caught.value.param == "messages"


async def rendered(request: ChatRequest, dialect: Dialect | None = None) -> str:
    return (await render_prompt(served(Letters(), Lines(), dialect), request)).text


async def test_tools_and_variables_reach_the_template() -> None:
    lines = Lines()
    request = request_of(HI, tools=[TOOL], chat_template_kwargs={"enable_thinking": False})
    await render_prompt(served(Letters(), lines), request)
    assert lines.variables == {"enable_thinking": False, "tools": [TOOL]}


async def test_without_tools_the_template_sees_none() -> None:
    lines = Lines()
    await render_prompt(served(Letters(), lines), request_of(HI))
    assert lines.variables == {}


async def test_a_callers_own_template_replaces_the_models() -> None:
    request = request_of(HI, chat_template="{{ bos_token }}{{ messages[0].content }}!")
    assert await rendered(request) == "^hi!"


@pytest.mark.parametrize("source", ["{{", "{% nothing %}", "{{ x | nofilter }}", "(" * 5000])
async def test_the_error_names_an_invalid_template(source: str) -> None:
    source = source if source[0] != "(" else "{{" + source
    with pytest.raises(InvalidRequest) as caught:
        await rendered(request_of(HI, chat_template=source))
    assert caught.value.param == "chat_template"


async def test_a_template_in_a_request_is_rejected_unless_it_is_trusted() -> None:
    model = replace(served(Letters(), Lines()), trusts_request_templates=False)
    with pytest.raises(InvalidRequest, match="--trust-request-chat-template") as caught:
        await render_prompt(model, request_of(HI, chat_template="x"))
    assert caught.value.param == "chat_template"


@pytest.mark.parametrize("content", ["Once upon", "Once upon ", " a\n"])
async def test_a_last_message_may_be_continued(content: str) -> None:
    messages = [message("Tell."), message(content, "assistant")]
    request = request_of(messages, continue_final_message=True)
    assert await rendered(request) == f"user:Tell.\nassistant:{content}"
    trimming = "{% for m in messages %}{{ m.role }}:{{ m.content | trim }};{% endfor %}"
    request = request_of(messages, continue_final_message=True, chat_template=trimming)
    assert await rendered(request) == f"user:Tell.;assistant:{content.strip()}"


async def test_a_last_message_that_the_template_changes_cannot_be_continued() -> None:
    messages = [*HI, message("yo", "assistant")]
    request = request_of(messages, continue_final_message=True, chat_template="x")
    with pytest.raises(InvalidRequest, match="continue_final_message"):
        await rendered(request)


async def test_reasoning_that_the_prompt_opens_is_closed_before_constrained_output() -> None:
    template = "{{ messages[0].content }}<think>{{ '\n' }}"
    request = request_of(HI, chat_template=template)
    assert await rendered(request, HERMES) == "hi<think>\n"
    json_only = {"type": "json_object"}
    constrained = request_of(HI, chat_template=template, response_format=json_only)
    assert await rendered(constrained, HERMES) == "hi<think>\n\n</think>\n\n"


async def test_the_dialect_parses_the_output() -> None:
    model = served(Letters(), Lines(), HERMES)
    request = request_of(HI, tools=[TOOL])
    new_parser = (await tokenized(model, request)).new_parser
    assert new_parser is not None
    begin, arguments = new_parser().feed('<tool_call>{"name": "f", "arguments": {}}')
    assert isinstance(begin, CallBegin)
    assert (begin.name, arguments) == ("f", CallArguments(0, "{}"))
    new_parser = (await tokenized(model, request_of(HI))).new_parser
    assert new_parser is not None
    assert new_parser().feed("<think>a") == [Reasoning("a")]
    assert (await tokenized(served(Letters(), Lines()), request)).new_parser is None


async def test_marks_that_are_control_tokens_are_visible_to_the_parser() -> None:
    letters = Letters()
    letters.special_tokens = {"<s>": 0, "[TOOL_CALLS]": 5}
    model = served(letters, Lines(), choose_dialect("", "mistral", "none"))
    request = request_of(HI, tools=[TOOL])
    assert (await tokenized(model, request)).visible_tokens == {5: b"[TOOL_CALLS]"}
    assert not (await tokenized(model, request_of(HI))).visible_tokens
