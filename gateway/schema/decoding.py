"""Decodes JSON bytes into request structs. Every error is an `InvalidRequest` that names the field.

Requests are msgspec Structs: strict types, no unknown fields. The functions here check what a
Struct cannot express (ranges, allowed values), so that all error messages have one form.

Unknown request fields: ignored and named, or rejected where they would change the output.

Ignored are unknown top-level fields, and unknown fields inside messages, content parts, tool calls,
tools and options of reasoning, since clients, routers and other servers add their own. The response
header `x-podway-ignored-fields` lists them. Rejected are unknown fields of other objects, and
fields of other servers that ask for another output than the one that is generated.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Protocol, TypeVar

import msgspec
import orjson
from msgspec import inspect

from engine.errors import InvalidRequest

HEADER = "x-podway-ignored-fields"
# Anything inside these top-level fields may have unknown fields.
_OPEN_FIELDS = frozenset({"messages", "input", "system", "tools", "thinking", "reasoning"})
# Fields that ask for another output than the endpoint's: ignored with these values or null.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "early_stopping": (False,),
    "echo": (False,),
    "best_of": (1,),
    "logits_processors": ([],),
    "documents": ([],),
    "prompt_embeds": (),
    "lora": ([],),
    "lora_path": (),
    "grammar": ("",),
    "json_schema": (),
    "grammar_lazy": (False,),
    "ebnf": (),
    "regex": (),
    # the field belongs to another endpoint than the one that got the request
    "messages": (),
    "prompt": (),
    "input": (),
    "max_tokens_per_doc": (),
    "max_completion_tokens": (),
}
_NAME = re.compile(r"[\w.\-\[\]]{1,100}", re.ASCII)
_MAX_NAMED = 16
MAX_IGNORED = 1_000  # different unknown fields of one request


class UnknownFields:
    """The unknown fields of one HTTP request; `ignored` has their paths, without positions."""

    __slots__ = ("_rejects_all", "ignored")

    def __init__(self, *, rejects_all: bool = False) -> None:
        self._rejects_all = rejects_all
        self.ignored: dict[str, None] = {}

    def ignore(self, path: str) -> bool:
        """Add `path` to the ignored fields; False if the server rejects them. Raises
        `InvalidRequest` for more than `MAX_IGNORED`."""
        if not self._rejects_all:
            self.ignored[path] = None
            if len(self.ignored) > MAX_IGNORED:
                raise InvalidRequest(
                    f"The request has more than {MAX_IGNORED} different unknown fields."
                )
        return not self._rejects_all

    def remove(self, body: bytes, shape: Any, root: str = "") -> bytes:
        """The JSON `body` without the fields that the type `shape` has not and that may be ignored.

        `body` is valid JSON; other unknown fields stay and make the decoder raise. `root` is the
        path of the body in its request.
        """
        if self._rejects_all:
            return body
        data = msgspec.json.decode(body)
        has_changed = False
        for path in _remove(data, _type_of(shape), root):
            has_changed = True
            self.ignore(path)
        return msgspec.json.encode(data) if has_changed else body

    def headers(self) -> dict[str, str]:
        """The response header that lists the ignored fields, if any."""
        if not self.ignored:
            return {}
        named = [path for path in self.ignored if _NAME.fullmatch(path)][:_MAX_NAMED]
        more = len(self.ignored) - len(named)
        return {HEADER: ", ".join([*named, *([f"{more} more"] if more else [])])}


@cache
def _type_of(shape: Any) -> inspect.Type:
    return inspect.type_info(shape)


def _remove(value: Any, kind: inspect.Type, path: str) -> Iterator[str]:
    """Remove what may be ignored from `value`, in place; yield the paths."""
    if isinstance(value, dict):
        struct = _alternative(kind, inspect.StructType)
        if struct is None:
            return
        known = {field.encode_name: field.type for field in struct.fields}
        for name in list(value):
            field_path = f"{path}.{name}" if path else name
            if name in known:
                yield from _remove(value[name], known[name], field_path)
            elif _may_ignore(path, name, value[name]):
                del value[name]
                yield field_path
    elif isinstance(value, list) and (items := _alternative(kind, inspect.ListType)) is not None:
        for item in value:
            yield from _remove(item, items.item_type, f"{path}[]")


def _alternative(kind: inspect.Type, wanted: type[Any]) -> Any:
    """`kind` if it is the wanted type, or the first such type of a union."""
    kinds = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    return next((each for each in kinds if isinstance(each, wanted)), None)


def _may_ignore(path: str, name: str, value: object) -> bool:
    if path:
        return path.partition("[")[0].partition(".")[0] in _OPEN_FIELDS
    if name in _NEUTRAL:
        return value is None or value in _NEUTRAL[name]
    return _NAME.fullmatch(name) is not None


Shape = TypeVar("Shape")

_AT = re.compile(r"^(?P<what>.*?)(?: - at `\$(?P<path>.*)`)?$", re.DOTALL)
_EXPECTED = re.compile(r"^Expected `(?P<expected>[^`]*)`, got `(?P<got>[^`]*)`$")
_MISSING = re.compile(r"^Object missing required field `(?P<field>.*)`$", re.DOTALL)
_UNKNOWN = re.compile(r"^Object contains unknown field `(?P<field>.*)`$", re.DOTALL)
_UNKNOWN_PREFIX = "Object contains unknown field"
_JSON_NAMES = {
    "str": "a string",
    "int": "an integer",
    "float": "a number",
    "bool": "a boolean",
    "array": "an array",
    "object": "an object",
    "null": "null",
}
MAX_TEXT = 4_096  # characters of a string, except those below
MAX_KEYS = 4_096  # fields of an object without a fixed shape
_PROMPTS = (
    "prompt", "input", "instructions", "system", "content", "query", "queries", "documents",
    "text_1", "text_2", "chat_template", "guided_json", "guided_regex", "guided_grammar", "json",
    "regex", "grammar", "stop", "state", "suffix", "input_prefix", "input_suffix", "text",
)  # fmt: skip
MAX_TEXTS: Mapping[str, int | None] = {**dict.fromkeys(_PROMPTS), "description": 1 << 16}
_MAX_QUOTED = 100  # characters of a caller's value that an error message repeats


class Checkable(Protocol):
    """A request that checks its values."""

    def check(self) -> None:
        """Raise `InvalidRequest` for the first invalid one."""


Request = TypeVar("Request", bound=Checkable)


def decode_checked(
    kind: type[Request], body: bytes, unknown: UnknownFields | None = None
) -> Request:
    """Decode and check a request of this kind. Raises `InvalidRequest`."""
    request = decode(kind, body, unknown)
    request.check()
    return request


def decode(
    kind: type[Shape], body: bytes, unknown: UnknownFields | None = None, root: str = ""
) -> Shape:
    """Decode `body`, without the fields that `unknown` may ignore; `root` is the body's path.

    Raises `InvalidRequest` if it is not UTF-8, not JSON, has another shape, or a field is too long.
    """
    decoder = _decoder_of(kind)  # type: ignore[arg-type] # a type can be hashed
    shape: Shape = _decoded(decoder, body, unknown, root)
    if isinstance(shape, msgspec.Struct):
        check_lengths((name, getattr(shape, name)) for name in shape.__struct_fields__)
    return shape


@cache
def _decoder_of(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def _decoded(
    decoder: msgspec.json.Decoder[Shape], body: bytes, unknown: UnknownFields | None, root: str
) -> Shape:
    try:
        try:
            return decoder.decode(body)
        except msgspec.ValidationError as error:
            if unknown is None or not str(error).startswith(_UNKNOWN_PREFIX):
                raise
        return decoder.decode(unknown.remove(body, decoder.type, root))
    except msgspec.ValidationError as error:
        raise _invalid_request(str(error)) from None
    except UnicodeDecodeError:
        raise InvalidRequest("The request body is not valid UTF-8.") from None
    except msgspec.DecodeError as error:
        if not body:
            raise InvalidRequest("The request body is empty; JSON is expected.") from None
        raise InvalidRequest(f"The request body is not valid JSON: {error}.") from None
    except UnicodeEncodeError:
        raise InvalidRequest("The request body has an unpaired surrogate in a string.") from None
    except RecursionError:
        raise InvalidRequest("The request body is nested too deeply.") from None


def convert(kind: type[Shape], data: Mapping[str, object]) -> Shape:
    """Convert decoded fields into the struct `kind`. Raises `InvalidRequest` as `decode` does."""
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        raise _invalid_request(str(error)) from None


def check_lengths(fields: Iterable[tuple[str, object]], path: str = "") -> None:
    """Raise `InvalidRequest` for a string or an object that is too long, outside of arrays. What
    the prompt or a grammar is made of is bounded by the context and the limits of grammars."""
    for name, value in fields:
        if isinstance(value, msgspec.Struct):
            inner = ((each, getattr(value, each)) for each in value.__struct_fields__)
            check_lengths(inner, f"{path}{name}.")
            continue
        most = MAX_TEXTS.get(name, MAX_TEXT) if isinstance(value, str) else MAX_KEYS
        if most is not None and isinstance(value, str | dict) and len(value) > most:
            unit = "characters" if isinstance(value, str) else "fields"
            reason = f"at most {most} {unit} are allowed, but it has {len(value)}."
            raise invalid(f"{path}{name}", reason)


def invalid(param: str, reason: str) -> InvalidRequest:
    """The error of a field with a wrong value; the reason is the rest of the sentence."""
    return InvalidRequest(f"Invalid '{param}': {reason}", param)


def missing(param: str) -> InvalidRequest:
    """The error of a field that must be given."""
    return InvalidRequest(f"Missing required parameter: '{param}'.", param)


def check_unicode(body: bytes) -> None:
    """Raise `InvalidRequest` if a string has half of a surrogate pair, which UTF-8 cannot encode.

    Only endpoints that repeat the request in their response need this check.
    """
    if b"\\u" not in body:
        return
    try:
        orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"The request body is not valid JSON: {error}.") from None


def check_range(value: float | None, param: str, low: float, high: float) -> None:
    """Raise `InvalidRequest` unless `value` is None or in `[low, high]`."""
    if value is not None and not low <= value <= high:
        raise InvalidRequest(
            f"Invalid value for '{param}': expected a number from {low} to {high}, "
            f"but got {quote(value)}.",
            param,
        )


def check_minimum(value: int | None, param: str, minimum: int) -> None:
    """Raise `InvalidRequest` unless `value` is None or at least `minimum`."""
    if value is not None and value < minimum:
        raise InvalidRequest(
            f"Invalid value for '{param}': expected an integer of at least {minimum}, "
            f"but got {quote(value)}.",
            param,
        )


def check_allowed(value: str, param: str, allowed: Sequence[str]) -> None:
    """Raise `InvalidRequest` unless `value` is one of `allowed`."""
    if value not in allowed:
        values = ", ".join(f"'{name}'" for name in allowed)
        raise InvalidRequest(
            f"Invalid value: {quote(value)}. Supported values for '{param}' are: {values}.", param
        )


def reject_unless(shape: msgspec.Struct, name: str, *no_effect: object, prefix: str = "") -> None:
    """Raise `InvalidRequest` for an unsupported field, unless it is null or has no effect.

    `no_effect` are the values with which the field changes nothing; `prefix` is the path of the
    object that contains the field.
    """
    given = getattr(shape, name)
    if given is None or given in no_effect:
        return
    allowed = ", ".join(["null", *(msgspec.json.encode(value).decode() for value in no_effect)])
    value = f"the value {quote(given)}" if isinstance(given, str | int | float) else "this value"
    raise InvalidRequest(
        f"'{prefix}{name}' is not supported with {value}; allowed: {allowed}.",
        f"{prefix}{name}",
    )


def quote(value: object) -> str:
    """A caller's value as an error message repeats it, cut after 100 characters."""
    if isinstance(value, int) and value.bit_length() > 256:
        return "an integer of more than 256 bits"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | dict):
        return "an array" if isinstance(value, list) else "an object"
    text = repr(value)
    return text if len(text) <= _MAX_QUOTED else text[:_MAX_QUOTED] + "…"


def _invalid_request(message: str) -> InvalidRequest:
    """A msgspec error (`Expected …, got … - at $.a[0].b`) as an error in OpenAI's wording."""
    parts = _AT.match(message)
    assert parts is not None, "the pattern matches any text"
    what = parts["what"]
    path = (parts["path"] or "").removesuffix("[...]").lstrip(".")
    if found := _UNKNOWN.match(what):
        name = _joined(path, found["field"][:_MAX_QUOTED])
        return InvalidRequest(f"Unrecognized request argument supplied: {name}", name)
    if found := _MISSING.match(what):
        return missing(_joined(path, found["field"]))
    if found := _EXPECTED.match(what):
        expected = " or ".join(_json_name(kind) for kind in found["expected"].split(" | "))
        detail = f"expected {expected}, but got {_json_name(found['got'])} instead."
        if not path:
            return InvalidRequest(f"Invalid request body: {detail}")
        return InvalidRequest(f"Invalid type for '{path}': {detail}", path)
    return InvalidRequest(f"Invalid value for '{path}': {what}.", path or None)


def _joined(path: str, field: str) -> str:
    return f"{path}.{field}" if path else field


def _json_name(kind: str) -> str:
    return _JSON_NAMES.get(kind, kind)
