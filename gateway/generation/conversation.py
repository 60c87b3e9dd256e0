"""Chat messages to the prompt that the model's chat template renders, and to its output parser.

Short conversations are rendered and tokenized on the event loop, long ones in a thread (see
`gateway.generation.prompt`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import orjson

from engine.errors import InvalidRequest
from engine.media import Media
from gateway.generation.continuation import Continuation, OtherBeginningError
from gateway.generation.image_prompt import ImageOrigin, Placeholders, read_images, unmarked
from gateway.generation.known_text import KnownText, continued_ids
from gateway.generation.prompt import (
    Prompt,
    PromptMarks,
    TokenizedPrompts,
    fits_on_loop,
    marks_of,
    token_ids,
)
from gateway.generation.threads import run_in_thread
from gateway.groups.group import ServedModel
from gateway.ports import ChatTemplate, Dialect, PreparedImage, StreamParser, ToolChoice
from gateway.schema.openai.chat import ChatRequest, parsed_arguments
from gateway.schema.openai.tools import ToolPlan

TemplateMessage = Mapping[str, Any]  # a message as chat templates see it
RandomBits = Callable[[int], int]


class RenderedPrompt(NamedTuple):
    """A prompt as text and ids, of which `media` stand for images, and the first `num_kept` are
    those of the text before it."""

    text: str
    ids: Prompt
    marks: PromptMarks
    media: tuple[Media, ...] = ()
    num_kept: int = 0

    @property
    def tokenized(self) -> TokenizedPrompts:
        """The prompt for the engine. If some ids stand for images, its text is not theirs."""
        text = "" if self.media else self.text
        return TokenizedPrompts(
            [self.ids], text=text, marks=self.marks, media=self.media, num_kept=self.num_kept
        )


async def tokenize_chat(
    model: ServedModel,
    request: ChatRequest,
    tools: ToolPlan,
    random_bits: RandomBits,
    *,
    skips_reasoning: bool = False,
    most: int | None = None,
    known: KnownText | None = None,
    continuation: Continuation | None = None,
    origin: ImageOrigin | None = None,
) -> TokenizedPrompts:
    """The one prompt of a chat request, and the parser of its outputs.

    `tools` is the request's tool plan; `random_bits(n)` makes the ids of tool calls. With
    `skips_reasoning` the prompt closes the reasoning, since a grammar holds from its end on. The
    ids of `known` stay where the prompt begins with its text. With a `continuation` the request has
    the messages of its window, and the prompt is that of the whole conversation.
    Raises `InvalidRequest` if the model has no template, the template rejects the messages, or
    the text is not valid Unicode, `PromptTooLong` as `token_ids` does for more than `most` ids, and
    `OtherBeginningError` as `Continuation.prompt` does.
    """
    images = await read_images(model, request, origin, most) if request.images else ()
    rendered = await _rendered(
        model,
        request,
        tools,
        skips_reasoning=skips_reasoning,
        most=most,
        known=known,
        continuation=continuation,
        images=images,
    )
    dialect, choice = model.dialect, ToolChoice()
    if tools.offered:
        choice = ToolChoice(tools.parameters, tools.max_calls)
    if dialect is None or dialect.parser(rendered.text, choice, random_bits) is None:
        return rendered.tokenized
    special_tokens = model.tokenizer.special_tokens
    marks = [mark for mark in dialect.special_tokens if mark in special_tokens]
    return rendered.tokenized._replace(
        new_parser=partial(_parser, dialect, rendered.text, choice, random_bits),
        visible_tokens={special_tokens[mark]: mark.encode() for mark in marks},
    )


def render_text(model: ServedModel, request: ChatRequest) -> str:
    """The prompt of a chat request without tools, as text behind which an answer follows without
    reasoning. Raises `InvalidRequest` as `tokenize_chat` does."""
    template = model.template
    if template is None:
        raise InvalidRequest(
            "This model has no chat template. Send 'input' as one text instead.", "input"
        )
    text = template.render(
        _template_messages(request), add_generation_prompt=True, **request.template_variables
    )
    if model.dialect is None:
        return text
    return text + model.dialect.without_reasoning(text, has_tools=False)


async def render_prompt(
    model: ServedModel, request: ChatRequest, origin: ImageOrigin | None = None
) -> RenderedPrompt:
    """The prompt of a chat request for which nothing is generated. Raises as `tokenize_chat`."""
    tools = request.tool_plan()
    skips_reasoning = tools.must_call or request.constraint() is not None
    images = await read_images(model, request, origin, None) if request.images else ()
    return await _rendered(model, request, tools, skips_reasoning=skips_reasoning, images=images)


async def _rendered(
    model: ServedModel,
    request: ChatRequest,
    tools: ToolPlan,
    *,
    skips_reasoning: bool,
    most: int | None = None,
    known: KnownText | None = None,
    continuation: Continuation | None = None,
    images: Sequence[PreparedImage] = (),
) -> RenderedPrompt:
    template = model.template
    if template is None:
        raise InvalidRequest(
            "This model has no chat template. Use /v1/completions with a prompt instead.",
            "messages",
        )
    functions = [function.as_tool() for function in tools.listed]
    variables = {**request.template_variables, **({"tools": functions} if functions else {})}
    placeholders = None if model.images is None else Placeholders(model.images.decoder)
    if placeholders is not None:
        variables = placeholders.marked(variables)
    rendering = _Rendering(
        model, template, request, variables, placeholders, images,
        skips_reasoning=skips_reasoning, has_tools=bool(tools.offered), most=most, known=known,
    )  # fmt: skip
    if request.chat_template is not None:
        messages = await run_in_thread(partial(rendering.messages_of, request))
        text = await _render_request_template(model, template, request, messages, variables)
        return await run_in_thread(lambda: rendering.tokenized(rendering.finished(messages, text)))
    if not images and fits_on_loop([], len(request.messages)):
        messages = rendering.messages_of(request)
        texts = [orjson.dumps(function) for function in functions]
        texts += [message["content"] for message in messages]
        if fits_on_loop(texts, len(messages)):
            return rendering.prompt(messages, continuation)
    return await run_in_thread(
        lambda: rendering.prompt(rendering.messages_of(request), continuation)
    )


@dataclass(frozen=True, slots=True)
class _Rendering:
    """How the messages of a request become text and ids; `placeholders` of a model with images."""

    model: ServedModel
    template: ChatTemplate
    request: ChatRequest
    variables: Mapping[str, Any]
    placeholders: Placeholders | None
    images: Sequence[PreparedImage]
    skips_reasoning: bool
    has_tools: bool
    most: int | None
    known: KnownText | None

    def messages_of(self, request: ChatRequest) -> list[TemplateMessage]:
        """Messages as the template sees them."""
        messages = _template_messages(request)
        return messages if self.placeholders is None else self.placeholders.marked(messages)

    def prompt(
        self, messages: list[TemplateMessage], continuation: Continuation | None
    ) -> RenderedPrompt:
        """The prompt, by the model's template. Raises as `tokenize_chat`."""
        text = self._text(messages)
        if continuation is None:
            return self.tokenized(text)
        if self.placeholders is not None and self.placeholders.has_marks(text):
            raise OtherBeginningError
        earlier = self._text(self.messages_of(continuation.earlier))
        tokenizer = self.model.tokenizer
        prompt = continuation.prompt(earlier, text, self.request, tokenizer, self.most)
        return RenderedPrompt(prompt.text, prompt.ids, prompt.marks, num_kept=prompt.num_kept)

    def _text(self, messages: list[TemplateMessage]) -> str:
        adds_prompt = self.request.adds_generation_prompt
        text = self.template.render(messages, add_generation_prompt=adds_prompt, **self.variables)
        return self.finished(messages, text)

    def finished(self, messages: Sequence[TemplateMessage], text: str) -> str:
        """The text that the model reads, of what the template has rendered."""
        if self.request.continue_final_message:
            text = _cut_after(text, messages[-1]["content"])
        if self.skips_reasoning and self.model.dialect is not None:
            text += self.model.dialect.without_reasoning(text, has_tools=self.has_tools)
        return text

    def tokenized(self, text: str) -> RenderedPrompt:
        """The ids of a text, with those of images. Raises as `token_ids`."""
        tokenizer, messages, most = self.model.tokenizer, self.request.messages, self.most
        if self.placeholders is not None and (self.images or self.placeholders.has_marks(text)):
            ids, media, others = self.placeholders.ids(tokenizer, text, self.images, most)
            marks = marks_of(messages, others, ids, tokenizer, media)
            return RenderedPrompt(unmarked(text), ids, marks, media)
        if self.known is not None:
            ids, num_kept, _ = continued_ids(tokenizer, self.known, text, most)
        else:
            num_kept = 0
            ids = token_ids(tokenizer, text, "messages", add_special_tokens=False, most=most)
        return RenderedPrompt(
            text, ids, marks_of(messages, text, ids, tokenizer), num_kept=num_kept
        )


async def _render_request_template(
    model: ServedModel,
    template: ChatTemplate,
    request: ChatRequest,
    messages: Sequence[TemplateMessage],
    variables: Mapping[str, Any],
) -> str:
    assert request.chat_template is not None, "checked by _rendered"
    if not model.trusts_request_templates:
        raise InvalidRequest(
            "'chat_template' is not accepted: this server uses the model's own template. "
            "(--trust-request-chat-template allows templates in requests.)",
            "chat_template",
        )
    return await template.render_source(
        request.chat_template,
        messages,
        variables,
        add_generation_prompt=request.adds_generation_prompt,
    )


def _parser(
    dialect: Dialect, prompt: str, choice: ToolChoice, random_bits: RandomBits
) -> StreamParser:
    parser = dialect.parser(prompt, choice, random_bits)
    assert parser is not None, "tokenize_chat has checked that there is one"
    return parser


def _cut_after(text: str, content: str) -> str:
    """The prompt up to the end of its last message; the template may have stripped its content."""
    for rendered in (content, content.rstrip(), content.strip()):
        if rendered and (start := text.rfind(rendered)) >= 0:
            return text[: start + len(rendered)]
    raise InvalidRequest(
        "'continue_final_message' is not possible: the chat template does not render the content "
        "of the last message unchanged.",
        "continue_final_message",
    )


def _template_messages(request: ChatRequest) -> list[TemplateMessage]:
    """The messages as templates see them.

    Arguments of tool calls are objects: requests have JSON in a string, templates dump objects.
    """
    messages = (message.as_mapping() for message in request.messages)
    return [
        {**message, "tool_calls": [_with_parsed_call(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _with_parsed_call(call: TemplateMessage) -> TemplateMessage:
    function = call["function"]
    return {**call, "function": {**function, "arguments": parsed_arguments(function["arguments"])}}
