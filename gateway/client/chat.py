"""`podway chat`: a conversation in the terminal with any OpenAI-compatible server.

The prompt is read while no event loop runs; an answer is one run of the loop. So Ctrl-C during
an answer cancels that run, which closes the stream, and the conversation goes on.
"""

import argparse
import asyncio
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

from gateway.client.flags import Parser, positive
from gateway.client.wire import (
    DEFAULT_URL,
    DONE,
    Frames,
    ServerSaid,
    base_url,
    error_text,
    first_model,
    open_session,
    refusal,
    unreachable,
)

HELP = """\
/system TEXT  set the system message (without TEXT: remove it)
/reset        forget the conversation
/exit         leave (or Ctrl-D)
Ctrl-C stops the answer."""

Message = dict[str, str]


@dataclass(slots=True)
class Conversation:
    """What was said so far; the system message is kept apart and survives a reset."""

    system: str = ""
    turns: list[Message] = field(default_factory=list)

    @property
    def messages(self) -> list[Message]:
        head = [{"role": "system", "content": self.system}] if self.system else []
        return head + self.turns


@dataclass(frozen=True, slots=True)
class Peer:
    """The server, the model on it, and what goes into every request."""

    url: str
    session: aiohttp.ClientSession
    params: dict[str, Any]

    async def answer(self, messages: list[Message], show: Callable[[str], None]) -> None:
        """Stream one answer to `show`. Leaving early closes the connection."""
        body = {**self.params, "messages": messages, "stream": True}
        frames = Frames()
        try:
            async with self.session.post(f"{self.url}/v1/chat/completions", json=body) as response:
                if response.status != 200:
                    raise ServerSaid(refusal(response.status, await response.read()))
                async for chunk in response.content.iter_any():
                    for data in frames.feed(chunk):
                        if data == DONE:
                            return
                        show(_delta(data))
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ServerSaid(unreachable(self.url, error)) from error


def _delta(data: bytes) -> str:
    """The text that one event adds, without control characters that could move the cursor."""
    try:
        event = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise ServerSaid("the server sent an event that is not JSON") from error
    if "error" in event:
        raise ServerSaid(error_text(event["error"]))
    deltas = (choice.get("delta") or {} for choice in event.get("choices") or ())
    text = "".join(delta.get("content") or "" for delta in deltas)
    return "".join(c for c in text if c.isprintable() or c in "\n\t")


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
    return parser


def main(argv: list[str]) -> int:
    """Talk until the input ends; 1 if the server cannot be reached or, in a pipe, refuses."""
    args = parser().parse_args(argv)
    url = base_url(args.url)
    given = {name: getattr(args, name) for name in ("temperature", "max_tokens", "seed")}
    params = {name: value for name, value in given.items() if value is not None}
    with asyncio.Runner() as runner:
        session = runner.run(_opened(args.api_key))
        try:
            params["model"] = args.model or runner.run(first_model(session, url))
            talk = Conversation(system=args.system)
            return converse(runner, Peer(url, session, params), talk, is_tty=sys.stdin.isatty())
        except ServerSaid as error:
            _say(str(error))
            return 1
        finally:
            runner.run(session.close())


def converse(runner: asyncio.Runner, peer: Peer, talk: Conversation, *, is_tty: bool) -> int:
    """One turn after the other until the input ends."""
    if is_tty:
        sys.stdout.write(f"{peer.params['model']} at {peer.url}; /help, /exit\n")
    for line in _prompted() if is_tty else _piped(sys.stdin):
        if line == "/exit":
            break
        if line.startswith("/"):
            _obey(line, talk)
        elif not _take_turn(runner, peer, talk, line) and not is_tty:
            return 1
    return 0


def _take_turn(runner: asyncio.Runner, peer: Peer, talk: Conversation, line: str) -> bool:
    """Ask and show; False if the server refused. A stopped answer stays as far as it came."""
    talk.turns.append({"role": "user", "content": line})
    said: list[str] = []

    def show(text: str) -> None:
        said.append(text)
        sys.stdout.write(text)
        sys.stdout.flush()

    try:
        runner.run(peer.answer(talk.messages, show))
    except KeyboardInterrupt:
        sys.stdout.write(" [stopped]")
    except ServerSaid as error:
        _say(("\n" if said else "") + str(error))
        talk.turns.pop()
        return False
    sys.stdout.write("\n")
    talk.turns.append({"role": "assistant", "content": "".join(said)})
    return True


def _obey(line: str, talk: Conversation) -> None:
    command, _, rest = line.partition(" ")
    if command == "/system":
        talk.system = rest.strip()
    elif command == "/reset":
        talk.turns.clear()
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
