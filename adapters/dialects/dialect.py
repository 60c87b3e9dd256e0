"""A model's dialect, behind the `Dialect` port: how it writes reasoning and tool calls."""

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from adapters.dialects.calls.schemas import Schema, moved
from adapters.dialects.calls.tool_calls import ParseOutput
from adapters.dialects.parser import MessageParser, ReasoningMarkers
from adapters.dialects.reader import TextReader
from engine.step import Grammar, GrammarKind
from gateway.ports import StreamParser, ToolCallGrammar, ToolChoice

Bits = Callable[[int], int]
_ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
_NO_PARAMETERS = {**_ANY_OBJECT, "properties": {}, "additionalProperties": False}


def long_id(bits: Bits) -> str:
    """A tool call id in OpenAI's form."""
    return f"call_{bits(96):024x}"


def short_id(bits: Bits) -> str:
    """A tool call id of nine letters and digits, which Mistral's templates require."""
    return "".join(_ALPHABET[bits(16) % len(_ALPHABET)] for _ in range(9))


@dataclass(frozen=True, slots=True)
class ToolStyle:
    """The syntax of tool calls: their parser, and the text around constrained arguments.

    A call begins with `mark` and `head`, in which `%s` is the name, and ends with `tail`. Without
    a mark, a call is a JSON object with its arguments under `key`. `special_tokens` are the marks
    which are control tokens in some vocabularies. With `structure`, arguments are not JSON: it
    makes the tagged structure of a call (`adapters.grammar.tags`) from a tool's name and schema.
    """

    read: ParseOutput
    mark: str = ""
    head: str = ""
    tail: str = ""
    key: str = "arguments"
    special_tokens: tuple[str, ...] = ()
    new_id: Callable[[Bits], str] = long_id
    structure: Callable[[str, Schema | None], dict[str, Any]] | None = None


@dataclass(frozen=True, slots=True)
class ModelDialect:
    """`tools` is None if the model cannot call tools, `reasoning` if it writes no reasoning."""

    tools: ToolStyle | None = None
    reasoning: ReasoningMarkers | None = None

    @property
    def has_tool_calls(self) -> bool:
        return self.tools is not None

    @property
    def special_tokens(self) -> Collection[str]:
        """Marks that are control tokens in some vocabularies; the decoder must not drop them."""
        calls = () if self.tools is None else self.tools.special_tokens
        marks = () if self.reasoning is None else (self.reasoning.open, self.reasoning.close)
        return (*calls, *marks)

    def parser(self, prompt: str, wanted: ToolChoice, bits: Bits) -> StreamParser | None:
        """The parser of the output after `prompt`; None if all output is content.

        `bits(n)` returns n random bits, for the ids of calls.
        """
        style = self.tools if wanted.tools else None
        if style is None and self.reasoning is None:
            return None
        new_id = long_id if style is None else style.new_id
        return MessageParser(
            TextReader(lambda: new_id(bits), wanted.max_calls),
            self.reasoning,
            None if style is None else style.read,
            wanted.tools,
            is_reasoning=self._is_open(prompt),
        )

    def without_reasoning(self, prompt: str, *, has_tools: bool) -> str:
        """The text that closes the reasoning which `prompt` has opened; "" if it has not."""
        if self.reasoning is None or not self._is_open(prompt):
            return ""
        return f"\n{self.reasoning.close}\n\n"

    @property
    def call_mark(self) -> str:
        return "" if self.tools is None else self.tools.mark

    def call_grammar(self, calls: ToolCallGrammar) -> Grammar | None:
        """The grammar of outputs with such calls.

        None if calls have no mark and free text is allowed, since the two cannot be distinguished.
        """
        style = self.tools
        assert style is not None, "the model can call tools"
        if style.mark:
            return _tagged(style, calls)
        if not calls.must_call and calls.answer is None:
            return None
        choices = [
            _call(name, parameters, style.key, f"#/anyOf/{place}")
            for place, (name, parameters) in enumerate(calls.tools.items())
        ]
        if not calls.must_call:
            choices.append(moved(calls.answer, f"#/anyOf/{len(choices)}"))
        return _json(GrammarKind.JSON_SCHEMA, {"anyOf": choices})

    def _is_open(self, prompt: str) -> bool:
        return self.reasoning is not None and prompt.rstrip().endswith(
            self.reasoning.open + self.reasoning.label
        )


def _tagged(style: ToolStyle, calls: ToolCallGrammar) -> Grammar:
    written = style.structure or partial(_json_structure, style)
    structures = [
        written(name, None if parameters is None else parameters or _NO_PARAMETERS)
        for name, parameters in calls.tools.items()
    ]
    tags = {
        "triggers": [style.mark],
        "structures": structures,
        "at_least": int(calls.must_call or calls.answer is not None),
        "at_most": calls.max_calls,
        "has_text": not calls.must_call and calls.answer is None,
    }
    if not calls.must_call and calls.answer is not None:
        tags["answer"] = calls.answer
    return _json(GrammarKind.TAGS, tags)


def _json_structure(style: ToolStyle, name: str, parameters: Schema | None) -> dict[str, Any]:
    inside = {"schema": _ANY_OBJECT if parameters is None else parameters}
    return {"begin": style.mark + style.head % name, "inside": inside, "end": style.tail}


def _json(kind: GrammarKind, value: Any) -> Grammar:
    return Grammar(kind, json.dumps(value, ensure_ascii=False))


def _parameters(parameters: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The schema of arguments; in OpenAI's API an empty schema means that there are none."""
    if parameters is None:
        return _ANY_OBJECT
    return parameters or _NO_PARAMETERS


def _call(name: str, parameters: Mapping[str, Any] | None, key: str, place: str) -> dict[str, Any]:
    """The schema of one call; `place` is its JSON pointer, to which `$ref`s are relocated."""
    inside = moved(_parameters(parameters), f"{place}/properties/{key}")
    return {
        "type": "object",
        "properties": {"name": {"const": name}, key: inside},
        "required": ["name", key],
        "additionalProperties": False,
    }
