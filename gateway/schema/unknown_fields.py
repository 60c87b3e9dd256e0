"""Unknown request fields: ignored and named, or rejected where they would change the output.

Ignored are unknown top-level fields, and unknown fields inside messages, content parts, tool calls,
tools and options of reasoning, since clients, routers and other servers add their own. The response
header `x-podway-ignored-fields` lists them. Rejected are unknown fields of other objects, and
fields of other servers that ask for another output than the one that is generated.
"""

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import msgspec
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

    def remove(self, body: bytes, shape: type, root: str = "") -> bytes:
        """The JSON `body` without the fields that `shape` does not have and that may be ignored.

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
def _type_of(shape: type) -> inspect.Type:
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
