"""Conversations become prompts; the dialect says how answers begin and who reads them."""

import random
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pytest

from adapters.dialects.choosing import choose_dialect
from adapters.dialects.jinja_template import JinjaTemplate
from engine.errors import InvalidRequest
from gateway.generation.conversation import ChatInput, ChatMessage, chat_prompt, write_prompt
from gateway.ports import CallArguments, CallBegin, ChatTemplate, Dialect, Reasoning, ToolChoice
from gateway.schema.openai.chat import decode_chat
from tests.gateway.generation.test_prompt import Letters

bits = random.Random(1).getrandbits
HERMES = choose_dialect("", "hermes", "think")
TOOL = {"type": "function", "function": {"name": "f"}}


class Lines:
    """`role:content` lines; keeps the messages that it saw."""

    def __init__(self) -> None:
        self.seen: Sequence[Mapping[str, Any]] = []
        self.variables: dict[str, Any] = {}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
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

    def variant(self, source: str) -> ChatTemplate:
        return JinjaTemplate({"default": ""}, {"bos_token": "^"}).variant(source)


class Model(NamedTuple):
    """Enough of a served model."""

    tokenizer: Letters
    template: ChatTemplate | None
    dialect: Dialect | None = None


class Said:
    """A message as the schema hands it on."""

    def __init__(self, content: str | None, role: str = "user", **more: Any) -> None:
        self._mapping = {"role": role, "content": content, **more}

    def as_mapping(self) -> dict[str, Any]:
        return dict(self._mapping)


async def prompt_of(messages: Sequence[ChatMessage], letters: Letters | None = None) -> str:
    """The text of a prompt, read back from its ids."""
    model = Model(letters or Letters(), Lines())
    (prompt,) = (await chat_prompt(model, ChatInput(messages), bits)).prompts
    return "".join(map(chr, prompt))


async def test_a_conversation_is_one_prompt_without_added_special_tokens() -> None:
    letters = Letters()
    prompt = await prompt_of([Said("Be brief.", "system"), Said("hi")], letters)
    assert prompt == "system:Be brief.\nuser:hi\n>"
    assert letters.stayed_on_the_loop


async def test_messages_of_the_wire_reach_the_template() -> None:
    body = (
        b'{"model": "m", "messages": [{"role": "user", "content": ['
        b'{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]}'
    )
    assert await prompt_of(decode_chat(body).messages) == "user:ab\n>"


@pytest.mark.parametrize(
    "messages", [[Said("x" * 5000)], [Said("x" * 300)] * 20, [Said("")] * 1000]
)
async def test_a_long_conversation_is_read_off_the_loop(messages: list[Said]) -> None:
    letters = Letters()
    expected = "".join(f"user:{m.as_mapping()['content']}\n" for m in messages) + ">"
    assert await prompt_of(messages, letters) == expected
    assert not letters.stayed_on_the_loop


@pytest.mark.parametrize("size", [1, 5000])
async def test_a_templates_complaint_comes_out_from_either_place(size: int) -> None:
    with pytest.raises(InvalidRequest, match=r"^No\.$"):
        await prompt_of([Said("refuse"), Said("x" * size)])


async def test_a_model_without_template_points_to_completions() -> None:
    with pytest.raises(InvalidRequest, match=r"no chat template.*/v1/completions") as caught:
        await write_prompt(Model(Letters(), None), ChatInput([Said("hi")]))
    assert caught.value.param == "messages"


def call(arguments: str) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}


async def test_arguments_of_calls_are_objects_to_the_template() -> None:
    lines = Lines()
    calls = [call('{"a": 1}'), call("")]
    message = Said(None, "assistant", tool_calls=calls)
    await write_prompt(Model(Letters(), lines), ChatInput([Said("hi"), message]))
    seen = [c["function"]["arguments"] for c in lines.seen[1]["tool_calls"]]
    assert seen == [{"a": 1}, {}]
    assert calls == [call('{"a": 1}'), call("")]


async def test_arguments_that_are_no_json_are_named() -> None:
    message = Said(None, "assistant", tool_calls=[call("{}"), call("{a: 1}")])
    with pytest.raises(InvalidRequest, match="not valid JSON") as caught:
        await prompt_of([Said("hi"), message])
    assert caught.value.param == "messages[1].tool_calls[1].function.arguments"


@pytest.mark.parametrize("size", [1, 5000])
async def test_half_a_surrogate_pair_is_an_invalid_request(size: int) -> None:
    with pytest.raises(InvalidRequest, match="surrogate") as caught:
        await prompt_of([Said("a" * size + "\ud83d")])
    assert caught.value.param == "messages"


async def written(conversation: ChatInput, dialect: Dialect | None = None) -> str:
    return (await write_prompt(Model(Letters(), Lines(), dialect), conversation)).text


async def test_tools_and_variables_reach_the_template() -> None:
    lines = Lines()
    talk = ChatInput([Said("hi")], tools=[TOOL], variables={"enable_thinking": False})
    await write_prompt(Model(Letters(), lines), talk)
    assert lines.variables == {"enable_thinking": False, "tools": [TOOL]}


async def test_without_tools_the_template_sees_none() -> None:
    lines = Lines()
    await write_prompt(Model(Letters(), lines), ChatInput([Said("hi")]))
    assert lines.variables == {}


async def test_a_callers_own_template_replaces_the_models() -> None:
    talk = ChatInput([Said("hi")], own_template="{{ bos_token }}{{ messages[0].content }}!")
    assert await written(talk) == "^hi!"


@pytest.mark.parametrize("source", ["{{", "{% nothing %}", "{{ x | nofilter }}", "(" * 5000])
async def test_a_template_that_is_none_is_named(source: str) -> None:
    source = source if source[0] != "(" else "{{" + source
    with pytest.raises(InvalidRequest) as caught:
        await written(ChatInput([Said("hi")], own_template=source))
    assert caught.value.param == "chat_template"


@pytest.mark.parametrize("content", ["Once upon", "Once upon ", " a\n"])
async def test_a_last_message_may_be_continued(content: str) -> None:
    said = [Said("Tell."), Said(content, "assistant")]
    talk = ChatInput(said, is_answer_due=False, is_continued=True)
    assert await written(talk) == f"user:Tell.\nassistant:{content}"
    trimming = "{% for m in messages %}{{ m.role }}:{{ m.content | trim }};{% endfor %}"
    talk = ChatInput(said, is_answer_due=False, is_continued=True, own_template=trimming)
    assert await written(talk) == f"user:Tell.;assistant:{content.strip()}"


async def test_a_last_message_that_is_not_shown_cannot_be_continued() -> None:
    said = [Said("hi"), Said("yo", "assistant")]
    talk = ChatInput(said, is_answer_due=False, is_continued=True, own_template="x")
    with pytest.raises(InvalidRequest, match="continue_final_message"):
        await written(talk)


async def test_reasoning_that_the_prompt_opens_is_closed_where_it_is_not_wanted() -> None:
    template = "{{ messages[0].content }}<think>{{ '\n' }}"
    talk = ChatInput([Said("hi")], own_template=template)
    assert await written(talk, HERMES) == "hi<think>\n"
    direct = ChatInput([Said("hi")], own_template=template, is_direct=True)
    assert await written(direct, HERMES) == "hi<think>\n\n</think>\n\n"


async def test_the_answer_is_read_by_the_dialect() -> None:
    model = Model(Letters(), Lines(), HERMES)
    talk = ChatInput([Said("hi")], wanted=ToolChoice(("f",)))
    reading = await chat_prompt(model, talk, bits)
    assert reading.parser is not None
    begin, arguments = reading.parser().feed('<tool_call>{"name": "f", "arguments": {}}')
    assert isinstance(begin, CallBegin)
    assert (begin.name, arguments) == ("f", CallArguments(0, "{}"))
    thinking = (await chat_prompt(model, ChatInput([Said("hi")]), bits)).parser
    assert thinking is not None
    assert thinking().feed("<think>a") == [Reasoning("a")]
    assert (await chat_prompt(Model(Letters(), Lines()), talk, bits)).parser is None


async def test_marks_that_are_control_tokens_are_shown_to_the_parser() -> None:
    letters = Letters()
    letters.special_tokens = {"<s>": 0, "[TOOL_CALLS]": 5}
    model = Model(letters, Lines(), choose_dialect("", "mistral", "none"))
    talk = ChatInput([Said("hi")], wanted=ToolChoice(("f",)))
    assert (await chat_prompt(model, talk, bits)).shown == {5: b"[TOOL_CALLS]"}
    assert not (await chat_prompt(model, ChatInput([Said("hi")]), bits)).shown
