"""Parsers for the tool-call syntax of model families, as generators over a `TextReader`.

Text that only resembles a call, or calls a tool that was not offered, is passed through as content,
its marks included.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from adapters.dialects.calls.json_call import read_arguments, read_call
from adapters.dialects.reader import Parsing, TextReader

# The tools offered: by name, the JSON schema of the parameters if it is known.
OfferedTools = Mapping[str, Mapping[str, Any] | None]
ParseOutput = Callable[[TextReader, OfferedTools], Parsing[None]]
# The names and arguments of the calls in a text; raises `NotACall`.
ParseWhole = Callable[[str, OfferedTools], Sequence[tuple[str, Mapping[str, Any]]]]

HERMES_OPEN, HERMES_CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
MISTRAL_CALLS, MISTRAL_ARGS, MISTRAL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
GRANITE_CALLS = "<|tool_call|>"
PHI_OPEN, PHI_CLOSE = "<|tool_call|>", "<|/tool_call|>"

_MISTRAL_NAME = re.compile(r"\s*([\w.\-]{1,64})(?:\[CALL_ID\][\w\-]{1,64})?(?:\[ARGS\])?\s*(?=\{)")
_MAX_NAME = 192  # characters before the arguments


def content(text: str) -> str:
    """Make a piece of content."""
    return text


def read_hermes(reader: TextReader, tools: OfferedTools) -> Parsing[None]:
    """Hermes, Qwen and the built-in model:
    `<tool_call>{"name": …, "arguments": …}</tool_call>`."""
    while (yield from reader.emit_until(content, HERMES_OPEN)):
        if (yield from read_call(reader, tools)):
            yield from reader.accept(HERMES_CLOSE)
        else:
            emit_skipped(reader)


def read_llama(reader: TextReader, tools: OfferedTools) -> Parsing[None]:
    """Llama 3: the whole output is `{"name": …, "parameters": …}`, or several separated by `;`.

    `<|python_tag|>` may come first. JSON that does not call an offered tool is content.
    """
    yield from reader.accept(PYTHON_TAG)
    if (yield from reader.peek()) == "{":
        while (yield from read_call(reader, tools)):
            yield from reader.accept(";")
    reader.unskip()
    yield from emit_rest(reader)


def read_mistral(reader: TextReader, tools: OfferedTools) -> Parsing[None]:
    """Mistral: `[TOOL_CALLS]`, then an array of calls or, since 2025, a name and its arguments."""
    while (yield from reader.emit_until(content, MISTRAL_CALLS)):
        read = _read_array if (yield from reader.accept("[")) else _read_named
        if not (yield from read(reader, tools)):
            emit_skipped(reader)


def read_marked_array(reader: TextReader, tools: OfferedTools) -> Parsing[None]:
    """Granite 3 and Phi-4-mini: `<|tool_call|>[{"name": …, "arguments": …}, …]`, which Phi closes
    with `<|/tool_call|>`."""
    while (yield from reader.emit_until(content, GRANITE_CALLS)):
        is_array = yield from reader.accept("[")
        if is_array and (yield from _read_array(reader, tools)):
            yield from reader.accept(PHI_CLOSE)
        else:
            emit_skipped(reader)


def _read_array(reader: TextReader, tools: OfferedTools) -> Parsing[bool]:
    """Parse calls up to the closing bracket; False if it is missing."""
    while (yield from read_call(reader, tools)):
        if not (yield from reader.accept(",")):
            return (yield from reader.accept("]"))
    return False


def _read_named(reader: TextReader, tools: OfferedTools) -> Parsing[bool]:
    """Parse `name[ARGS]{…}`, with an optional `[CALL_ID]`."""
    while (header := _MISTRAL_NAME.match(reader.text[:_MAX_NAME])) is None:
        is_late = "{" in reader.text or len(reader.text) >= _MAX_NAME
        if is_late or reader.is_ended or MISTRAL_CALLS in reader.text:
            return False
        yield
    if header[1] not in tools:
        return False
    reader.take(header.end())
    reader.begin_call(header[1])
    reader.skipped = ""
    yield from read_arguments(reader)
    return True


class NotACall(ValueError):
    """The text is not a call of a tool that was offered."""


def whole_reader(opening: str, closing: str, parse: ParseWhole) -> ParseOutput:
    """The parser of outputs whose calls are emitted when they are complete: `parse` is called with
    the text between the marks. Arguments become JSON."""

    def read(reader: TextReader, tools: OfferedTools) -> Parsing[None]:
        while (yield from reader.emit_until(content, opening)):
            while closing not in reader.text and not reader.is_ended:
                yield
            body, _, _ = reader.text.partition(closing)
            try:
                calls = parse(body, tools)
                if any(name not in tools for name, _ in calls):
                    raise NotACall
            except NotACall:
                emit_skipped(reader)
                continue
            reader.take(len(body) + len(closing))
            reader.skipped = ""
            for name, arguments in calls:
                reader.begin_call(name, json.dumps(arguments, ensure_ascii=False))

    return read


def emit_skipped(reader: TextReader) -> None:
    """Emit the skipped text as content."""
    size = len(reader.skipped)
    reader.unskip()
    reader.emit(content, size)


def emit_rest(reader: TextReader) -> Parsing[None]:
    """Emit all further text as content."""
    while not reader.is_ended:
        reader.emit(content, len(reader.text))
        yield
    reader.emit(content, len(reader.text))
