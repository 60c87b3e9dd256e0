"""A model's dialect: how it reasons and calls tools, as one object behind the `Dialect` port."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from adapters.dialects.parser import Marks, MessageParser
from adapters.dialects.reader import Reader
from adapters.dialects.tool_calls import ReadAnswer
from gateway.ports import ForcedCall, StreamParser, WantedCalls

Bits = Callable[[int], int]
_ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


def long_id(bits: Bits) -> str:
    """A call's id as OpenAI's look."""
    return f"call_{bits(96):024x}"


def short_id(bits: Bits) -> str:
    """Nine letters and digits, which is what Mistral's templates insist on."""
    return "".join(_ALPHABET[bits(16) % len(_ALPHABET)] for _ in range(9))


@dataclass(frozen=True, slots=True)
class ToolStyle:
    """How calls are written: who reads them, and how one begins that must come.

    A call that must come is JSON after `prefix`, with its arguments under `key`; an array of
    calls if `is_array`. `special_tokens` are marks that the vocabulary has as control tokens.
    """

    read: ReadAnswer
    prefix: str = ""
    key: str = "arguments"
    is_array: bool = False
    special_tokens: tuple[str, ...] = ()
    new_id: Callable[[Bits], str] = long_id


@dataclass(frozen=True, slots=True)
class ModelDialect:
    """`tools` None: the model cannot call; `reasoning` None: it does not think aloud."""

    tools: ToolStyle | None = None
    reasoning: Marks | None = None

    @property
    def reads_calls(self) -> bool:
        return self.tools is not None

    @property
    def special_tokens(self) -> Collection[str]:
        """Marks; some vocabularies have them as control tokens, which must be shown then."""
        calls = () if self.tools is None else self.tools.special_tokens
        return (*calls, *(self.reasoning or ()))

    def parser(self, prompt: str, wanted: WantedCalls, bits: Bits) -> StreamParser | None:
        """Who reads the answer to `prompt`; None: it is all content.

        `bits` makes random bits, for the ids of calls.
        """
        style = self.tools if wanted.names else None
        if style is None and self.reasoning is None:
            return None
        new_id = long_id if style is None else style.new_id
        return MessageParser(
            Reader(lambda: new_id(bits), wanted.max_calls),
            self.reasoning,
            None if style is None else style.read,
            frozenset(wanted.names),
            is_reasoning=self._is_open(prompt),
        )

    def without_reasoning(self, prompt: str) -> str:
        """What to add to a prompt that opens reasoning, so that the answer comes at once."""
        if self.reasoning is None or not self._is_open(prompt):
            return ""
        return f"\n{self.reasoning.close}\n\n"

    def force(self, tools: Mapping[str, Any], *, is_parallel: bool) -> ForcedCall:
        """How an answer begins that calls one of `tools` (parameters by name), and its schema."""
        assert self.tools is not None, "asked of a model that can call"
        style = self.tools
        place = "#/items" if style.is_array else "#"
        calls = [
            _call(name, parameters, style.key, f"{place}/anyOf/{i}" if len(tools) > 1 else place)
            for i, (name, parameters) in enumerate(tools.items())
        ]
        schema = calls[0] if len(calls) == 1 else {"anyOf": calls}
        if style.is_array:
            schema = {"type": "array", "items": schema, "minItems": 1}
            schema |= {} if is_parallel else {"maxItems": 1}
        return ForcedCall(style.prefix, schema)

    def _is_open(self, prompt: str) -> bool:
        return self.reasoning is not None and prompt.rstrip().endswith(self.reasoning.open)


def _call(name: str, parameters: Any, key: str, place: str) -> dict[str, Any]:
    """The schema of one call; `place` is where it stands, for references inside."""
    inside = _moved(parameters or _NO_PARAMETERS, f"{place}/properties/{key}")
    return {
        "type": "object",
        "properties": {"name": {"const": name}, key: inside},
        "required": ["name", key],
        "additionalProperties": False,
    }


def _moved(schema: Any, place: str) -> Any:
    """A schema whose references to itself still hold when it stands at `place` of another."""
    if isinstance(schema, Mapping):
        return {
            name: place + value[1:]
            if name == "$ref" and isinstance(value, str) and value.startswith("#")
            else _moved(value, place)
            for name, value in schema.items()
        }
    if isinstance(schema, Sequence) and not isinstance(schema, str):
        return [_moved(item, place) for item in schema]
    return schema
