"""Anthropic's tools, and the functions of a chat request that they become.

Besides tools with a schema there are types that Anthropic defines. Clients run `bash_*` and
`text_editor_*` themselves: the model gets functions with these tools' arguments. Tools that only
Anthropic's servers run are ignored, as OpenAI's are in `/v1/responses`.
"""

from typing import Any

import msgspec

from gateway.schema.decoding import UnknownFields, check_allowed, missing

SERVER_TOOLS = ("web_search_", "web_fetch_", "code_execution_", "tool_search_tool_", "advisor_")
Json = dict[str, Any]


def _text(description: str) -> Json:
    return {"type": "string", "description": description}


BASH: Json = {
    "description": "Runs a command in a bash shell that keeps its state between calls.",
    "parameters": {
        "type": "object",
        "properties": {
            "command": _text("the command to run; not needed to restart"),
            "restart": {"type": "boolean", "description": "true: start the shell again"},
        },
    },
}
TEXT_EDITOR: Json = {
    "description": "Views, creates and edits text files.",
    "parameters": {
        "type": "object",
        "properties": {
            "command": {"type": "string", "enum": ["view", "create", "str_replace", "insert"]},
            "path": _text("the file or directory"),
            "file_text": _text("create: the whole content"),
            "old_str": _text("str_replace: the text to replace, which occurs once"),
            "new_str": _text("str_replace: the text in its place"),
            "insert_line": {"type": "integer", "description": "insert: the line to insert after"},
            "insert_text": _text("insert: the text to insert"),
            "view_range": {
                "type": "array",
                "items": {"type": "integer"},
                "description": "view: the first and the last line; -1 is the end of the file",
            },
        },
        "required": ["command", "path"],
    },
}
CLIENT_TOOLS = {"bash_": BASH, "text_editor_": TEXT_EDITOR}


class AnthropicTool(msgspec.Struct, forbid_unknown_fields=True):
    """A tool that the client runs, or one that is ignored (`without_server_tools`)."""

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    cache_control: Any = None
    strict: bool | None = None
    input_examples: list[Any] | None = None
    eager_input_streaming: bool | None = None
    defer_loading: bool | None = None
    allowed_callers: list[str] | None = None

    def as_chat(self, path: str) -> Json:
        """The same tool in a chat request's form. Raises `InvalidRequest`."""
        kind = self.type or "custom"
        for prefix, function in CLIENT_TOOLS.items():
            if kind.startswith(prefix):
                return {"type": "function", "function": {"name": self.name, **function}}
        check_allowed(kind, f"{path}.type", ("custom", *(f"{each}*" for each in CLIENT_TOOLS)))
        if self.input_schema is None:
            raise missing(f"{path}.input_schema")
        optional = {"description": self.description, "strict": self.strict}
        given = {name: value for name, value in optional.items() if value is not None}
        function = {"name": self.name, "parameters": self.input_schema, **given}
        return {"type": "function", "function": function}


def without_server_tools(
    tools: list[AnthropicTool], unknown: UnknownFields
) -> list[AnthropicTool] | None:
    """The tools that clients run; the others are named as ignored, unless the server rejects what
    it does not know. None if no tool is left."""
    own = [
        tool
        for tool in tools
        if not (tool.type or "").startswith(SERVER_TOOLS)
        or not unknown.ignore(f"tools[].{tool.type}")
    ]
    return own or None
