"""`podway top`: the engine's state in the terminal, live or once.

It reads the server-sent events of `GET /admin/live`, as the web page does.
"""

import asyncio
import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import orjson
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from gateway.commands.http_client import (
    DEFAULT_URL,
    EventDecoder,
    ServerError,
    answered,
    base_url,
    open_session,
)
from gateway.settings.flags import Parser

KV_WIDTH = 50  # characters
KV_PARTS = (("held", "█", "green"), ("moving", "▓", "yellow"), ("cached", "▒", "blue"))
MARGIN = 10  # lines of the terminal that are not requests


def parser() -> Parser:
    """The flags of `podway top`."""
    parser = Parser(
        "podway top",
        usage="podway top [URL] [flags]",
        description="Show the engine of a Podway server live: KV cache, queue and requests. "
        "Ctrl-C ends it.",
    )
    parser.add_argument("url", nargs="?", default=DEFAULT_URL, help=f"default: {DEFAULT_URL}")
    parser.add_argument("--api-key", help="an admin key; default: the variable OPENAI_API_KEY")
    parser.add_argument("--once", action="store_true", help="print the state once; as in a pipe")
    return parser


def main(argv: list[str]) -> int:
    """Show states until Ctrl-C or the end of the stream; 1 if the server cannot be read."""
    args = parser().parse_args(argv)
    console = Console()
    try:
        asyncio.run(_watch(base_url(args.url), args.api_key, console, is_once=args.once))
    except ServerError as error:
        sys.stderr.write(f"podway top: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 0
    return 0


async def _watch(url: str, api_key: str | None, console: Console, *, is_once: bool) -> None:
    async with aclosing(states(url, api_key)) as all_states:
        if is_once or not console.is_terminal:
            state = await anext(all_states, None)
            if state is None:
                raise ServerError(f"{url} sent no state; is it a Podway server?")
            console.print(render(state, len(state["requests"])))
            return
        with Live(console=console, screen=True, auto_refresh=False) as live:
            async for state in all_states:
                live.update(render(state, max(1, console.height - MARGIN)), refresh=True)


async def states(url: str, api_key: str | None) -> AsyncGenerator[dict[str, Any], None]:
    """The server's snapshots as they arrive. Raises `ServerError`."""
    decoder = EventDecoder()
    try:
        async with (
            open_session(api_key) as session,
            answered(session, url, "/admin/live") as response,
        ):
            async for chunk in response.content.iter_any():
                for data in decoder.feed(chunk):
                    yield orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise ServerError(f"{url} sent an event that is not JSON") from error


def render(state: dict[str, Any], num_rows: int) -> RenderableType:
    """The state as text; at most `num_rows` requests."""
    counts = state["counts"]
    numbers = ", ".join(f"{count} {name}" for name, count in counts.items())
    lines = [
        Text(
            f"policy {state['policy']}, admission {state['admission']}; worker "
            f"{state['worker_state']}, {state['worker_restarts']} restarts"
        ),
        Text(f"requests: {numbers}; {state['tokens_per_second']:.0f} output tokens/s"),
        *_levels(state["levels"]),
        *(_kv(name, tier) for name, tier in state["kv"].items() if _num_blocks(tier)),
    ]
    return Group(*lines, Text(""), _requests(state, num_rows))


def _levels(sizes: list[int]) -> list[Text]:
    """The queues of a policy that has several, the most urgent first."""
    if not sizes:
        return []
    queues = ", ".join(f"{level}: {size}" for level, size in enumerate(sizes))
    return [Text(f"requests by policy level: {queues}")]


def _num_blocks(tier: dict[str, int]) -> int:
    return sum(tier[part] for part in ("free", "held", "cached", "moving"))


def _kv(name: str, tier: dict[str, int]) -> Text:
    """A bar of the blocks of one tier, and their numbers."""
    total = _num_blocks(tier)
    line = Text(f"KV {name:6} ")
    width = 0
    for part, character, style in KV_PARTS:
        size = -(-tier[part] * KV_WIDTH // total)  # at least one character unless it is 0
        size = min(size, KV_WIDTH - width)
        line.append(character * size, style=style)
        width += size
    line.append("·" * (KV_WIDTH - width))
    numbers = ", ".join(f"{tier[part]} {part}" for part in ("held", "moving", "cached", "free"))
    return line.append(f" {numbers} blocks")


def _requests(state: dict[str, Any], num_rows: int) -> Table:
    """The oldest requests first."""
    titles = ("level", "age s", "prompt", "output", "preempted")
    numbers = (Column(title, justify="right") for title in titles)
    table = Table("request", "state", *numbers, "waits for", header_style="bold", box=None)
    rows = sorted(state["requests"], key=lambda each: -each["age"])
    for each in rows[:num_rows]:
        table.add_row(
            Text(str(each["label"] or each["id"])),
            each["state"],
            "" if each["level"] is None else str(each["level"]),
            f"{each['age']:.1f}",
            str(each["prompt"]),
            str(each["output"]),
            str(each["preemptions"]),
            each["waits_for"],
        )
    hidden = state["num_requests"] - min(len(rows), num_rows)
    if hidden > 0:
        table.add_row(f"… {hidden} more")
    return table
