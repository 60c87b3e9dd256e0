"""`podway bench`: load for any OpenAI-compatible server, and a table, JSON and a plot of it.

Reads the flags, builds the workload, runs it on uvloop, hands the outcomes to `report`.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import uvloop
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from gateway.commands.bench.load import Outcome, Target, closed_loop, open_loop, send
from gateway.commands.bench.report import Report, read_report, show, summarise
from gateway.commands.bench.workload import (
    RandomPrompts,
    Shot,
    Span,
    at_once,
    at_random,
    read_trace,
)
from gateway.commands.flags import Parser, ShowDefaults, above_zero, json_object, natural, positive
from gateway.commands.http_client import (
    DEFAULT_URL,
    ServerError,
    base_url,
    first_model,
    open_session,
)
from gateway.commands.offline_bench.command import main as offline

_DEFAULT_REQUESTS = 100
_WARMUP_TOKENS = 8


def parser() -> Parser:
    """The flags of `podway bench`."""
    parser = Parser(
        "podway bench",
        description="Drive an OpenAI-compatible server and report its latencies and throughput.",
        usage="podway bench [URL] [flags]",
        epilog="podway bench --offline SHAPE runs a worker alone, on random weights, without a "
        "server; podway bench --offline --help says more.",
        formatter_class=ShowDefaults,
    )
    parser.add_argument("url", nargs="?", default=DEFAULT_URL, help="the server")
    parser.add_argument("--model", help="by default the first that the server lists")
    parser.add_argument("--api-key", help="by default OPENAI_API_KEY")
    _add_load(parser)
    _add_requests(parser)
    _add_results(parser)
    return parser


def _add_load(parser: Parser) -> None:
    group = parser.add_argument_group("load")
    which = group.add_mutually_exclusive_group()
    which.add_argument(
        "-c",
        "--concurrency",
        type=positive,
        default=1,
        metavar="N",
        help="closed loop: keep so many requests in flight",
    )
    which.add_argument(
        "--rate", type=above_zero, metavar="R", help="open loop: Poisson arrivals, R a second"
    )
    which.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="open loop: CSV arrival_s,prompt_tokens,output_tokens or Mooncake JSONL, plain or .gz",
    )
    group.add_argument(
        "--time-scale",
        type=above_zero,
        default=1.0,
        metavar="X",
        help="play the trace X times as fast",
    )


def _add_requests(parser: Parser) -> None:
    add = parser.add_argument_group("requests").add_argument
    add("-n", "--requests", type=positive, metavar="N", help="how many, or how much of the trace")
    add("--prompt-tokens", type=_span, default="128", metavar="A..B", help="length or range")
    add("--output-tokens", type=_span, default="64", metavar="A..B", help="length or range")
    add("--chat", action="store_true", help="chat completions; their prompts are text")
    add("--text", action="store_true", help="prompts of words instead of token ids")
    add("--ids", type=_span, default="300..1000", metavar="A..B", help="token ids of prompts")
    add("--temperature", type=float, default=0.0, metavar="T", help="of sampling")
    add("--respect-eos", action="store_true", help="do not ask for ignore_eos")
    add("--extra", type=json_object, default={}, metavar="JSON", help="put into every request")
    add("--warmup", type=natural, default=1, metavar="N", help="requests before the clock starts")
    add("--seed", type=int, default=0, metavar="N", help="of lengths, arrivals and prompts")
    add("--timeout", type=above_zero, default=600.0, metavar="SECONDS", help="of one request")
    add("--new-connections", action="store_true", help="a connection for every request")


def _span(text: str) -> Span:
    try:
        return Span.parse(text)
    except ValueError:
        message = f"{text!r} is not a length such as 128, nor a range such as 32..512"
        raise argparse.ArgumentTypeError(message) from None


def _add_results(parser: Parser) -> None:
    add = parser.add_argument_group("results").add_argument
    add("--label", default="run", help="name of the run in tables and plots")
    add("--json", type=Path, metavar="FILE", help="write the figures")
    add("--plot", type=Path, metavar="FILE", help="write a PNG")
    add(
        "--compare",
        type=Path,
        nargs="+",
        metavar="JSON",
        help="send nothing: table and plot of runs that --json wrote",
    )


def main(argv: list[str]) -> int:
    """Run or compare, and show; 1 if not one request succeeded or nothing could be sent."""
    if any(word.partition("=")[0] == "--offline" for word in argv):
        return offline(argv)
    args = parser().parse_args(argv)
    try:
        if args.compare:
            reports = [read_report(path) for path in args.compare]
        else:
            reports = [uvloop.run(measure(args))]
    except ServerError as error:
        sys.stderr.write(f"podway bench: {error}\n")
        return 1
    show(reports, Console())
    if args.json and not args.compare:
        reports[0].write(args.json)
    if args.plot:
        from gateway.commands.bench.plot import draw  # matplotlib takes a second to load

        draw(reports, args.plot)
    return 0 if any(report.num_ok for report in reports) else 1


async def measure(args: argparse.Namespace) -> Report:
    """One load run against the server."""
    url = base_url(args.url)
    shots = _shots(args)
    async with open_session(
        args.api_key, timeout=args.timeout, reuse_connections=not args.new_connections
    ) as session:
        model = args.model or await first_model(session, url)
        target = _target(args, url, session, model)
        await _warm_up(target, args)
        outcomes: list[Outcome] = []
        late = 0.0
        with _progress(len(shots)) as tick:

            def done(seen: Outcome) -> None:
                outcomes.append(seen)
                tick()

            if args.rate or args.trace:
                late = await open_loop(target, shots, done)
            else:
                await closed_loop(target, shots, args.concurrency, done)
    return summarise(outcomes, _setup(args, url, model), args.label, late)


def _shots(args: argparse.Namespace) -> list[Shot]:
    if args.trace:
        return read_trace(args.trace, args.time_scale, args.requests)
    lengths = args.prompt_tokens, args.output_tokens, args.seed
    if args.rate:
        return at_random(args.requests or _DEFAULT_REQUESTS, args.rate, *lengths)
    return at_once(args.requests or max(_DEFAULT_REQUESTS, 4 * args.concurrency), *lengths)


def _target(
    args: argparse.Namespace, url: str, session: aiohttp.ClientSession, model: str
) -> Target:
    params: dict[str, Any] = {"model": model, "temperature": args.temperature}
    if not args.respect_eos:
        params["ignore_eos"] = True
    prompts = RandomPrompts(args.seed, None if args.text or args.chat else args.ids)
    return Target(url, session, prompts, params | args.extra, args.chat)


async def _warm_up(target: Target, args: argparse.Namespace) -> None:
    """The first requests, so that lazy work of the server is not measured; they must succeed."""
    for index in range(args.warmup):
        shot = Shot(-1 - index, 0.0, _WARMUP_TOKENS, _WARMUP_TOKENS)
        if error := (await send(target, shot, target.body(shot))).error:
            raise ServerError(f"the first request failed: {error}")


def _setup(args: argparse.Namespace, url: str, model: str) -> dict[str, Any]:
    """What the run was asked for, without what says where results go or who asks."""
    left_out = {"api_key", "json", "plot", "compare", "label"}
    said = {name: value for name, value in vars(args).items() if name not in left_out}
    as_text = {name: str(value) for name, value in said.items() if isinstance(value, Span | Path)}
    return said | as_text | {"url": url, "model": model}


@contextmanager
def _progress(total: int) -> Iterator[Callable[[], object]]:
    """A bar on a terminal, nothing elsewhere; yields what to call after each request."""
    columns = (TextColumn("requests"), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("requests", total=total)
        yield lambda: bar.advance(task)
