"""The tools `shell` and `apply_patch`: the client runs them, the model calls them as functions.

A call of the function becomes an item of the tool's own type, and such items and their outputs
become calls and results of the function again.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import orjson

from gateway.schema.decoding import check_allowed, invalid, missing

Item = dict[str, Any]


class ClientTool(NamedTuple):
    """A tool by its type, which is also the name of its function. `field` has the arguments of a
    call's item."""

    description: str
    parameters: Mapping[str, Any]
    field: str
    prefix: str  # begins the ids of its calls


CLIENT_TOOLS = {
    "shell": ClientTool(
        "Run commands in a shell, one after the other, and get their output.",
        {
            "type": "object",
            "properties": {
                "commands": {"type": "array", "items": {"type": "string"}, "minItems": 1},
                "timeout_ms": {"type": "integer"},
                "max_output_length": {"type": "integer"},
            },
            "required": ["commands"],
            "additionalProperties": False,
        },
        "action",
        "sh_",
    ),
    "apply_patch": ClientTool(
        "Create, update or delete a file. The diff has lines that begin with '+', '-' or ' ', in "
        "sections that begin with '@@'.",
        {
            "type": "object",
            "properties": {
                "type": {"enum": ["create_file", "update_file", "delete_file"]},
                "path": {"type": "string"},
                "diff": {"type": "string"},
            },
            "required": ["type", "path"],
            "additionalProperties": False,
        },
        "operation",
        "apc_",
    ),
}
CALLS = {f"{name}_call": name for name in CLIENT_TOOLS}  # types of items
OUTPUTS = {f"{name}_call_output": name for name in CLIENT_TOOLS}


def check_environment(environment: object) -> None:
    """Raise `InvalidRequest` for a shell that the server would have to provide."""
    kind = environment.get("type") if isinstance(environment, Mapping) else environment
    if kind is not None:
        check_allowed(str(kind), "environment.type", ("local",))


def client_call(kind: str, new_id: Callable[[str], str], call_id: str) -> Item:
    """The item of a call whose arguments are not known yet."""
    identity = {"type": f"{kind}_call", "id": new_id(CLIENT_TOOLS[kind].prefix), "call_id": call_id}
    place = {"environment": {"type": "local"}} if kind == "shell" else {}
    return {**identity, **call_fields(kind, ""), **place, "status": "in_progress"}


def call_fields(kind: str, arguments: str) -> Item:
    """The action or operation of a call's item; `arguments` may be cut off or no JSON."""
    try:
        given = msgspec.json.decode(arguments or "{}")
    except msgspec.DecodeError:
        given = None
    given = given if isinstance(given, dict) else {}
    if kind == "shell":
        commands = given.get("commands", [])
        commands = commands if isinstance(commands, list) else [commands]
        limits = {name: given.get(name) for name in ("timeout_ms", "max_output_length")}
        return {"action": {"commands": list(map(str, commands)), **limits}}
    operation = {"type": given.get("type", "update_file"), "path": str(given.get("path", ""))}
    if operation["type"] != "delete_file":
        operation["diff"] = str(given.get("diff", ""))
    return {"operation": operation}


def call_arguments(item: Mapping[str, Any]) -> str:
    """The arguments of the function for the item of a call."""
    given = item[CLIENT_TOOLS[CALLS[item["type"]]].field]
    return orjson.dumps({k: v for k, v in given.items() if v is not None}).decode()


def output_text(item: Mapping[str, Any]) -> str:
    """The result of the function for the item of an output."""
    output = item["output"]
    if item["type"] == "apply_patch_call_output":
        return f"{item['status']}\n{output}".strip()
    return orjson.dumps(output).decode()


def checked_call(kind: str, given: object, path: str) -> Item:
    """The action or operation of a call's item. Raises `InvalidRequest`."""
    field = CLIENT_TOOLS[kind].field
    if not isinstance(given, dict):
        raise missing(f"{path}.{field}")
    needed = "commands" if kind == "shell" else "path"
    if needed not in given:
        raise missing(f"{path}.{field}.{needed}")
    return {field: given}


def checked_output(kind: str, output: object, path: str) -> str | Sequence[Any]:
    """The output of a call: text of `apply_patch`, the list of results of `shell`.

    Raises `InvalidRequest`.
    """
    if kind == "apply_patch" and (output is None or isinstance(output, str)):
        return output or ""
    if kind == "shell" and isinstance(output, list):
        return output
    expected = "an array" if kind == "shell" else "a string"
    raise invalid(f"{path}.output", f"expected {expected}.")
