"""`tools` and `tool_choice`, and the deprecated `functions` and `function_call`.

Both become a `ToolPlan`. Tools that are not functions are rejected with an error that names them.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from engine.errors import InvalidRequest
from gateway.schema.decoding import check_allowed, invalid, missing, quote

MAX_TOOLS = 128
_NAME = re.compile(r"[a-zA-Z0-9_\-.]{1,64}")
_CHOICES = ("none", "auto", "required")


class FunctionDefinition(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A function that the model may call; `parameters` is a JSON schema."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def check(self, path: str) -> None:
        """Raise `InvalidRequest` if the name has other characters, or is too long."""
        if not _NAME.fullmatch(self.name):
            raise invalid(
                f"{path}.name",
                "expected 1 to 64 letters, digits, underscores, dashes and dots, but got "
                f"{quote(self.name)}.",
            )

    def as_tool(self) -> dict[str, Any]:
        """The form that chat templates read, without `strict`."""
        function = msgspec.to_builtins(self)
        function.pop("strict", None)
        return {"type": "function", "function": function}


class Tool(msgspec.Struct, forbid_unknown_fields=True):
    """One of `tools`. Only functions are supported; other types get an error."""

    type: str
    function: FunctionDefinition | None = None
    custom: Any = None


class ToolPlan(NamedTuple):
    """The functions that the model may call, and those that the prompt lists.

    The prompt lists all tools of the request whatever `tool_choice` is, so that prompts with
    different choices begin with the same text. `param` is the request field that lists them.
    `must_call`: the answer must be a call. `max_calls` None: any number.
    """

    offered: Sequence[FunctionDefinition] = ()
    must_call: bool = False
    max_calls: int | None = None
    param: str = "tools"
    listed: Sequence[FunctionDefinition] = ()

    @property
    def is_constrained(self) -> bool:
        """Whether some call's arguments are constrained to the function's schema."""
        return self.must_call or any(function.strict for function in self.offered)

    @property
    def parameters(self) -> dict[str, Mapping[str, Any] | None]:
        """Each function's parameter schema, by its name."""
        return {function.name: function.parameters for function in self.offered}

    def argument_schemas(self) -> dict[str, Mapping[str, Any] | None]:
        """Each function's parameter schema if its calls are constrained to it, else None."""
        return {
            function.name: function.parameters or {} if self.must_call or function.strict else None
            for function in self.offered
        }


NO_TOOLS = ToolPlan()


def plan_tools(tools: Sequence[Tool] | None, choice: Any, *, is_parallel: bool | None) -> ToolPlan:
    """The plan for `tools` and `tool_choice`. Raises `InvalidRequest`."""
    _check_number(tools or (), "tools")
    functions = [_function(tool, f"tools[{i}]") for i, tool in enumerate(tools or ())]
    _check_names(functions, "tools")
    mode, names = _chosen(choice)
    if not functions and (mode == "required" or names is not None):
        raise InvalidRequest(
            "'tool_choice' is only allowed when 'tools' are specified.", "tool_choice"
        )
    offered = functions if names is None else _named(functions, names, "tool_choice")
    if mode == "none":
        return ToolPlan(listed=functions)
    is_one = is_parallel is False or mode == "named"
    max_calls = 1 if is_one else None
    return ToolPlan(offered, mode in ("required", "named"), max_calls, listed=functions)


def plan_functions(functions: Sequence[FunctionDefinition] | None, choice: Any) -> ToolPlan:
    """The plan for the deprecated `functions` and `function_call`, which allow one call."""
    _check_number(functions or (), "functions")
    for i, function in enumerate(functions or ()):
        function.check(f"functions[{i}]")
    offered = list(functions or ())
    _check_names(offered, "functions")
    match choice:
        case None | "auto":
            return ToolPlan(offered, max_calls=1, param="functions", listed=offered)
        case "none":
            return ToolPlan(param="functions", listed=offered)
        case {"name": str(name)} if len(choice) == 1:
            named = _named(offered, [name], "function_call")
            return ToolPlan(named, True, 1, "functions", offered)
    raise invalid("function_call", "expected 'none', 'auto' or an object with a function's name.")


def _function(tool: Tool, path: str) -> FunctionDefinition:
    check_allowed(tool.type, f"{path}.type", ("function",))
    if tool.function is None:
        raise missing(f"{path}.function")
    tool.function.check(f"{path}.function")
    return tool.function


def _check_number(tools: Sequence[object], param: str) -> None:
    if len(tools) > MAX_TOOLS:
        raise invalid(param, f"at most {MAX_TOOLS}, but got {len(tools)}.")


def _check_names(functions: Sequence[FunctionDefinition], param: str) -> None:
    names = [function.name for function in functions]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise invalid(param, f"{quote(twice)} is defined twice.")


def _chosen(choice: Any) -> tuple[str, list[str] | None]:
    """The mode ("named": one call of the one name), and the allowed names (None: all)."""
    match choice:
        case None:
            return "auto", None
        case str():
            check_allowed(choice, "tool_choice", _CHOICES)
            return choice, None
        case {"type": "function", "function": {"name": str(name)}}:
            return "named", [name]
        case {"type": "allowed_tools", "allowed_tools": {"mode": str(mode), "tools": [*tools]}}:
            check_allowed(mode, "tool_choice.allowed_tools.mode", ("auto", "required"))
            if len(tools) > MAX_TOOLS:
                param = "tool_choice.allowed_tools.tools"
                raise invalid(param, f"at most {MAX_TOOLS} tools.")
            return mode, [_allowed(tool, i) for i, tool in enumerate(tools)]
        case {"type": str(kind)}:
            check_allowed(kind, "tool_choice.type", ("function", "allowed_tools"))
    raise InvalidRequest(
        "Invalid 'tool_choice': expected 'none', 'auto', 'required', "
        '{"type": "function", "function": {"name": …}} or '
        '{"type": "allowed_tools", "allowed_tools": {"mode": …, "tools": […]}}.',
        "tool_choice",
    )


def _allowed(tool: Any, i: int) -> str:
    match tool:
        case {"type": "function", "function": {"name": str(name)}}:
            return name
    param = f"tool_choice.allowed_tools.tools[{i}]"
    expected = '{"type": "function", "function": {"name": …}}'
    raise invalid(param, f"expected {expected}.")


def _named(
    functions: Sequence[FunctionDefinition], names: Sequence[str], param: str
) -> list[FunctionDefinition]:
    known = {function.name: function for function in functions}
    for name in names:
        if name not in known:
            raise InvalidRequest(
                f"Invalid value for '{param}': no function named {quote(name)} was specified.",
                param,
            )
    return [known[name] for name in dict.fromkeys(names)]
