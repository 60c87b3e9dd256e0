"""What the web page and traces cost the event loop per streamed token, in one run.

S streams, one after the other on each connection, over the mock executor of `streaming_cost`. Two
forms of the gateway take turns, `--rounds` times:

- off: without the observers of the page and of traces
- on: with them, as every server runs; every request is exported to an OpenTelemetry collector, and
  for half of the time, in turns of half a second, a client reads `/admin/live`

A ratio is the median over the rounds of the CPU time of the loop's thread per token, divided by
that of `off` in the same round. The process's CPU time includes the thread that exports. Goals: the
loop needs at most 5 % more, and `/admin/live` takes less than 1 % of its time.

    python -m examples.benchmarks.server.observation_cost
        [--streams 256] [--rate 40] [--seconds 4] [--rounds 9] [--json FILE]
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from statistics import median
from typing import Any, cast

import uvloop

from examples.benchmarks.server.streaming_cost import MODEL, Load, build_service, listening
from gateway.observe.metrics import Metrics
from gateway.observe.traces import Traces
from gateway.service import Service

FORMS = ("off", "on")
TOKENS = 100  # of a stream
TURN = 0.5  # seconds with or without a client of /admin/live
TICK = 0.05  # seconds between two readings of the clocks


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
    """Requests one stream after the other on a connection and discards what it receives. The first
    one is shorter, so that not all of them end at once."""

    def __init__(self, number: int) -> None:
        self._first = _request(1 + number * 37 % TOKENS)
        self._next = _request(TOKENS)
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the first request."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(self._first)

    def data_received(self, data: bytes) -> None:
        """Send the next request when the stream has ended."""
        if data.endswith(b"\r\n0\r\n\r\n"):
            self._transport.write(self._next)


def _request(max_tokens: int) -> bytes:
    body = {"model": MODEL, "prompt": "go", "stream": True, "max_tokens": max_tokens}
    encoded = json.dumps(body | {"ignore_eos": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
    head += b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(encoded)
    return head + encoded


class Watcher(asyncio.Protocol):
    """Reads `/admin/live`."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the request."""
        head = b"GET /admin/live HTTP/1.1\r\nhost: localhost\r\n\r\n"
        cast("asyncio.Transport", transport).write(head)


def read(port: int, streams: int, stop: Any, *, watches: bool) -> None:
    """The reading process."""

    async def watch() -> None:
        loop = asyncio.get_running_loop()
        while True:
            transport, _ = await loop.create_connection(Watcher, "127.0.0.1", port)
            await asyncio.sleep(TURN)
            transport.abort()
            await asyncio.sleep(TURN)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        for number in range(streams):
            await loop.create_connection(partial(Stream, number), "127.0.0.1", port)
        watching = asyncio.create_task(watch()) if watches else None
        await loop.run_in_executor(None, stop.wait)
        if watching is not None:
            watching.cancel()

    uvloop.run(main())


@dataclass(slots=True)
class Sample:
    """CPU time in microseconds of the loop's thread and of its process, wall time and tokens."""

    loop: float = 0.0
    process: float = 0.0
    seconds: float = 0.0
    tokens: int = 0
    dropped_traces: int = 0

    def add(self, change: tuple[float, float, float, int]) -> None:
        """Add seconds of the thread, of the process, of wall time, and tokens."""
        self.loop += 1e6 * change[0]
        self.process += 1e6 * change[1]
        self.seconds += change[2]
        self.tokens += change[3]

    def __add__(self, other: "Sample") -> "Sample":
        return Sample(*(getattr(self, each) + getattr(other, each) for each in self.__slots__))

    @property
    def loop_per_token(self) -> float:
        return self.loop / max(1, self.tokens)

    @property
    def process_per_token(self) -> float:
        return self.process / max(1, self.tokens)


@asynccontextmanager
async def gateway(
    form: str, load: Load, collector: str
) -> AsyncIterator[tuple[int, Service, Metrics]]:
    """A listening gateway of this form."""
    service, metrics = build_service(load, time.perf_counter, has_timelines=form == "on")
    traces = None
    if form == "on":
        traces = Traces(collector, MODEL, time.perf_counter, metrics)
        service.timelines.report_to(traces)
    async with listening(service) as port:
        yield port, service, metrics
    if traces is not None:
        await asyncio.to_thread(traces.close)


async def measure(form: str, load: Load, collector: str) -> tuple[Sample, Sample]:
    """One turn of a form: without and with a client of `/admin/live`."""
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    async with gateway(form, load, collector) as (port, service, metrics):
        target = partial(read, port, load.streams, stop, watches=form == "on")
        reader = context.Process(target=target)
        reader.start()
        while metrics.num_output_tokens < 2 * load.streams:  # noqa: ASYNC110 # a benchmark may poll
            await asyncio.sleep(0.1)
        await asyncio.sleep(load.settle)
        samples = await _sample(load.seconds, service, metrics)
        stop.set()
        await asyncio.to_thread(reader.join)
    samples[0].dropped_traces = metrics.num_dropped_traces
    return samples


async def _sample(seconds: float, service: Service, metrics: Metrics) -> tuple[Sample, Sample]:
    alone, watched = Sample(), Sample()
    until, before, was_watched = time.perf_counter() + seconds, None, False
    while time.perf_counter() < until:
        now = (
            time.thread_time(),
            time.process_time(),
            time.perf_counter(),
            metrics.num_output_tokens,
        )
        is_watched = service.live.is_watched
        if before is not None and is_watched == was_watched:
            loop, process, wall, tokens = (x - y for x, y in zip(now, before, strict=True))
            (watched if is_watched else alone).add((loop, process, wall, int(tokens)))
        before, was_watched = now, is_watched
        await asyncio.sleep(TICK)
    return alone, watched


def summary(rounds: list[tuple[Sample, Sample, Sample]]) -> dict[str, Any]:
    """Medians over the rounds of (off, on, on and watched)."""
    on = [alone + watched for _, alone, watched in rounds]
    off = [each for each, _, _ in rounds]
    shares = [
        (watched.loop_per_token - alone.loop_per_token) * 1e-6 * watched.tokens / watched.seconds
        for _, alone, watched in rounds
    ]
    return {
        "off_loop_us_per_token": _median(each.loop_per_token for each in off),
        "on_loop_us_per_token": _median(each.loop_per_token for each in on),
        "loop_ratio": _median(
            y.loop_per_token / x.loop_per_token for x, y in zip(off, on, strict=True)
        ),
        "process_ratio": _median(
            y.process_per_token / x.process_per_token for x, y in zip(off, on, strict=True)
        ),
        "live_share_of_loop": _median(shares),
        "tokens_per_second": round(median(each.tokens / each.seconds for each in on)),
        "dropped_traces": sum(each.dropped_traces for each in on),
    }


def _median(values: Iterable[float]) -> float:
    return round(median(values), 4)


async def main(arguments: argparse.Namespace) -> None:
    """Measure, print and write the figures."""
    load = Load(arguments.streams, arguments.rate, arguments.seconds, settle=0.5)
    context = multiprocessing.get_context("spawn")
    port = context.Value("i", 0)
    collector = context.Process(target=collect, args=(port,), daemon=True)
    collector.start()
    while not port.value:  # noqa: ASYNC110 # a benchmark may poll
        await asyncio.sleep(0.1)
    rounds: list[tuple[Sample, Sample, Sample]] = []
    for _ in range(arguments.rounds):
        off, on = [await measure(form, load, f"http://127.0.0.1:{port.value}") for form in FORMS]
        rounds.append((off[0], *on))
    collector.terminate()
    results = summary(rounds)
    for name, value in results.items():
        print(f"{name:24}{value:12g}")
    if arguments.json:
        about = {"streams": load.streams, "rate": load.rate, "tokens_of_a_stream": TOKENS}
        about |= {"rounds": arguments.rounds, "load_average": round(os.getloadavg()[0], 1)}
        with open(arguments.json, "w", encoding="utf-8") as file:  # noqa: ASYNC230 # the loop has no other work
            json.dump(about | results, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    flags = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    flags.add_argument("--streams", type=int, default=256)
    flags.add_argument("--rate", type=float, default=40)
    flags.add_argument("--seconds", type=float, default=4)
    flags.add_argument("--rounds", type=int, default=9)
    flags.add_argument("--json")
    given = flags.parse_args()
    if given.seconds <= 0 or given.streams < 1 or given.rate <= 0 or given.rounds < 1:
        flags.error("--streams, --rate, --seconds and --rounds must be above 0")
    uvloop.run(main(given))
