"""`podway bench`: sends load to any OpenAI-compatible server; reports a table, JSON and a plot."""

import argparse
import asyncio
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import uvloop
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from gateway.commands.bench.load import RequestResult, Target, closed_loop, open_loop, send
from gateway.commands.bench.report import Report, read_report, show, summarize
from gateway.commands.bench.workload import (
    LengthRange,
    PlannedRequest,
    RandomPrompts,
    closed_loop_requests,
    poisson_requests,
    read_trace,
)
from gateway.commands.http_client import (
    DEFAULT_URL,
    ServerError,
    base_url,
    first_model,
    open_session,
)
from gateway.commands.offline_bench.command import main as offline
from gateway.settings.flags import (
    Parser,
    ShowDefaults,
    above_zero,
    flag_type,
    json_object,
    natural,
    output_file,
    plot_file,
    positive,
)

_DEFAULT_REQUESTS = 100
_WARMUP_TOKENS = 8
_EXIT_INTERRUPTED = 130


class LoadRun(NamedTuple):
    """A run's report, and whether Ctrl-C or SIGTERM ended it before all requests were sent."""

    report: Report
    is_interrupted: bool = False


def parser() -> Parser:
    """The flags of `podway bench`."""
    parser = Parser(
        "podway bench",
        description="Send load to an OpenAI-compatible server; report its latency and throughput. "
        "Ctrl-C or SIGTERM ends the run early and reports the requests that have ended.",
        usage="podway bench [URL] [flags]",
        epilog="podway bench --offline SHAPE times a worker with random weights, without a "
        "server; podway bench --offline --help lists its flags.",
        formatter_class=ShowDefaults,
    )
    parser.add_argument("url", nargs="?", default=DEFAULT_URL, help="the server")
    parser.add_argument("--model", help="model name; by default the first that the server lists")
    parser.add_argument("--api-key", help="API key; by default the variable OPENAI_API_KEY")
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
        help="closed loop: number of requests in flight",
    )
    which.add_argument(
        "--rate",
        type=above_zero,
        metavar="R",
        help="open loop: Poisson arrivals, R requests per second",
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
        help="replay the trace X times as fast",
    )


def _add_requests(parser: Parser) -> None:
    add = parser.add_argument_group("requests").add_argument
    add("-n", "--requests", type=positive, metavar="N", help="number of requests to send")
    kind: Any = {"type": _length_range, "metavar": "A..B"}
    add("--prompt-tokens", default="128", help="prompt length, or range of lengths", **kind)
    add("--output-tokens", default="64", help="output length, or range of lengths", **kind)
    add("--chat", action="store_true", help="send chat completions, with text prompts")
    add("--text", action="store_true", help="text prompts instead of token ids")
    add("--ids", default="300..1000", help="range of the prompts' token ids", **kind)
    add("--temperature", type=float, default=0.0, metavar="T", help="sampling temperature")
    add("--respect-eos", action="store_true", help="do not set ignore_eos in requests")
    add("--extra", type=json_object, default={}, metavar="JSON", help="fields for every request")
    add("--warmup", type=natural, default=1, metavar="N", help="requests before the measured ones")
    add("--seed", type=int, default=0, metavar="N", help="seed of lengths, arrivals and prompts")
    add("--timeout", type=above_zero, default=600.0, metavar="SECONDS", help="for each request")
    add("--new-connections", action="store_true", help="open a connection for every request")


_length_range = flag_type(LengthRange.parse, "a length such as 128 or a range such as 32..512")


def _add_results(parser: Parser) -> None:
    add = parser.add_argument_group("results").add_argument
    add("--label", default="run", help="name of the run in tables and plots")
    add("--json", type=output_file, metavar="FILE", help="write the results as JSON")
    add("--plot", type=plot_file, metavar="FILE", help="write a plot: PNG, PDF or SVG")
    add(
        "--compare",
        type=Path,
        nargs="+",
        metavar="JSON",
        help="send no requests; table and plot of files that --json wrote",
    )


def main(argv: list[str]) -> int:
    """Run or compare, and print; 1 if no request succeeded, 130 after Ctrl-C or SIGTERM."""
    if any(word.partition("=")[0] == "--offline" for word in argv):
        return offline(argv)
    args = parser().parse_args(argv)
    try:
        if args.compare:
            runs = [LoadRun(read_report(path)) for path in args.compare]
        else:
            runs = [uvloop.run(measure(args))]
    except ServerError as error:
        sys.stderr.write(f"podway bench: {error}\n")
        return 1
    reports = [run.report for run in runs]
    show(reports, Console())
    if args.json and not args.compare:
        reports[0].write(args.json)
    if args.plot:
        from gateway.commands.bench.plot import draw  # matplotlib takes a second to import

        draw(reports, args.plot)
    if any(run.is_interrupted for run in runs):
        return _EXIT_INTERRUPTED
    return 0 if any(report.num_ok for report in reports) else 1


async def measure(args: argparse.Namespace) -> LoadRun:
    """Run the load against the server. Raises `ServerError` if no request can be sent."""
    url = base_url(args.url)
    requests = _planned_requests(args)
    async with open_session(
        args.api_key, timeout=args.timeout, reuse_connections=not args.new_connections
    ) as session:
        model = args.model or await first_model(session, url)
        target = _target(args, url, session, model)
        await _warm_up(target, args)
        outcomes: list[RequestResult] = []
        late, is_interrupted = 0.0, False
        with _progress(len(requests)) as advance:

            def done(outcome: RequestResult) -> None:
                outcomes.append(outcome)
                advance()

            try:
                _cancel_on_sigterm()
                if args.rate or args.trace:
                    late = await open_loop(target, requests, done)
                else:
                    await closed_loop(target, requests, args.concurrency, done)
            except asyncio.CancelledError:  # Ctrl-C and SIGTERM cancel this task once
                is_interrupted = True
                asyncio.current_task().uncancel()  # type: ignore[union-attr] # it runs in one
    settings = _run_settings(args, url, model)
    if is_interrupted:
        settings["interrupted"] = True
        counts = f"{len(outcomes)} of {len(requests)}"
        sys.stderr.write(f"podway bench: interrupted; {counts} requests have ended\n")
    return LoadRun(summarize(outcomes, settings, args.label, late), is_interrupted)


def _cancel_on_sigterm() -> None:
    """End the run as Ctrl-C does: `timeout 60 podway bench` reports what has ended by then."""
    task = asyncio.current_task()
    assert task is not None, "it runs in one"
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)


def _planned_requests(args: argparse.Namespace) -> list[PlannedRequest]:
    if args.trace:
        return read_trace(args.trace, args.time_scale, args.requests)
    lengths = args.prompt_tokens, args.output_tokens, args.seed
    if args.rate:
        return poisson_requests(args.requests or _DEFAULT_REQUESTS, args.rate, *lengths)
    return closed_loop_requests(
        args.requests or max(_DEFAULT_REQUESTS, 4 * args.concurrency), *lengths
    )


def _target(
    args: argparse.Namespace, url: str, session: aiohttp.ClientSession, model: str
) -> Target:
    params: dict[str, Any] = {"model": model, "temperature": args.temperature}
    if not args.respect_eos:
        params["ignore_eos"] = True
    prompts = RandomPrompts(args.seed, None if args.text or args.chat else args.ids)
    return Target(url, session, prompts, params | args.extra, args.chat)


async def _warm_up(target: Target, args: argparse.Namespace) -> None:
    """Send the first requests, whose times are not reported; raises `ServerError` if one fails."""
    for index in range(args.warmup):
        request = PlannedRequest(-1 - index, 0.0, _WARMUP_TOKENS, _WARMUP_TOKENS)
        if error := (await send(target, request, target.body(request))).error:
            raise ServerError(f"the first request failed: {error}")


def _run_settings(args: argparse.Namespace, url: str, model: str) -> dict[str, Any]:
    """The flags that describe the load, without the API key and the output files."""
    left_out = {"api_key", "json", "plot", "compare", "label"}
    given = {name: value for name, value in vars(args).items() if name not in left_out}
    as_text = {
        name: str(value) for name, value in given.items() if isinstance(value, LengthRange | Path)
    }
    return given | as_text | {"url": url, "model": model}


@contextmanager
def _progress(total: int) -> Iterator[Callable[[], object]]:
    """Show a progress bar if stderr is a terminal; yields the function that advances it."""
    columns = (TextColumn("requests"), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("requests", total=total)
        yield lambda: bar.advance(task)
