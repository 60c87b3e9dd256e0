"""How families of models write tool calls. Each is a program over a `TextReader`.

What looks like a call and is none stays content, its marks included.
"""

import re
from collections.abc import Callable, Container

from adapters.dialects.json_call import Anything, read_arguments, read_call
from adapters.dialects.reader import Reads, TextReader

ReadAnswer = Callable[
    [TextReader, Container[str]], Reads[None]
]  # the reader, and the tools offered

HERMES_OPEN, HERMES_CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
MISTRAL_CALLS, MISTRAL_ARGS, MISTRAL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"

_ANYTHING = Anything()
_MISTRAL_NAME = re.compile(r"\s*([\w.\-]{1,64})(?:\[CALL_ID\][\w\-]{1,64})?(?:\[ARGS\])?\s*(?=\{)")
_MAX_NAME = 192  # characters before the arguments


def content(text: str) -> str:
    """Text that is content; the make of most pieces."""
    return text


def read_hermes(reader: TextReader, names: Container[str]) -> Reads[None]:
    """Hermes, Qwen, the built-in model: `<tool_call>{"name": …, "arguments": …}</tool_call>`."""
    while (yield from reader.pour(content, HERMES_OPEN)):
        if (yield from read_call(reader, _ANYTHING)):
            yield from reader.accept(HERMES_CLOSE)
        else:
            show_passed(reader)


def read_llama(reader: TextReader, names: Container[str]) -> Reads[None]:
    """Llama 3: an answer that is nothing but `{"name": …, "parameters": …}`, several after `;`.

    `<|python_tag|>` may come first. JSON that calls no offered tool is an answer in JSON.
    """
    yield from reader.accept(PYTHON_TAG)
    if (yield from reader.peek()) == "{":
        while (yield from read_call(reader, names)):
            yield from reader.accept(";")
    reader.unread()
    yield from pour_rest(reader)


def read_mistral(reader: TextReader, names: Container[str]) -> Reads[None]:
    """Mistral: `[TOOL_CALLS]` and an array of calls, or, later, a name and its arguments."""
    while (yield from reader.pour(content, MISTRAL_CALLS)):
        is_array = yield from reader.accept("[")
        if not (yield from (_read_array(reader) if is_array else _read_named(reader))):
            show_passed(reader)


def _read_array(reader: TextReader) -> Reads[bool]:
    """Calls up to the closing bracket; False if it does not come."""
    while (yield from read_call(reader, _ANYTHING)):
        if not (yield from reader.accept(",")):
            return (yield from reader.accept("]"))
    return False


def _read_named(reader: TextReader) -> Reads[bool]:
    """`name[ARGS]{…}`, with or without a `[CALL_ID]` between."""
    while (header := _MISTRAL_NAME.match(reader.text[:_MAX_NAME])) is None:
        is_late = "{" in reader.text or len(reader.text) >= _MAX_NAME
        if is_late or reader.is_ended or MISTRAL_CALLS in reader.text:
            return False
        yield
    reader.take(header.end())
    reader.call(header[1])
    reader.passed = ""
    yield from read_arguments(reader)
    return True


def show_passed(reader: TextReader) -> None:
    """What was passed over is content after all."""
    size = len(reader.passed)
    reader.unread()
    reader.say(content, size)


def pour_rest(reader: TextReader) -> Reads[None]:
    """Everything that follows is content."""
    while not reader.is_ended:
        reader.say(content, len(reader.text))
        yield
    reader.say(content, len(reader.text))
