"""A coding agent in one file: it lists, reads, writes and runs files of one directory.

    python examples/gallery/coding_agent.py DIRECTORY "Make the tests pass" [--url URL]

Run it in a container: the model's commands run as you. Each turn sends the whole conversation; the
server has its prefix, so that only what is new is computed (shown at the end).
"""

import argparse
import json
import subprocess
from pathlib import Path
from typing import Any

from openai import OpenAI

MAX_TURNS = 20
MAX_SHOWN = 8_000  # characters of a file or of a command's output


def tool(name: str, does: str, *fields: str) -> Any:
    properties = {field: {"type": "string"} for field in fields}
    schema: Any = {"type": "object", "properties": properties, "required": fields}
    schema["additionalProperties"] = False
    function = {"name": name, "description": does, "parameters": schema, "strict": True}
    return {"type": "function", "function": function}


TOOLS = [
    tool("list_files", "List all files of the project."),
    tool("read_file", "Read a file.", "path"),
    tool("write_file", "Create or replace a file.", "path", "content"),
    tool("run", "Run a shell command in the project.", "command"),
]


def attempt(root: Path, name: str, arguments: str) -> str:
    """The result of a call, or its error. Paths are inside the directory."""
    try:
        given: dict[str, str] = json.loads(arguments)
        path = (root / given.get("path", "")).resolve()
        if not path.is_relative_to(root):
            return "error: that path is outside of the project"
        if name == "list_files":
            return "\n".join(str(each.relative_to(root)) for each in sorted(root.rglob("*")))
        if name == "read_file":
            return path.read_text()[:MAX_SHOWN]
        if name == "write_file":
            return f"{path.write_text(given['content'])} characters written"
        ended = subprocess.run(
            ["sh", "-c", given["command"]], cwd=root, capture_output=True, text=True, timeout=300
        )
        return f"exit status {ended.returncode}\n{ended.stdout}{ended.stderr}"[:MAX_SHOWN]
    except (OSError, ValueError, KeyError, subprocess.TimeoutExpired) as error:
        return f"error: {error!r}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("task")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    args = parser.parse_args()
    client, root = OpenAI(base_url=f"{args.url}/v1", api_key="any"), args.directory.resolve()
    model = client.models.list().data[0].id
    messages: list[Any] = [{"role": "user", "content": args.task}]
    for turn in range(MAX_TURNS):
        answer = client.chat.completions.create(
            model=model,
            messages=messages,
            tools=TOOLS,
            tool_choice="auto" if turn else "required",  # it has to look first
        )
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        calls = [call for call in message.tool_calls or [] if call.type == "function"]
        for call in calls:
            result = attempt(root, call.function.name, call.function.arguments)
            print(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        if not calls:
            break
    print(message.content)
    if answer.usage and (details := answer.usage.prompt_tokens_details):
        print(f"{details.cached_tokens} of {answer.usage.prompt_tokens} tokens were cached")


if __name__ == "__main__":
    main()
