"""`tools` of the Responses API as functions of a chat request.

Functions are served as they are. Those of a `namespace` (tools of one MCP server, say) get its
name as a prefix, and a `custom` tool becomes a function with the one argument `input`, which is
constrained to the tool's grammar if it has one; calls are rendered back in the tool's own form.
`shell` and `apply_patch` become functions of these names (`client_tools`). Tools that a server
would run are ignored: there are none.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from engine.errors import InvalidRequest
from gateway.schema.decoding import UnknownFields, check_allowed, decode, missing
from gateway.schema.responses.client_tools import CLIENT_TOOLS, check_environment
from gateway.schema.responses.tool_format import input_pattern

SUPPORTED = ("function", "custom", "namespace", *CLIENT_TOOLS)
SERVER_TOOLS = (
    "web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11",
    "file_search", "code_interpreter", "image_generation", "computer", "computer_use_preview",
    "mcp", "local_shell", "tool_search",
)  # fmt: skip
INPUT = "input"  # the argument of a custom tool's function
_SEPARATOR = "__"


class ResponseTool(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """One of `tools`, of any supported type."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: dict[str, Any] | None = None
    tools: "list[ResponseTool] | None" = None
    defer_loading: bool | None = None
    allowed_callers: list[str] | None = None
    output_schema: dict[str, Any] | None = None
    environment: Any = None

    def as_response(self) -> dict[str, Any]:
        """The tool as the response object repeats it."""
        if self.type != "function":
            fields: dict[str, Any] = msgspec.to_builtins(self)
            return fields
        return {
            "type": self.type,
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
            "strict": bool(self.strict),
        }


class CalledTool(NamedTuple):
    """The tool that a function of the chat request stands for."""

    name: str
    namespace: str | None = None
    is_custom: bool = False
    client_type: str = ""  # the type of a tool in `CLIENT_TOOLS`


class ToolSet(NamedTuple):
    """The tools of one request: as given, as functions of a chat, and what those stand for."""

    given: Sequence[ResponseTool] = ()
    functions: Sequence[dict[str, Any]] = ()
    by_function: Mapping[str, CalledTool] = {}  # not written to


def function_name(name: str, namespace: str | None) -> str:
    """The function's name in the chat request."""
    if not namespace:
        return name
    return namespace.removesuffix(_SEPARATOR) + _SEPARATOR + name


def custom_input(arguments: str) -> str:
    """The input of a custom tool in the arguments of its function; these may be cut off."""
    try:
        parsed = msgspec.json.decode(arguments or "{}")
    except msgspec.DecodeError:
        return arguments
    given = parsed.get(INPUT) if isinstance(parsed, dict) else None
    return given if isinstance(given, str) else arguments


def read_tools(raw_tools: Sequence[msgspec.Raw], unknown: UnknownFields) -> ToolSet:
    """Decode the tools; those that a server would run are ignored, or rejected by a strict server.

    Raises `InvalidRequest` for a tool of another type, or without what its type needs.
    """
    given = [
        tool
        for i, raw in enumerate(raw_tools)
        if (tool := _decoded(raw, f"tools[{i}]", unknown)) is not None
    ]
    functions: list[dict[str, Any]] = []
    called: dict[str, CalledTool] = {}
    for tool, namespace in _flattened(given):
        client_type = tool.type if tool.type in CLIENT_TOOLS else ""
        own_name = client_type or tool.name
        assert own_name is not None, "checked by _decoded"
        name = function_name(own_name, namespace)
        called[name] = CalledTool(own_name, namespace, tool.type == "custom", client_type)
        functions.append({"type": "function", "function": {"name": name, **_function(tool)}})
    return ToolSet(given, functions, called)


def _flattened(tools: Sequence[ResponseTool]) -> Iterator[tuple[ResponseTool, str | None]]:
    for tool in tools:
        if tool.type == "namespace":
            yield from ((inner, tool.name) for inner in tool.tools or ())
        else:
            yield tool, None


def _function(tool: ResponseTool) -> dict[str, Any]:
    if tool.type == "custom":
        return _custom_function(tool)
    if (client := CLIENT_TOOLS.get(tool.type)) is not None:
        return {"description": client.description, "parameters": dict(client.parameters)}
    fields = {
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": tool.strict,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _custom_function(tool: ResponseTool) -> dict[str, Any]:
    """Strict if the tool has a grammar: then calls are constrained to it."""
    pattern = input_pattern(tool.format)
    given: dict[str, Any] = {"type": "string"}
    if pattern is not None:
        given["pattern"] = f"^(?:{pattern})$"
    parameters = {
        "type": "object",
        "properties": {INPUT: given},
        "required": [INPUT],
        "additionalProperties": False,
    }
    function = {"description": _custom_description(tool), "parameters": parameters}
    return function if pattern is None else function | {"strict": True}


def _custom_description(tool: ResponseTool) -> str:
    """The description, with the grammar of the input if the tool has one."""
    description, form = tool.description or "", tool.format or {}
    if form.get("type") != "grammar":
        return description
    grammar = f"The input must match this {form.get('syntax')} grammar:\n{form.get('definition')}"
    return f"{description}\n\n{grammar}".strip()


def _decoded(raw: msgspec.Raw, path: str, unknown: UnknownFields) -> ResponseTool | None:
    """A tool whose type is checked before its other fields; None if it is ignored."""
    try:
        kind = str(decode(dict[str, Any], bytes(raw)).get("type"))
        if kind in SERVER_TOOLS and unknown.ignore(f"tools[].{kind}"):
            return None
        check_allowed(kind, "type", SUPPORTED)
        tool = decode(ResponseTool, bytes(raw), unknown, "tools[]")
        _check(tool)
    except InvalidRequest as error:
        raise _within(path, error) from None
    return tool


def _within(path: str, error: InvalidRequest) -> InvalidRequest:
    """The error of a part of the request, with the path of its field in the whole request."""
    param = f"{path}.{error.param}" if error.param else path
    return InvalidRequest(str(error).replace(f"'{error.param}'", f"'{param}'"), param)


def _check(tool: ResponseTool) -> None:
    if tool.type in CLIENT_TOOLS:
        check_environment(tool.environment)
        return
    if tool.name is None:
        raise missing("name")
    if tool.type == "custom":
        input_pattern(tool.format)
    if tool.type != "namespace":
        return
    for i, inner in enumerate(tool.tools or ()):
        check_allowed(inner.type, f"tools[{i}].type", ("function", "custom"))
        try:
            _check(inner)
        except InvalidRequest as error:
            raise _within(f"tools[{i}]", error) from None
