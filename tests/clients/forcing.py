"""A proxy that makes the model call one tool: agents send no `tool_choice`.

The first request that lists the tool is changed: its `tool_choice` names the tool, and the tool's
parameters have one value each. So the server's grammar forces the call on a model that is too small
for the agent's prompt. Later requests of the conversation are answered in text.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

READ_BYTES = 1 << 16


@dataclass(slots=True)
class Forcing:
    """The call to force, and what was done. `results`: bodies that came after the call."""

    tool: str
    arguments: dict[str, str]
    url: str = ""
    num_forced: int = 0
    results: list[str] = field(default_factory=list)

    def change(self, path: str, body: Any) -> None:
        """Change the body of a request that lists the tool."""
        named = [tool for tool in body.get("tools", ()) if self.tool in _names(tool)]
        if not named:
            return
        is_first = not self.num_forced
        if not is_first:
            self.results.append(json.dumps(body))
        if "/messages" in path:
            choice: Any = {"type": "tool", "name": self.tool} if is_first else {"type": "none"}
        elif "/responses" in path:
            choice = {"type": "function", "name": self.tool} if is_first else "none"
        else:
            function = {"type": "function", "function": {"name": self.tool}}
            choice = function if is_first else "none"
        body["tool_choice"] = choice
        self.num_forced += is_first
        for tool in named:
            function = tool.get("function", tool)
            key = "input_schema" if "input_schema" in function else "parameters"
            function[key] = self._schema()
            function["strict"] = True

    def _schema(self) -> dict[str, Any]:
        return {
            "type": "object",
            "properties": {name: {"const": value} for name, value in self.arguments.items()},
            "required": list(self.arguments),
            "additionalProperties": False,
        }


def _names(tool: Any) -> tuple[Any, ...]:
    return tool.get("name"), tool.get("function", {}).get("name")


@contextmanager
def forcing(server: str, call: str) -> Iterator[Forcing]:
    """The proxy before a server, for a call in the Hermes dialect; it listens at `url`."""
    made = json.loads(call.removeprefix("<tool_call>").removesuffix("</tool_call>"))
    found = Forcing(made["name"], made["arguments"])
    handler = type("Handler", (_Handler,), {"found": found, "server_address": urlsplit(server)})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as proxy:
        found.url = f"http://127.0.0.1:{proxy.server_port}"
        thread = threading.Thread(target=proxy.serve_forever, name="proxy")
        thread.start()
        try:
            yield found
        finally:
            proxy.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    """Forwards requests; a response ends with its connection."""

    found: Forcing
    server_address: Any

    def do_GET(self) -> None:
        self._forward(b"")

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers["content-length"]))
        body = json.loads(data)
        self.found.change(self.path, body)
        self._forward(json.dumps(body).encode())

    def _forward(self, body: bytes) -> None:
        dropped = ("host", "content-length", "connection", "accept-encoding")
        headers = {k: v for k, v in self.headers.items() if k.lower() not in dropped}
        upstream = HTTPConnection(self.server_address.netloc)
        upstream.request(self.command, self.path, body or None, headers)
        response = upstream.getresponse()
        self.send_response(response.status)
        for name in ("content-type", "retry-after"):
            if name in response.headers:
                self.send_header(name, response.headers[name])
        self.send_header("connection", "close")
        self.end_headers()
        while piece := response.read1(READ_BYTES):
            self.wfile.write(piece)
            self.wfile.flush()
        upstream.close()

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""
