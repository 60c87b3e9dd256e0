"""`podway chat`: a conversation in the terminal with any OpenAI-compatible server.

The prompt is read while no event loop runs; an answer is one run of the loop. So Ctrl-C during
an answer cancels that run, which closes the stream, and the conversation goes on.
"""

import argparse
import asyncio
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from gateway.commands.chat.streamed_answer import StreamedAnswer
from gateway.commands.flags import Parser, positive
from gateway.commands.http_client import (
    DEFAULT_URL,
    DONE,
    EventDecoder,
    ServerError,
    base_url,
    first_model,
    open_session,
    refusal,
    unreachable,
)

HELP = """\
/system TEXT  set the system message (without TEXT: remove it)
/reset        forget the conversation
/exit         leave (or Ctrl-D)
Ctrl-C stops the answer. After a tool call (→) the next line is its result."""

Message = dict[str, Any]


@dataclass(slots=True)
class ChatSession:
    """What was said so far; the system message is kept apart and survives a reset."""

    system: str = ""
    turns: list[Message] = field(default_factory=list)
    unanswered: list[Message] = field(default_factory=list)  # tool calls whose result is due

    @property
    def messages(self) -> list[Message]:
        head = [{"role": "system", "content": self.system}] if self.system else []
        return head + self.turns

    def say(self, line: str) -> bool:
        """Take the person's next line; False: more tool calls wait for their result."""
        if not self.unanswered:
            self.turns.append({"role": "user", "content": line})
            return True
        call = self.unanswered.pop(0)
        self.turns.append({"role": "tool", "tool_call_id": call["id"], "content": line})
        return not self.unanswered

    def reset(self) -> None:
        """Forget everything but the system message."""
        self.turns.clear()
        self.unanswered.clear()


@dataclass(frozen=True, slots=True)
class Peer:
    """The server, the model on it, and what goes into every request."""

    url: str
    session: aiohttp.ClientSession
    params: dict[str, Any]

    async def answer(self, messages: list[Message], hear: Callable[[bytes], None]) -> None:
        """Stream one answer's events to `hear`. Leaving early closes the connection."""
        body = {**self.params, "messages": messages, "stream": True}
        frames = EventDecoder()
        try:
            async with self.session.post(f"{self.url}/v1/chat/completions", json=body) as response:
                if response.status != 200:
                    raise ServerError(refusal(response.status, await response.read()))
                async for chunk in response.content.iter_any():
                    for data in frames.feed(chunk):
                        if data == DONE:
                            return
                        hear(data)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ServerError(unreachable(self.url, error)) from error


def parser() -> Parser:
    """The flags of `podway chat`."""
    parser = Parser(
        "podway chat",
        description="Talk to an OpenAI-compatible server. Reads turns line by line from a pipe.",
        epilog="In the conversation:\n" + HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("url", nargs="?", default=DEFAULT_URL, help=f"default: {DEFAULT_URL}")
    parser.add_argument("--model", help="default: the first that the server lists")
    parser.add_argument("--api-key", help="default: OPENAI_API_KEY")
    parser.add_argument("--system", default="", help="system message")
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--max-tokens", type=positive)
    parser.add_argument("--seed", type=int)
    parser.add_argument(
        "--tools", metavar="FILE", help="tools to offer: a JSON array as in the API"
    )
    return parser


def main(argv: list[str]) -> int:
    """Talk until the input ends; 1 if the server cannot be reached or, in a pipe, refuses."""
    args = parser().parse_args(argv)
    url = base_url(args.url)
    given = {name: getattr(args, name) for name in ("temperature", "max_tokens", "seed")}
    params = {name: value for name, value in given.items() if value is not None}
    if args.tools is not None:
        try:
            params["tools"] = _read_tools(args.tools)
        except ServerError as error:
            _say(str(error))
            return 1
    with asyncio.Runner() as runner:
        session = runner.run(_opened(args.api_key))
        try:
            params["model"] = args.model or runner.run(first_model(session, url))
            talk = ChatSession(system=args.system)
            return converse(runner, Peer(url, session, params), talk, is_tty=sys.stdin.isatty())
        except ServerError as error:
            _say(str(error))
            return 1
        finally:
            runner.run(session.close())


def _read_tools(path: str) -> list[Any]:
    try:
        tools = orjson.loads(Path(path).read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise ServerError(f"cannot read the tools in {path}: {error}") from error
    if not isinstance(tools, list):
        raise ServerError(f"{path} is not a JSON array of tools")
    return tools


def converse(runner: asyncio.Runner, peer: Peer, talk: ChatSession, *, is_tty: bool) -> int:
    """One turn after the other until the input ends."""
    if is_tty:
        sys.stdout.write(f"{peer.params['model']} at {peer.url}; /help, /exit\n")
    for line in _prompted() if is_tty else _piped(sys.stdin):
        if line == "/exit":
            break
        if line.startswith("/"):
            _obey(line, talk)
        elif talk.say(line) and not _take_turn(runner, peer, talk, is_tty=is_tty) and not is_tty:
            return 1
    return 0


def _take_turn(runner: asyncio.Runner, peer: Peer, talk: ChatSession, *, is_tty: bool) -> bool:
    """Ask and show; False if the server refused. A stopped answer stays as far as it came."""
    answer = StreamedAnswer(is_tty)

    def hear(data: bytes) -> None:
        sys.stdout.write(answer.feed(data))
        sys.stdout.flush()

    try:
        runner.run(peer.answer(talk.messages, hear))
    except KeyboardInterrupt:
        answer.calls.clear()  # they may be half
        sys.stdout.write(answer.finish() + " [stopped]")
    except ServerError as error:
        sys.stdout.write(answer.finish())
        _say(("\n" if answer.has_shown else "") + str(error))
        talk.turns.pop()
        return False
    sys.stdout.write(answer.finish() + "\n")
    talk.turns.append(answer.message)
    talk.unanswered = list(answer.calls)
    return True


def _obey(line: str, talk: ChatSession) -> None:
    command, _, rest = line.partition(" ")
    if command == "/system":
        talk.system = rest.strip()
    elif command == "/reset":
        talk.reset()
    else:
        _say(HELP if command == "/help" else f"unknown command {command}; /help lists them")


def _prompted() -> Iterator[str]:
    """Lines typed at the prompt, empty ones left out; Ctrl-C clears the line, Ctrl-D ends."""
    import readline  # noqa: F401  # line editing and history, only where a person types

    while True:
        try:
            line = input("> ").strip()
        except KeyboardInterrupt:
            sys.stdout.write("\n(/exit or Ctrl-D to leave)\n")
        except EOFError:
            sys.stdout.write("\n")
            return
        else:
            if line:
                yield line


def _piped(stream: Iterable[str]) -> Iterator[str]:
    return (line.strip() for line in stream if line.strip())


async def _opened(api_key: str | None) -> aiohttp.ClientSession:
    """aiohttp wants its session made while the loop runs."""
    return open_session(api_key)


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
