"""Messages and prompts become ids; short ones on the loop, long ones off it."""

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from engine.errors import InvalidRequest
from gateway.prompt import chat_prompt, text_prompts
from gateway.schema.chat import decode_chat


class Letters:
    """Ids are code points; BOS is 0. Remembers which threads encoded."""

    vocab_size = 0x110000
    special_ids = frozenset({0})

    def __init__(self) -> None:
        self.threads: set[threading.Thread] = set()

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        self.threads.add(threading.current_thread())
        text.encode()
        return [0] * add_special_tokens + [*map(ord, text)]

    def decoder(self) -> Any:
        raise NotImplementedError

    @property
    def stayed_on_the_loop(self) -> bool:
        return self.threads == {threading.current_thread()}


class Lines:
    """`role:content` lines; keeps the messages that it saw."""

    def __init__(self) -> None:
        self.seen: Sequence[Mapping[str, Any]] = []

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        self.seen = messages
        if messages[0]["content"] == "refuse":
            raise InvalidRequest("No.", "messages")
        return "".join(f"{m['role']}:{m['content']}\n" for m in messages) + ">" * (
            add_generation_prompt
        )


class Said:
    """A message as the schema hands it on."""

    def __init__(self, content: str | None, role: str = "user", **more: Any) -> None:
        self._mapping = {"role": role, "content": content, **more}

    def as_mapping(self) -> dict[str, Any]:
        return dict(self._mapping)


def text_of(prompts: Sequence[tuple[int, ...]]) -> str:
    (prompt,) = prompts
    return "".join(map(chr, prompt))


async def test_a_conversation_is_one_prompt_without_added_special_tokens() -> None:
    letters = Letters()
    prompts = (
        await chat_prompt(letters, Lines(), [Said("Be brief.", "system"), Said("hi")])
    ).prompts
    assert text_of(prompts) == "system:Be brief.\nuser:hi\n>"
    assert letters.stayed_on_the_loop


async def test_messages_of_the_wire_reach_the_template() -> None:
    body = (
        b'{"model": "m", "messages": [{"role": "user", "content": ['
        b'{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]}'
    )
    prompts = (await chat_prompt(Letters(), Lines(), decode_chat(body).messages)).prompts
    assert text_of(prompts) == "user:ab\n>"


@pytest.mark.parametrize(
    "messages", [[Said("x" * 5000)], [Said("x" * 300)] * 20, [Said("")] * 1000]
)
async def test_a_long_conversation_is_read_off_the_loop(messages: list[Said]) -> None:
    letters = Letters()
    expected = "".join(f"user:{m.as_mapping()['content']}\n" for m in messages) + ">"
    assert text_of((await chat_prompt(letters, Lines(), messages)).prompts) == expected
    assert not letters.stayed_on_the_loop


@pytest.mark.parametrize("size", [1, 5000])
async def test_a_templates_complaint_comes_out_from_either_place(size: int) -> None:
    with pytest.raises(InvalidRequest, match=r"^No\.$"):
        await chat_prompt(Letters(), Lines(), [Said("refuse"), Said("x" * size)])


async def test_a_model_without_template_points_to_completions() -> None:
    with pytest.raises(InvalidRequest, match=r"no chat template.*/v1/completions") as caught:
        await chat_prompt(Letters(), None, [Said("hi")])
    assert caught.value.param == "messages"


def call(arguments: str) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}


async def test_arguments_of_calls_are_objects_to_the_template() -> None:
    lines = Lines()
    calls = [call('{"a": 1}'), call("")]
    message = Said(None, "assistant", tool_calls=calls)
    await chat_prompt(Letters(), lines, [Said("hi"), message])
    seen = [c["function"]["arguments"] for c in lines.seen[1]["tool_calls"]]
    assert seen == [{"a": 1}, {}]
    assert calls == [call('{"a": 1}'), call("")]


async def test_arguments_that_are_no_json_are_named() -> None:
    message = Said(None, "assistant", tool_calls=[call("{}"), call("{a: 1}")])
    with pytest.raises(InvalidRequest, match="not valid JSON") as caught:
        await chat_prompt(Letters(), Lines(), [Said("hi"), message])
    assert caught.value.param == "messages[1].tool_calls[1].function.arguments"


async def test_prompts_of_text_get_what_the_model_wants_around_them() -> None:
    letters = Letters()
    assert (await text_prompts(letters, ["ab", "", "é"])).prompts == [(0, 97, 98), (0,), (0, 0xE9)]
    assert letters.stayed_on_the_loop


async def test_prompts_of_ids_stay_as_they_are() -> None:
    letters = Letters()
    assert (await text_prompts(letters, [[5, 6], (7,)])).prompts == [(5, 6), (7,)]
    assert (await text_prompts(letters, [tuple(range(100_000))])).prompts == [tuple(range(100_000))]
    assert not letters.threads


@pytest.mark.parametrize("prompts", [["x" * 5000], ["x"] * 100])
async def test_much_text_is_read_off_the_loop(prompts: list[str]) -> None:
    letters = Letters()
    expected = [(0, *map(ord, prompt)) for prompt in prompts]
    assert (await text_prompts(letters, prompts)).prompts == expected
    assert not letters.stayed_on_the_loop


@pytest.mark.parametrize("size", [1, 5000])
async def test_half_a_surrogate_pair_is_an_invalid_request(size: int) -> None:
    with pytest.raises(InvalidRequest, match="surrogate") as text:
        await text_prompts(Letters(), ["a" * size + "\ud83d"])
    assert text.value.param == "prompt"
    with pytest.raises(InvalidRequest, match="surrogate") as chat:
        await chat_prompt(Letters(), Lines(), [Said("a" * size + "\ud83d")])
    assert chat.value.param == "messages"
