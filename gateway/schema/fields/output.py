"""What the output must match: OpenAI's `response_format`, and vLLM's fields for the same.

They all come out as one `OutputConstraint`; a request may name one of them.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from engine.errors import InvalidRequest
from engine.step import Grammar, GrammarKind
from gateway.schema.decoding import check_word, refuse_unless
from gateway.schema.fields.sampling import SamplingRequest

MAX_CHOICES = 1024
_FORMATS = ("text", "json_object", "json_schema")


class OutputConstraint(NamedTuple):
    """A grammar for the output, and the field that asks for it."""

    grammar: Grammar
    param: str


class JsonSchemaFormat(msgspec.Struct, forbid_unknown_fields=True):
    """A schema with a name. The output matches it whether it is `strict` or not."""

    name: str
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    """`response_format`."""

    type: str
    json_schema: JsonSchemaFormat | None = None

    def held(self) -> OutputConstraint | None:
        """Raises `InvalidRequest` for a type that is not served, or without its schema."""
        param = "response_format"
        check_word(self.type, f"{param}.type", _FORMATS)
        if self.type == "text":
            return None
        if self.type == "json_object":
            return OutputConstraint(Grammar(GrammarKind.JSON_OBJECT), param)
        if self.json_schema is None:
            name = f"{param}.json_schema"
            raise InvalidRequest(f"Missing required parameter: '{name}'.", name)
        if self.json_schema.schema is None:
            return OutputConstraint(Grammar(GrammarKind.JSON_OBJECT), param)
        return OutputConstraint(_schema(self.json_schema.schema), f"{param}.json_schema.schema")


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's `structured_outputs`; one of the first five."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_fallback: bool | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None
    structural_tag: Any = None


class OutputRequest(SamplingRequest, kw_only=True, forbid_unknown_fields=True):
    """The fields that every request for text may have; `guided_*` are the older names."""

    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_decoding_backend: str | None = None  # there is one library here
    guided_whitespace_pattern: str | None = None

    def check_output(self) -> None:
        """Raise `InvalidRequest` for what cannot be asked of our grammars."""
        refuse_unless(self, "guided_whitespace_pattern")
        if self.structured_outputs is not None:
            for name in ("disable_any_whitespace", "disable_additional_properties"):
                refuse_unless(self.structured_outputs, name, False, prefix="structured_outputs.")
            for name in ("whitespace_pattern", "structural_tag"):
                refuse_unless(self.structured_outputs, name, prefix="structured_outputs.")

    def held(self) -> OutputConstraint | None:
        """The one grammar that is asked for; `InvalidRequest` for two of them."""
        found = list(self._held())
        if len(found) > 1:
            first, second = found[0].param, found[1].param
            raise InvalidRequest(f"'{second}' cannot be combined with '{first}'.", second)
        return found[0] if found else None

    def _held(self) -> Iterator[OutputConstraint]:
        asked = self.structured_outputs
        if asked is not None:
            yield from _all_held(asked, "structured_outputs.", "")
            if asked.json_object:
                yield OutputConstraint(
                    Grammar(GrammarKind.JSON_OBJECT), "structured_outputs.json_object"
                )
        yield from _all_held(self, "", "guided_")


def _all_held(fields: Any, place: str, prefix: str) -> Iterator[OutputConstraint]:
    """Of the four fields that both spellings have, those that are given."""
    schema = getattr(fields, prefix + "json")
    if schema is not None:
        yield OutputConstraint(_schema(schema), f"{place}{prefix}json")
    regex = getattr(fields, prefix + "regex")
    if regex is not None:
        yield OutputConstraint(Grammar(GrammarKind.REGEX, regex), f"{place}{prefix}regex")
    choice = getattr(fields, prefix + "choice")
    if choice is not None:
        yield OutputConstraint(_choice(choice, f"{place}{prefix}choice"), f"{place}{prefix}choice")
    grammar = getattr(fields, prefix + "grammar")
    if grammar is not None:
        kind = GrammarKind.EBNF if "::=" in grammar else GrammarKind.LARK
        yield OutputConstraint(Grammar(kind, grammar), f"{place}{prefix}grammar")


def _schema(schema: str | dict[str, Any]) -> Grammar:
    text = schema if isinstance(schema, str) else msgspec.json.encode(schema).decode()
    return Grammar(GrammarKind.JSON_SCHEMA, text)


def _choice(choice: list[str], param: str) -> Grammar:
    if not 0 < len(choice) <= MAX_CHOICES:
        raise InvalidRequest(
            f"Invalid '{param}': expected 1 to {MAX_CHOICES} strings, but got {len(choice)}.", param
        )
    return Grammar(GrammarKind.CHOICE, msgspec.json.encode(choice).decode())
