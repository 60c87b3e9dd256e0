"""What the web page and traces cost the event loop per streamed token, in one run.

S streams of 200 tokens each, one after the other, over the mock executor of `streaming_cost`. Four
forms of the same gateway take turns, `--rounds` times:

- off: without the observers of the page and of traces
- kept: with them, as every server runs; no client watches and nothing is exported
- watched: the same while a client reads `/admin/live`
- on: watched, and every request is exported to an OpenTelemetry collector

A ratio is the median over the rounds of a form's CPU time of the loop's thread per token, divided
by that of `off` in the same round. The process's CPU time includes the thread that exports. Goals:
`on` costs the loop at most 5 % more than `off`, `watched` at most 1 % of the loop's time more than
`kept`.

    python -m examples.benchmarks.observation_cost
        [--streams 256] [--rate 40] [--seconds 4] [--rounds 5] [--json FILE]
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from statistics import median
from typing import Any, cast

import uvloop

from examples.benchmarks.streaming_cost import MODEL, Load, build_service, listening
from gateway.observe.metrics import Metrics
from gateway.observe.traces import Traces

FORMS = ("off", "kept", "watched", "on")
TOKENS = 200  # of a stream


class Collector(BaseHTTPRequestHandler):
    """Accepts everything, as an OpenTelemetry collector would."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        """Read the body and answer with an empty message."""
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing is printed."""


def collect(port: Any) -> None:
    """The collector's process."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    port.value = server.server_address[1]
    server.serve_forever()


class Stream(asyncio.Protocol):
    """Requests one stream after the other on a connection and discards what it receives."""

    def __init__(self) -> None:
        body = {"model": MODEL, "prompt": "go", "stream": True, "max_tokens": TOKENS}
        encoded = json.dumps(body | {"ignore_eos": True}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
        head += b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(encoded)
        self._request = head + encoded
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the first request."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Send the next request when the stream has ended."""
        if data.endswith(b"\r\n0\r\n\r\n"):
            self._transport.write(self._request)


class Watcher(asyncio.Protocol):
    """Reads `/admin/live`."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the request."""
        head = b"GET /admin/live HTTP/1.1\r\nhost: localhost\r\n\r\n"
        cast("asyncio.Transport", transport).write(head)


def read(port: int, streams: int, stop: Any, *, watches: bool) -> None:
    """The reading process."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        for _ in range(streams):
            await loop.create_connection(Stream, "127.0.0.1", port)
        if watches:
            await loop.create_connection(Watcher, "127.0.0.1", port)
        await loop.run_in_executor(None, stop.wait)

    uvloop.run(main())


@dataclass(frozen=True, slots=True)
class Sample:
    """CPU time in microseconds per token, of the loop's thread and of its process."""

    loop: float
    process: float
    tokens_per_second: float
    dropped_traces: int


@asynccontextmanager
async def gateway(form: str, load: Load, collector: str) -> AsyncIterator[tuple[int, Metrics]]:
    """A listening gateway of this form."""
    service, metrics = build_service(load, time.perf_counter, has_timelines=form != "off")
    traces = None
    if form == "on":
        traces = Traces(collector, MODEL, time.perf_counter, metrics)
        service.timelines.report_to(traces)
    async with listening(service) as port:
        yield port, metrics
    if traces is not None:
        await asyncio.to_thread(traces.close)


async def measure(form: str, load: Load, collector: str) -> Sample:
    """One turn of a form."""
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    async with gateway(form, load, collector) as (port, metrics):
        target = partial(read, port, load.streams, stop, watches=form in ("watched", "on"))
        reader = context.Process(target=target)
        reader.start()
        while metrics.num_output_tokens < 2 * load.streams:  # noqa: ASYNC110 # a benchmark may poll
            await asyncio.sleep(0.1)
        await asyncio.sleep(load.settle)
        before = time.thread_time(), time.process_time(), time.perf_counter()
        tokens = metrics.num_output_tokens
        await asyncio.sleep(load.seconds)
        after = time.thread_time(), time.process_time(), time.perf_counter()
        tokens = metrics.num_output_tokens - tokens
        stop.set()
        await asyncio.to_thread(reader.join)
    loop, process, wall = (end - start for start, end in zip(before, after, strict=True))
    per_token = 1e6 / max(1, tokens)
    dropped = metrics.num_dropped_traces
    return Sample(loop * per_token, process * per_token, tokens / wall, dropped)


def summary(samples: dict[str, list[Sample]]) -> dict[str, dict[str, float]]:
    """The median of each figure, and of its ratio to `off` in the same round."""
    off = samples["off"]
    return {
        form: {
            "loop_us_per_token": round(median(each.loop for each in rounds), 2),
            "process_us_per_token": round(median(each.process for each in rounds), 2),
            "loop_ratio": round(
                median(_ratios([s.loop for s in rounds], [s.loop for s in off])), 3
            ),
            "process_ratio": round(
                median(_ratios([s.process for s in rounds], [s.process for s in off])), 3
            ),
            "tokens_per_second": round(median(each.tokens_per_second for each in rounds)),
            "dropped_traces": sum(each.dropped_traces for each in rounds),
        }
        for form, rounds in samples.items()
    }


def _ratios(values: list[float], bases: list[float]) -> list[float]:
    return [value / base for value, base in zip(values, bases, strict=True)]


async def main(arguments: argparse.Namespace) -> None:
    """Measure, print and write the figures."""
    load = Load(arguments.streams, arguments.rate, arguments.seconds, settle=0.5)
    context = multiprocessing.get_context("spawn")
    port = context.Value("i", 0)
    collector = context.Process(target=collect, args=(port,), daemon=True)
    collector.start()
    samples: dict[str, list[Sample]] = {form: [] for form in FORMS}
    while not port.value:  # noqa: ASYNC110 # a benchmark may poll
        await asyncio.sleep(0.1)
    for _ in range(arguments.rounds):
        for form in FORMS:
            samples[form].append(await measure(form, load, f"http://127.0.0.1:{port.value}"))
    collector.terminate()
    results = summary(samples)
    rate = results["kept"]["tokens_per_second"]
    live = results["watched"]["loop_us_per_token"] - results["kept"]["loop_us_per_token"]
    share = round(live * 1e-6 * rate, 4)
    for form, figures in results.items():
        print(f"{form:8}", "  ".join(f"{name} {value:g}" for name, value in figures.items()))
    print(f"/admin/live: {share:.2%} of the loop's time")
    if arguments.json:
        about = {"streams": load.streams, "rate": load.rate, "tokens_of_a_stream": TOKENS}
        about |= {"rounds": arguments.rounds, "load_average": round(os.getloadavg()[0], 1)}
        with open(arguments.json, "w", encoding="utf-8") as file:  # noqa: ASYNC230 # the loop has no other work
            json.dump(
                {"about": about, "live_share_of_loop": share, "forms": results}, file, indent=1
            )
            file.write("\n")


if __name__ == "__main__":
    flags = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    flags.add_argument("--streams", type=int, default=256)
    flags.add_argument("--rate", type=float, default=40)
    flags.add_argument("--seconds", type=float, default=4)
    flags.add_argument("--rounds", type=int, default=5)
    flags.add_argument("--json")
    given = flags.parse_args()
    if given.seconds <= 0 or given.streams < 1 or given.rate <= 0 or given.rounds < 1:
        flags.error("--streams, --rate, --seconds and --rounds must be above 0")
    uvloop.run(main(given))
