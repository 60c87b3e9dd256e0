"""`podway explain ID`: the timeline of a request, and what cost it the most time."""

import asyncio
import sys
from typing import Any
from urllib.parse import quote

import orjson
from rich.console import Console
from rich.table import Column, Table

from gateway.commands.http_client import DEFAULT_URL, ServerError, answered, base_url, open_session
from gateway.settings.flags import Parser

NOT_FOUND = "HTTP 404: "  # the message says it in words
BAR_WIDTH = 40  # characters


def parser() -> Parser:
    """The flags of `podway explain`."""
    parser = Parser(
        "podway explain",
        usage="podway explain ID [URL] [flags]",
        description="Show the timeline of a request and say what cost it the most time. "
        "ID is the x-request-id of its response, or its first characters; a server keeps the "
        "last 1000 requests.",
    )
    parser.add_argument("id", metavar="ID", help="the request's id")
    parser.add_argument("url", nargs="?", default=DEFAULT_URL, help=f"default: {DEFAULT_URL}")
    parser.add_argument("--api-key", help="the key that sent it; default: OPENAI_API_KEY")
    return parser


def main(argv: list[str]) -> int:
    """Print the timeline; 1 if the server does not have it."""
    args = parser().parse_args(argv)
    try:
        timeline = asyncio.run(fetch(base_url(args.url), args.id, args.api_key))
    except ServerError as error:
        sys.stderr.write(f"podway explain: {str(error).removeprefix(NOT_FOUND)}\n")
        return 1
    show(timeline, Console())
    return 0


async def fetch(url: str, request_id: str, api_key: str | None) -> dict[str, Any]:
    """The server's timeline object. Raises `ServerError`."""
    path = f"/v1/requests/{quote(request_id, safe='')}/timeline"
    try:
        async with (
            open_session(api_key, timeout=30) as session,
            answered(session, url, path) as response,
        ):
            timeline: dict[str, Any] = orjson.loads(await response.read())
            if "explanation" in timeline and "choices" in timeline:
                return timeline
    except (orjson.JSONDecodeError, TypeError):
        pass  # not JSON, or a number
    raise ServerError(f"{url} did not answer with a timeline; is it a Podway server?")


def show(timeline: dict[str, Any], console: Console) -> None:
    """Print the explanation, then one table of phases for each choice."""
    console.print(timeline["explanation"], markup=False, highlight=False)
    for choice in timeline["choices"]:
        console.print(
            f"\nchoice {choice['index']}: {choice['state']}, "
            f"{choice['prompt_tokens']} prompt tokens ({choice['cached_tokens']} cached), "
            f"{choice['completion_tokens']} output tokens",
            markup=False,
            highlight=False,
        )
        console.print(_phases(choice["spans"]))


def _phases(spans: list[dict[str, Any]]) -> Table:
    numbers = (Column(title, justify="right") for title in ("from s", "for s"))
    table = Table("phase", *numbers, "", header_style="bold", box=None)
    end = max((span["start"] + span["seconds"] for span in spans), default=0.0)
    for span in spans:
        bar = _bar(span["start"], span["seconds"], end)
        table.add_row(span["phase"], f"{span['start']:.3f}", f"{span['seconds']:.3f}", bar)
    return table


def _bar(start: float, seconds: float, end: float) -> str:
    """The phase's place between arrival and end."""
    scale = BAR_WIDTH / end if end else 0.0
    before = min(BAR_WIDTH - 1, round(start * scale))
    width = max(1, min(BAR_WIDTH - before, round(seconds * scale)))
    return "·" * before + "█" * width + "·" * (BAR_WIDTH - before - width)
