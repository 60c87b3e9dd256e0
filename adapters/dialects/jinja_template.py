"""A checkpoint's Jinja chat template, rendered as transformers does, in a sandbox with limits.

Errors that the template raises (`raise_exception`) and errors in rendering become
`InvalidRequest` for `messages`.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NoReturn

from jinja2 import Template
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.utils import Namespace

from adapters.dialects.bounds import BUDGET, BoundedEnvironment, RenderBudget
from adapters.dialects.message_tools import (
    lacks_calls,
    reads_tools_of_messages,
    with_message_tools,
    with_written_calls,
)
from adapters.dialects.template_process import TemplateJob, TemplateProcesses
from engine.errors import InvalidRequest, StartupError

Message = Mapping[str, Any]

# The budget of one rendering: a constant part, a part per message, a part per character.
_STEPS, _STEPS_PER_MESSAGE = 100_000, 500
_CHARS, _CHARS_PER_CHAR = 1 << 25, 64
_READS_PARTS = re.compile(r"""\bin\s+message(\.content|\[["']content["']\])""")
_READS_TEXTS = re.compile(r"\bis\s+(not\s+)?(string|iterable|sequence)")
_REASONING = ("reasoning_content", "thinking", "reasoning")


def _local_now() -> datetime:
    return datetime.now(UTC).astimezone().replace(tzinfo=None)


class JinjaTemplate:
    """The `ChatTemplate` port over one or several named templates ("default", "tool_use")."""

    def __init__(
        self,
        sources: Mapping[str, str],
        special_tokens: Mapping[str, Any],
        now: Callable[[], datetime] = _local_now,
    ) -> None:
        """Compile `sources`. `special_tokens` are template variables such as `bos_token`.

        Raises `StartupError` for a template that does not compile.
        """
        self._templates = {name: _compiled(name, text, now) for name, text in sources.items()}
        self._knows_developer = {name: "developer" in text for name, text in sources.items()}
        self._has_channels = {name: "<|channel|>" in text for name, text in sources.items()}
        self._reads_message_tools = {
            name: reads_tools_of_messages(text) for name, text in sources.items()
        }
        self._lacks_calls = {name: lacks_calls(text) for name, text in sources.items()}
        self._reads_only_parts = {name: _reads_only_parts(text) for name, text in sources.items()}
        self._special_tokens = dict(special_tokens)
        self._processes = TemplateProcesses()
        self.source = "\n".join(sources.values())

    async def render_source(
        self,
        source: str,
        messages: Sequence[Message],
        variables: Mapping[str, Any],
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt by a template that came with a request, rendered in a process of its own.

        Raises `InvalidRequest` for an invalid template, the template's error or a limit.
        """
        job = TemplateJob(source, self._special_tokens, messages, variables, add_generation_prompt)
        return await self._processes.render(job)

    def render(
        self, messages: Sequence[Message], /, *, add_generation_prompt: bool = True, **kwargs: Any
    ) -> str:
        """The prompt. `kwargs` are template variables such as `tools`.

        The role "developer" becomes "system" if the template does not mention it. Raises
        `InvalidRequest` with the template's message.
        """
        name = self._name(has_tools=kwargs.get("tools") is not None)
        shown = [_with_reasoning(message) for message in messages]
        if not self._knows_developer[name]:
            shown = [_as_system(message) for message in shown]
        if self._reads_message_tools[name]:
            shown = with_message_tools(shown, kwargs.get("tools"))
        elif self._lacks_calls[name]:
            shown = with_written_calls(shown)
        if self._reads_only_parts[name]:
            shown = [_as_parts(message) for message in shown]
        if self._has_channels[name]:
            shown = [_as_harmony(message) for message in shown]
        variables = {
            "tools": None,
            "documents": None,
            **self._special_tokens,
            **kwargs,
            "messages": shown,
            "add_generation_prompt": add_generation_prompt,
            BUDGET: _budget(shown),
        }
        return _rendered(self._templates[name], variables)

    def _name(self, *, has_tools: bool) -> str:
        if has_tools and "tool_use" in self._templates:
            return "tool_use"
        if "default" in self._templates:
            return "default"
        names = ", ".join(sorted(self._templates))
        raise InvalidRequest(f"The model has no default chat template, only {names}.", "messages")


def compile_request_template(source: str, special_tokens: Mapping[str, Any]) -> JinjaTemplate:
    """A template that came with a request. Raises `InvalidRequest` if it does not compile."""
    try:
        return JinjaTemplate({"default": source}, special_tokens)
    except (StartupError, RecursionError, SyntaxError, ValueError) as error:
        raise InvalidRequest(f"Invalid 'chat_template': {error}", "chat_template") from error


def _rendered(template: Template, variables: Mapping[str, Any]) -> str:
    try:
        return template.render(variables)
    except TemplateError as error:
        raise InvalidRequest(error.message or "The chat template failed.", "messages") from error
    except RecursionError as error:
        raise InvalidRequest("The chat template recurses too deeply.", "messages") from error
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        message = f"The chat template does not accept these messages: {error}"
        raise InvalidRequest(message, "messages") from error


def _compiled(name: str, source: str, now: Callable[[], datetime]) -> Template:
    environment = BoundedEnvironment()
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": lambda format: now().strftime(format),
        "namespace": _TemplateNamespace,
        # A function, since the attributes of the type would allow mutation.
        "dict": lambda *args, **kwargs: dict(*args, **kwargs),
    }
    try:
        return environment.compile_bounded(source)
    except TemplateSyntaxError as error:
        raise StartupError(
            f"chat template {name!r}, line {error.lineno}: {error.message}"
        ) from error


class _TemplateNamespace(Namespace):
    """Jinja's namespace without names that begin with an underscore."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"a namespace may not have the attribute {name!r}")
        super().__setitem__(name, value)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _with_reasoning(message: Message) -> Message:
    """The message with its reasoning under both names that templates read."""
    given = (message[name] for name in _REASONING if message.get(name) is not None)
    reasoning = next(given, None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _as_system(message: Message) -> Message:
    return {**message, "role": "system"} if message.get("role") == "developer" else message


def _as_harmony(message: Message) -> Message:
    """A message that gpt-oss' template accepts: beside calls it has content or reasoning, not both,
    and a content that is not null."""
    if not message.get("tool_calls"):
        return message
    content, reasoning = message.get("content") or "", message.get("thinking")
    if not content or not reasoning:
        return {**message, "content": content}
    return {**message, "content": "", "thinking": f"{reasoning}\n\n{content}"}


def _reads_only_parts(source: str) -> bool:
    """Whether a template reads a message's content as parts, and would render none of a text."""
    return bool(_READS_PARTS.search(source)) and not _READS_TEXTS.search(source)


def _as_parts(message: Message) -> Message:
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}]}


def _budget(messages: Sequence[Message]) -> RenderBudget:
    chars = sum(_num_chars(message.get("content")) for message in messages)
    return RenderBudget(
        _STEPS + _STEPS_PER_MESSAGE * len(messages), _CHARS + _CHARS_PER_CHAR * chars
    )


def _num_chars(content: object) -> int:
    """Characters of a content's texts."""
    if isinstance(content, list):
        return sum(_num_chars(part.get("text")) for part in content)
    return len(content) if isinstance(content, str) else 0
