"""A model's dialect: how it reasons and calls tools, as one object behind the `Dialect` port."""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from adapters.dialects.parser import Marks, MessageParser
from adapters.dialects.reader import TextReader
from adapters.dialects.tool_calls import ReadAnswer
from engine.step import Grammar, GrammarKind
from gateway.ports import StreamParser, ToolCallGrammar, ToolChoice

Bits = Callable[[int], int]
_ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
_NO_PARAMETERS = {**_ANY_OBJECT, "properties": {}, "additionalProperties": False}


def long_id(bits: Bits) -> str:
    """A call's id as OpenAI's look."""
    return f"call_{bits(96):024x}"


def short_id(bits: Bits) -> str:
    """Nine letters and digits, which is what Mistral's templates insist on."""
    return "".join(_ALPHABET[bits(16) % len(_ALPHABET)] for _ in range(9))


@dataclass(frozen=True, slots=True)
class ToolStyle:
    """How calls are written: who reads them, and what stands around arguments that are held.

    A call begins with `mark` and `head`, in which `%s` is the name, and ends with `tail`. Without
    a mark it is a JSON object whose arguments are under `key`. `special_tokens` are marks that
    some vocabularies have as control tokens.
    """

    read: ReadAnswer
    mark: str = ""
    head: str = ""
    tail: str = ""
    key: str = "arguments"
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

    def parser(self, prompt: str, wanted: ToolChoice, bits: Bits) -> StreamParser | None:
        """Who reads the answer to `prompt`; None: it is all content.

        `bits` makes random bits, for the ids of calls.
        """
        style = self.tools if wanted.names else None
        if style is None and self.reasoning is None:
            return None
        new_id = long_id if style is None else style.new_id
        return MessageParser(
            TextReader(lambda: new_id(bits), wanted.max_calls),
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

    def hold_calls(self, held: ToolCallGrammar) -> Grammar | None:
        """What answers match that call so.

        None: free text beside calls without a mark cannot be told from them.
        """
        style = self.tools
        assert style is not None, "asked of a model that can call"
        if style.mark:
            return _tagged(style, held)
        if not held.must_call and held.answer is None:
            return None
        choices = [
            _call(name, parameters, style.key, f"#/anyOf/{place}")
            for place, (name, parameters) in enumerate(held.tools.items())
        ]
        if not held.must_call:
            choices.append(_moved(held.answer, f"#/anyOf/{len(choices)}"))
        return _json(GrammarKind.JSON_SCHEMA, {"anyOf": choices})

    def _is_open(self, prompt: str) -> bool:
        return self.reasoning is not None and prompt.rstrip().endswith(self.reasoning.open)


def _tagged(style: ToolStyle, held: ToolCallGrammar) -> Grammar:
    structures = [
        {
            "begin": style.mark + style.head % name,
            "schema": _parameters(parameters),
            "end": style.tail,
        }
        for name, parameters in held.tools.items()
    ]
    tags = {
        "triggers": [style.mark],
        "structures": structures,
        "at_least": int(held.must_call or held.answer is not None),
        "at_most": held.max_calls,
        "has_text": not held.must_call and held.answer is None,
    }
    if not held.must_call and held.answer is not None:
        tags["answer"] = held.answer
    return _json(GrammarKind.TAGS, tags)


def _json(kind: GrammarKind, value: Any) -> Grammar:
    return Grammar(kind, json.dumps(value, ensure_ascii=False))


def _parameters(parameters: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The schema of arguments; an empty one is OpenAI's way to say that there are none."""
    if parameters is None:
        return _ANY_OBJECT
    return parameters or _NO_PARAMETERS


def _call(name: str, parameters: Mapping[str, Any] | None, key: str, place: str) -> dict[str, Any]:
    """The schema of one call; `place` is where it stands, for references inside."""
    inside = _moved(_parameters(parameters), f"{place}/properties/{key}")
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
