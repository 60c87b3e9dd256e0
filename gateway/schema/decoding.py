"""Bytes to a request shape. Every complaint is an `InvalidRequest` that names the field.

Shapes are msgspec Structs: strict types, no unknown fields. What they cannot express (ranges,
allowed words) is checked by the functions here, so that all complaints read alike.
"""

import re
from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec
import orjson

from engine.errors import InvalidRequest

Shape = TypeVar("Shape")

_AT = re.compile(r"^(?P<what>.*?)(?: - at `\$(?P<path>.*)`)?$", re.DOTALL)
_EXPECTED = re.compile(r"^Expected `(?P<expected>[^`]*)`, got `(?P<got>[^`]*)`$")
_MISSING = re.compile(r"^Object missing required field `(?P<field>.*)`$", re.DOTALL)
_UNKNOWN = re.compile(r"^Object contains unknown field `(?P<field>.*)`$", re.DOTALL)
_JSON_NAMES = {
    "str": "a string",
    "int": "an integer",
    "float": "a number",
    "bool": "a boolean",
    "array": "an array",
    "object": "an object",
    "null": "null",
}
_SHOWN = 100  # characters of a caller's value that a message repeats


def decode(decoder: msgspec.json.Decoder[Shape], body: bytes) -> Shape:
    """The request in `body`; raises `InvalidRequest` for whatever else it is."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _complaint(str(error)) from None
    except UnicodeDecodeError:
        raise InvalidRequest("The request body is not valid UTF-8.") from None
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"The request body is not valid JSON: {error}.") from None
    except RecursionError:
        raise InvalidRequest("The request body is nested too deeply.") from None


def converted(kind: type[Shape], data: Mapping[str, object]) -> Shape:
    """The same for what was decoded already, and is to be another shape."""
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        raise _complaint(str(error)) from None


def check_unicode(body: bytes) -> None:
    """Raise `InvalidRequest` if a string has half of a surrogate pair: it could not be told."""
    if b"\\u" not in body:
        return
    try:
        orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"The request body is not valid JSON: {error}.") from None


def check_range(value: float | None, param: str, low: float, high: float) -> None:
    """`value`, if given, must lie in `[low, high]`."""
    if value is not None and not low <= value <= high:
        raise InvalidRequest(
            f"Invalid value for '{param}': expected a number from {low} to {high}, "
            f"but got {shown(value)}.",
            param,
        )


def check_least(value: int | None, param: str, least: int) -> None:
    """`value`, if given, must be at least `least`."""
    if value is not None and value < least:
        raise InvalidRequest(
            f"Invalid value for '{param}': expected an integer of at least {least}, "
            f"but got {shown(value)}.",
            param,
        )


def check_word(value: str, param: str, allowed: Sequence[str]) -> None:
    """`value` must be one of the allowed words."""
    if value not in allowed:
        words = ", ".join(f"'{word}'" for word in allowed)
        raise InvalidRequest(
            f"Invalid value: {shown(value)}. Supported values for '{param}' are: {words}.", param
        )


def refuse_unless(shape: msgspec.Struct, name: str, *neutral: object, prefix: str = "") -> None:
    """Refuse a parameter that we do not have, unless its value asks for nothing."""
    value = getattr(shape, name)
    if value is None or value in neutral:
        return
    allowed = ", ".join(["null", *(msgspec.json.encode(word).decode() for word in neutral)])
    raise InvalidRequest(
        f"'{prefix}{name}' is not supported with the value {shown(value)}; allowed: {allowed}.",
        f"{prefix}{name}",
    )


def shown(value: object) -> str:
    """A caller's value for a message; long ones are cut."""
    if isinstance(value, int) and value.bit_length() > 256:
        return "an integer of enormous size"
    if isinstance(value, list | dict):
        return "an array" if isinstance(value, list) else "an object"
    text = repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"


def _complaint(message: str) -> InvalidRequest:
    """msgspec's words in OpenAI's: `Expected …, got … - at $.a[0].b` and its kin."""
    parts = _AT.match(message)
    assert parts is not None, "the pattern matches any text"
    what = parts["what"]
    path = (parts["path"] or "").removesuffix("[...]").lstrip(".")
    if found := _UNKNOWN.match(what):
        name = _joined(path, found["field"][:_SHOWN])
        return InvalidRequest(f"Unrecognized request argument supplied: {name}", name)
    if found := _MISSING.match(what):
        name = _joined(path, found["field"])
        return InvalidRequest(f"Missing required parameter: '{name}'.", name)
    if found := _EXPECTED.match(what):
        expected = " or ".join(_named(kind) for kind in found["expected"].split(" | "))
        detail = f"expected {expected}, but got {_named(found['got'])} instead."
        if not path:
            return InvalidRequest(f"Invalid request body: {detail}")
        return InvalidRequest(f"Invalid type for '{path}': {detail}", path)
    return InvalidRequest(f"Invalid value for '{path}': {what}.", path or None)


def _joined(path: str, field: str) -> str:
    return f"{path}.{field}" if path else field


def _named(kind: str) -> str:
    return _JSON_NAMES.get(kind, kind)
