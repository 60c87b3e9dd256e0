"""Messages or prompts to token ids. Short ones at once, long ones in a thread off the loop.

The threads are those of the loop's default executor: whoever runs the loop owns and bounds them.
Tokenizers release the interpreter's lock on long texts, so the loop goes on meanwhile.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import orjson

from engine.errors import InvalidRequest

if TYPE_CHECKING:
    from gateway.ports import ChatTemplate, StreamParser, Tokenizer

Prompt = tuple[int, ...]
Seen = Mapping[str, Any]  # a message as templates see it

# What is read at once: under 3 ms with the slowest tokenizer. A prompt or a message costs as
# much as so many characters, however short it is.
_MAX_CHARS_ON_LOOP = 4_096
_CHARS_PER_PART = 128


class Reading(NamedTuple):
    """Prompts as token ids, and who reads the answers; without a parser all is content."""

    prompts: Sequence[Prompt]
    parser: "Callable[[], StreamParser] | None" = None  # a fresh one for each answer


class ChatMessage(Protocol):
    """A message that was checked; `gateway.schema.chat` has it."""

    def as_mapping(self) -> dict[str, Any]:
        """As chat templates see it: role, content as one text, and what else is there."""
        ...


async def chat_prompt(
    tokenizer: "Tokenizer", template: "ChatTemplate | None", messages: Sequence[ChatMessage]
) -> Reading:
    """The one prompt of a conversation, as the model's template writes it.

    Raises `InvalidRequest`: no template, the template's own complaint, or arguments of a tool
    call that are no JSON.
    """
    if template is None:
        raise InvalidRequest(
            "This model has no chat template. Use /v1/completions with a prompt instead.",
            "messages",
        )

    def read(seen: Iterable[Seen]) -> Reading:
        text = template.render(_with_objects(seen), add_generation_prompt=True)
        return Reading([_ids(tokenizer, text, "messages", add_special_tokens=False)])

    if _fits([], len(messages)):
        seen = [message.as_mapping() for message in messages]
        if _fits((message["content"] for message in seen), len(seen)):
            return read(seen)
    return await asyncio.to_thread(lambda: read(message.as_mapping() for message in messages))


async def text_prompts(tokenizer: "Tokenizer", prompts: Sequence[str | Sequence[int]]) -> Reading:
    """The ids of each prompt, in order; a prompt that is ids already stays as it is.

    Raises `InvalidRequest` for text that is not Unicode.
    """

    def read() -> list[Prompt]:
        return [
            _ids(tokenizer, prompt, "prompt", add_special_tokens=True)
            if isinstance(prompt, str)
            else tuple(prompt)
            for prompt in prompts
        ]

    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    return Reading(read() if _fits(texts, len(texts)) else await asyncio.to_thread(read))


def _fits(texts: Iterable[str | None], num_parts: int) -> bool:
    """Whether so much may be read on the loop."""
    num_chars = sum(len(text) for text in texts if text)
    return num_chars + _CHARS_PER_PART * num_parts <= _MAX_CHARS_ON_LOOP


def _ids(tokenizer: "Tokenizer", text: str, param: str, *, add_special_tokens: bool) -> Prompt:
    try:
        return tuple(tokenizer.encode(text, add_special_tokens=add_special_tokens))
    except UnicodeEncodeError as error:
        message = f"'{param}' is not valid Unicode: it has half of a surrogate pair."
        raise InvalidRequest(message, param) from error


def _with_objects(messages: Iterable[Seen]) -> list[Seen]:
    """Arguments of calls become objects: the wire has JSON in a string, templates write JSON."""
    return [
        {**message, "tool_calls": _calls(message["tool_calls"], f"messages[{i}].tool_calls")}
        if message.get("tool_calls")
        else message
        for i, message in enumerate(messages)
    ]


def _calls(calls: Sequence[Seen], path: str) -> list[Seen]:
    return [
        {**call, "function": _function(call["function"], f"{path}[{i}].function.arguments")}
        for i, call in enumerate(calls)
    ]


def _function(function: Seen, param: str) -> Seen:
    try:
        return {**function, "arguments": orjson.loads(function["arguments"] or "{}")}
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"Invalid '{param}': not valid JSON ({error}).", param) from error
