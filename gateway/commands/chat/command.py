"""`podway chat`: a chat session in the terminal with any OpenAI-compatible server.

The event loop runs only while an answer streams, not while the user types. So Ctrl-C during an
answer cancels that run of the loop, which closes the stream, and the session continues.

The user's messages: typed or pasted at a terminal, or lines of a pipe.

A terminal in bracketed-paste mode marks pasted text, and GNU readline then keeps its newlines in
the line. Text between two lines of three double quotes is one message on every terminal.

One streamed answer: the text to print, and the message for the conversation's history.

Reasoning is dim on a terminal and omitted in a pipe; a tool call is printed on its own line.
"""

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from gateway.commands.http_client import (
    DEFAULT_URL,
    DONE,
    EventDecoder,
    ServerError,
    answered,
    base_url,
    error_text,
    first_model,
    open_session,
)
from gateway.settings.flags import Parser, did_you_mean, positive

_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"
_CALL = "→ "


@dataclass(slots=True)
class StreamedAnswer:
    """Collects an answer's events; `feed` returns the text to print."""

    is_tty: bool = False
    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    has_output: bool = False
    _is_dim: bool = False

    def feed(self, data: bytes) -> str:
        """The text that one event adds. Raises `ServerError` for an error event."""
        try:
            event = orjson.loads(data)
        except orjson.JSONDecodeError as error:
            raise ServerError("the server sent an event that is not JSON") from error
        if "error" in event:
            raise ServerError(error_text(event["error"]))
        deltas = (choice.get("delta") or {} for choice in event.get("choices") or ())
        text = "".join(map(self._add, deltas))
        self.has_output |= bool(text)
        return text

    def finish(self) -> str:
        """The escape sequence that ends dim text, if any is open."""
        text, self._is_dim = _PLAIN * self._is_dim, False
        return text

    @property
    def message(self) -> dict[str, Any]:
        """The message for the history, without the reasoning."""
        calls = {"tool_calls": self.calls} if self.calls else {}
        return {"role": "assistant", "content": self.content, **calls}

    def _add(self, delta: dict[str, Any]) -> str:
        reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""
        text = delta.get("content") or ""
        self.reasoning += reasoning
        self.content += text
        output = self._dim(printable(reasoning)) if reasoning and self.is_tty else ""
        if text:
            output += self._bright(printable(text))
        for part in delta.get("tool_calls") or ():
            output += self._bright(self._add_call(part))
        return output

    def _dim(self, text: str) -> str:
        output = text if self._is_dim else _DIM + text
        self._is_dim = True
        return output

    def _bright(self, text: str) -> str:
        output = f"{_PLAIN}\n\n{text}" if self._is_dim else text
        self._is_dim = False
        return output

    def _add_call(self, part: dict[str, Any]) -> str:
        function = part.get("function") or {}
        name, arguments = function.get("name") or "", function.get("arguments") or ""
        output = printable(arguments)
        if part.get("index", len(self.calls)) >= len(self.calls):
            called = {"name": name, "arguments": ""}
            self.calls.append({"id": part.get("id") or "", "type": "function", "function": called})
            newline = "\n" if self.has_output or self.content or len(self.calls) > 1 else ""
            output = f"{newline}{_CALL}{printable(name)} {output}"
        self.calls[-1]["function"]["arguments"] += arguments
        return output


def printable(text: str) -> str:
    """The text without control characters, which could move the cursor."""
    return "".join(c for c in text if c.isprintable() or c in "\n\t")


QUOTES = '"""'
MAX_HISTORY = 1000  # messages in the history file


def typed_messages() -> Iterator[str]:
    """Messages typed at the prompt. Ctrl-C clears the line, Ctrl-D ends the session."""
    with line_editing():
        while True:
            try:
                text = quoted(input("> "), lambda: input("… "))
            except KeyboardInterrupt:
                sys.stdout.write("\n(/exit or Ctrl-D to leave)\n")
            except EOFError:
                sys.stdout.write("\n")
                return
            else:
                if text:
                    yield text


def piped_messages(stream: Iterable[str]) -> Iterator[str]:
    """The lines of a pipe that are not empty; quoted lines are one message."""
    lines = iter(stream)
    for line in lines:
        if text := quoted(line, lambda: next(lines, QUOTES)):
            yield text


def quoted(line: str, next_line: Callable[[], str]) -> str:
    """The message that begins with `line`, stripped; reads on if the line is three quotes."""
    if line.strip() != QUOTES:
        return line.strip()
    lines = []
    while (line := next_line().rstrip("\n")).strip() != QUOTES:
        lines.append(line)
    return "\n".join(lines).strip()


@contextmanager
def line_editing() -> Iterator[None]:
    """Line editing, multi-line paste, and a history that is kept between sessions."""
    import readline  # changes how input() behaves, so it is imported only for a terminal

    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # inherited, from nohup for instance
        signal.signal(signal.SIGINT, signal.default_int_handler)
    readline.parse_and_bind("set enable-bracketed-paste on")
    path = history_file()
    with suppress(OSError):  # there is no history yet, or it cannot be read
        readline.read_history_file(path)
    readline.set_history_length(MAX_HISTORY)
    try:
        yield
    finally:
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            readline.write_history_file(path)
            path.chmod(0o600)  # messages are private
        except OSError as error:
            sys.stderr.write(f"cannot save the history to {path}: {error.strerror}\n")


def history_file() -> Path:
    """`podway/chat_history` in the user's state directory."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "podway" / "chat_history"


HELP = """\
/system TEXT  set the system message (without TEXT: remove it)
/reset        forget the conversation
/exit         leave (or Ctrl-D)
Text pasted with several lines is one message; so is text between two lines of \"\"\".
Ctrl-C stops an answer. After a tool call (→) the next message is its result."""
COMMANDS = ("/system", "/reset", "/exit", "/help")

Message = dict[str, Any]


@dataclass(slots=True)
class Conversation:
    """The messages so far. The system message is kept separately and survives a reset."""

    system: str = ""
    history: list[Message] = field(default_factory=list)
    pending_calls: list[Message] = field(default_factory=list)  # tool calls without a result

    @property
    def messages(self) -> list[Message]:
        head = [{"role": "system", "content": self.system}] if self.system else []
        return head + self.history

    def add(self, text: str) -> bool:
        """Add the user's next message; False if more tool calls need a result first."""
        if not self.pending_calls:
            self.history.append({"role": "user", "content": text})
            return True
        call = self.pending_calls.pop(0)
        self.history.append({"role": "tool", "tool_call_id": call["id"], "content": text})
        return not self.pending_calls

    def reset(self) -> None:
        """Forget everything except the system message."""
        self.history.clear()
        self.pending_calls.clear()


@dataclass(frozen=True, slots=True)
class ChatServer:
    """A server, and the fields that every request to it has."""

    url: str
    session: aiohttp.ClientSession
    params: dict[str, Any]

    async def answer(self, messages: list[Message], on_event: Callable[[bytes], None]) -> None:
        """Stream one answer's events to `on_event`. Cancelling this closes the connection."""
        body = {**self.params, "messages": messages, "stream": True}
        decoder = EventDecoder()
        async with answered(self.session, self.url, "/v1/chat/completions", body) as response:
            async for chunk in response.content.iter_any():
                for data in decoder.feed(chunk):
                    if data == DONE:
                        return
                    on_event(data)


def parser() -> Parser:
    """The flags of `podway chat`."""
    parser = Parser(
        "podway chat",
        description="Chat with an OpenAI-compatible server. From a pipe, each line is a message.",
        epilog="In the conversation:\n" + HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("url", nargs="?", default=DEFAULT_URL, help=f"default: {DEFAULT_URL}")
    parser.add_argument("--model", help="model name; default: the first that the server lists")
    parser.add_argument("--api-key", help="API key; default: the variable OPENAI_API_KEY")
    parser.add_argument("--system", default="", help="system message")
    parser.add_argument("--temperature", type=float, help="sampling temperature")
    parser.add_argument("--max-tokens", type=positive, help="maximum tokens of an answer")
    parser.add_argument("--seed", type=int, help="sampling seed")
    parser.add_argument(
        "--tools", metavar="FILE", help="tools to offer: a JSON array as in the API"
    )
    return parser


def main(argv: list[str]) -> int:
    """Chat until the input ends; 1 if the server cannot be reached or, in a pipe, an error."""
    args = parser().parse_args(argv)
    url = base_url(args.url)
    flags = {name: getattr(args, name) for name in ("temperature", "max_tokens", "seed")}
    params = {name: value for name, value in flags.items() if value is not None}
    try:
        if args.tools is not None:
            params["tools"] = _read_tools(args.tools)
        with asyncio.Runner() as runner:
            session = runner.run(_opened(args.api_key))
            try:
                params["model"] = args.model or runner.run(first_model(session, url))
                server = ChatServer(url, session, params)
                talk = Conversation(system=args.system)
                return converse(runner, server, talk, is_tty=sys.stdin.isatty())
            finally:
                runner.run(session.close())
    except ServerError as error:
        _print_error(str(error))
        return 1


def _read_tools(path: str) -> list[Any]:
    try:
        tools = orjson.loads(Path(path).read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise ServerError(f"--tools: cannot read {path}: {error}") from error
    if not isinstance(tools, list):
        raise ServerError(f"--tools: {path} must contain a JSON array of tools")
    return tools


def converse(
    runner: asyncio.Runner, server: ChatServer, talk: Conversation, *, is_tty: bool
) -> int:
    """Answer one message after the other until the input ends; returns the exit code."""
    if is_tty:
        sys.stdout.write(f"{server.params['model']} at {server.url}; /help, /exit\n")
    for text in typed_messages() if is_tty else piped_messages(sys.stdin):
        if text == "/exit":
            break
        if text.startswith("/") and "\n" not in text:
            _run_command(text, talk)
        elif talk.add(text) and not _answer(runner, server, talk, is_tty=is_tty) and not is_tty:
            return 1
    return 0


def _answer(
    runner: asyncio.Runner, server: ChatServer, talk: Conversation, *, is_tty: bool
) -> bool:
    """Request and print an answer; False after an error. A stopped answer keeps its text."""
    answer = StreamedAnswer(is_tty)

    def on_event(data: bytes) -> None:
        sys.stdout.write(answer.feed(data))
        sys.stdout.flush()

    try:
        runner.run(server.answer(talk.messages, on_event))
    except KeyboardInterrupt:
        answer.calls.clear()  # their arguments may be incomplete
        sys.stdout.write(answer.finish() + " [stopped]")
    except ServerError as error:
        sys.stdout.write(answer.finish())
        _print_error(("\n" if answer.has_output else "") + str(error))
        talk.history.pop()
        return False
    sys.stdout.write(answer.finish() + "\n")
    talk.history.append(answer.message)
    talk.pending_calls = list(answer.calls)
    return True


def _run_command(line: str, talk: Conversation) -> None:
    command, _, rest = line.partition(" ")
    if command == "/system":
        talk.system = rest.strip()
    elif command == "/reset":
        talk.reset()
    elif command == "/help":
        _print_error(HELP)
    else:
        nearest = did_you_mean(command, COMMANDS)
        _print_error(f"unknown command {command}{nearest or '; /help lists them'}")


async def _opened(api_key: str | None) -> aiohttp.ClientSession:
    """aiohttp requires a running loop where a session is created."""
    return open_session(api_key)


def _print_error(line: str) -> None:
    sys.stderr.write(line + "\n")
