"""`podway top`: the state of each model's engine in the terminal, live or once.

It reads the server-sent events of `GET /admin/live`, as the web page does.
"""

import asyncio
import sys
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

import aiohttp
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
TABLE_MARGIN = 4  # lines around the requests: an empty one, the titles, how many more, the cursor
RETRY_SECONDS = 1.0  # until a model that is not loaded is asked for again
State = dict[str, Any]  # a snapshot of one model's engine


def parser() -> Parser:
    """The flags of `podway top`."""
    parser = Parser(
        "podway top",
        usage="podway top [URL] [flags]",
        description="Show the models of a Podway server live: KV caches, queues and requests. "
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
    async with open_session(api_key) as session:
        names = await _names(session, url)
        if is_once or not console.is_terminal:
            states = {name: await _first(session, url, name) for name in names}
            console.print(render(states))
            return
        with Live(console=console, screen=True, auto_refresh=False) as live:
            states = dict.fromkeys(names)

            def show(name: str, state: State | None) -> None:
                states[name] = state
                live.update(render(states, console.height), refresh=True)

            await asyncio.gather(*(_follow(session, url, name, show) for name in names))


async def _names(session: aiohttp.ClientSession, url: str) -> list[str]:
    """The models of the server without their aliases and adapters. Raises `ServerError`."""
    try:
        async with answered(session, url, "/v1/models") as response:
            models = orjson.loads(await response.read())["data"]
            return list(dict.fromkeys(each["root"] for each in models if each["parent"] is None))
    except (orjson.JSONDecodeError, LookupError, TypeError) as error:
        raise ServerError(f"{url}/v1/models is no list; is it a Podway server?") from error


async def _first(session: aiohttp.ClientSession, url: str, name: str) -> State | None:
    async with aclosing(states_of(session, url, name)) as states:
        return await anext(states, None)


async def _follow(
    session: aiohttp.ClientSession, url: str, name: str, show: Callable[[str, State | None], None]
) -> None:
    """Show the states of a model each time that it is loaded. Raises `ServerError`."""
    while True:
        async with aclosing(states_of(session, url, name)) as states:
            async for state in states:
                show(name, state)
        show(name, None)
        await asyncio.sleep(RETRY_SECONDS)


async def states_of(
    session: aiohttp.ClientSession, url: str, name: str
) -> AsyncGenerator[State, None]:
    """A model's snapshots as they arrive, until it is unloaded; none if it is not loaded. Raises
    `ServerError`."""
    decoder = EventDecoder()
    try:
        async with answered(session, url, f"/admin/live?model={quote(name, safe='')}") as response:
            async for chunk in response.content.iter_any():
                for data in decoder.feed(chunk):
                    yield orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise ServerError(f"{url} sent an event that is not JSON") from error
    except ServerError as error:
        if error.status != HTTPStatus.SERVICE_UNAVAILABLE:
            raise


def render(states: Mapping[str, State | None], height: int | None = None) -> RenderableType:
    """The states of models, by their names, as text, and their requests; at most `height` lines."""
    loaded = {name: state for name, state in states.items() if state is not None}
    lines = [line for name, state in loaded.items() for line in _summary(name, state)]
    if missing := ", ".join(name for name in states if name not in loaded):
        lines.append(Text(f"not loaded: {missing}"))
    num_rows = sys.maxsize if height is None else max(1, height - len(lines) - TABLE_MARGIN)
    return Group(*lines, Text(""), _requests(loaded, num_rows, names_models=len(states) > 1))


def _summary(name: str, state: State) -> list[Text]:
    numbers = ", ".join(f"{count} {name}" for name, count in state["counts"].items())
    return [
        Text(
            f"{name}: policy {state['policy']}, admission {state['admission']}; worker "
            f"{state['worker_state']}, {state['worker_restarts']} restarts"
        ),
        Text(f"requests: {numbers}; {state['tokens_per_second']:.0f} output tokens/s"),
        *_levels(state["levels"]),
        *(_kv(name, tier) for name, tier in state["kv"].items() if _num_blocks(tier)),
    ]


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


def _requests(states: Mapping[str, State], num_rows: int, *, names_models: bool) -> Table:
    """The oldest requests first."""
    titles = ("level", "age s", "prompt", "output", "preempted")
    numbers = (Column(title, justify="right") for title in titles)
    models = ("model",) if names_models else ()
    table = Table(*models, "request", "state", *numbers, "waits for", header_style="bold", box=None)
    all_rows = ((name, each) for name, state in states.items() for each in state["requests"])
    rows = sorted(all_rows, key=lambda row: -row[1]["age"])[:num_rows]
    for name, each in rows:
        table.add_row(
            *((Text(name),) if names_models else ()),
            Text(str(each["label"] or each["id"])),
            each["state"],
            "" if each["level"] is None else str(each["level"]),
            f"{each['age']:.1f}",
            str(each["prompt"]),
            str(each["output"]),
            str(each["preemptions"]),
            each["waits_for"],
        )
    hidden = sum(state["num_requests"] for state in states.values()) - len(rows)
    if hidden > 0:
        table.add_row(f"… {hidden} more")
    return table
