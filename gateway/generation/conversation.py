"""A conversation to the prompt that the model's chat template writes, and to who reads its answer.

Short conversations are read at once, long ones in a thread off the loop (see
`gateway.generation.prompt`).
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import orjson

from engine.errors import InvalidRequest
from gateway.generation.prompt import Prompt, TokenizedPrompts, fits_on_loop, token_ids
from gateway.ports import ToolChoice

if TYPE_CHECKING:
    from gateway.ports import ChatTemplate, Dialect, StreamParser, Tokenizer

Seen = Mapping[str, Any]  # a message as templates see it
Bits = Callable[[int], int]


class ChatMessage(Protocol):
    """A message that was checked; `gateway.schema.openai.chat` has it."""

    def as_mapping(self) -> dict[str, Any]:
        """As chat templates see it: role, content as one text, and what else is there."""
        ...


class ChatCapableModel(Protocol):
    """How a model reads and writes."""

    @property
    def tokenizer(self) -> "Tokenizer": ...

    @property
    def template(self) -> "ChatTemplate | None": ...

    @property
    def dialect(self) -> "Dialect | None": ...


@dataclass(frozen=True, slots=True)
class ChatInput:
    """What a prompt is made of.

    `tools` are shown to the template, `wanted` says whose calls are looked for. `is_direct`: no
    reasoning comes before the answer.
    `variables` are more of what the template may read; `own_template` replaces it.
    """

    messages: Sequence[ChatMessage]
    tools: Sequence[Mapping[str, Any]] = ()
    wanted: ToolChoice = ToolChoice()  # noqa: RUF009 # frozen
    is_direct: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)
    own_template: str | None = None
    is_answer_due: bool = True  # the prompt ends where an answer begins
    is_continued: bool = False  # the prompt ends in the middle of the last message


class RenderedPrompt(NamedTuple):
    """A prompt as text and ids."""

    text: str
    ids: Prompt


async def chat_prompt(
    model: ChatCapableModel, conversation: ChatInput, bits: Bits
) -> TokenizedPrompts:
    """The one prompt of a conversation; `bits` makes random bits, for the ids of tool calls.

    Raises `InvalidRequest`: no template, the template's own complaint, or arguments of a tool
    call that are no JSON.
    """
    written = await write_prompt(model, conversation)
    dialect = model.dialect
    if dialect is None or dialect.parser(written.text, conversation.wanted, bits) is None:
        return TokenizedPrompts([written.ids])
    known = model.tokenizer.special_tokens
    return TokenizedPrompts(
        [written.ids],
        partial(_parser, dialect, written.text, conversation.wanted, bits),
        {known[mark]: mark.encode() for mark in dialect.special_tokens if mark in known},
    )


async def write_prompt(model: ChatCapableModel, conversation: ChatInput) -> RenderedPrompt:
    """The prompt alone. Raises as `chat_prompt` does."""
    if model.template is None:
        raise InvalidRequest(
            "This model has no chat template. Use /v1/completions with a prompt instead.",
            "messages",
        )
    write = partial(_write, model, model.template, conversation)
    messages = conversation.messages
    if fits_on_loop([], len(messages)) and conversation.own_template is None:
        seen = [message.as_mapping() for message in messages]
        texts = [orjson.dumps(tool) for tool in conversation.tools]
        if fits_on_loop([*texts, *(message["content"] for message in seen)], len(seen)):
            return write(seen)
    return await asyncio.to_thread(lambda: write(message.as_mapping() for message in messages))


def _write(
    model: ChatCapableModel,
    template: "ChatTemplate",
    conversation: ChatInput,
    messages: Iterable[Seen],
) -> RenderedPrompt:
    seen = _with_objects(messages)
    if conversation.own_template is not None:
        template = template.variant(conversation.own_template)
    tools = {"tools": list(conversation.tools)} if conversation.tools else {}
    text = template.render(
        seen,
        add_generation_prompt=conversation.is_answer_due,
        **{**conversation.variables, **tools},
    )
    if conversation.is_continued:
        text = _cut_after(text, seen[-1]["content"])
    if conversation.is_direct and model.dialect is not None:
        text += model.dialect.without_reasoning(text)
    return RenderedPrompt(
        text, token_ids(model.tokenizer, text, "messages", add_special_tokens=False)
    )


def _parser(dialect: "Dialect", prompt: str, wanted: ToolChoice, bits: Bits) -> "StreamParser":
    parser = dialect.parser(prompt, wanted, bits)
    assert parser is not None, "asked for where there is one"
    return parser


def _cut_after(text: str, content: str) -> str:
    """The prompt up to the end of its last message, whose content the template may have trimmed."""
    for shown in (content, content.rstrip(), content.strip()):
        if shown and (at := text.rfind(shown)) >= 0:
            return text[: at + len(shown)]
    raise InvalidRequest(
        "'continue_final_message' is not possible: the chat template does not show the last "
        "message as it is.",
        "continue_final_message",
    )


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
