"""CPU time of one streamed token in the event loop's process, beside a bare `transport.write`.

The gateway (engine, text, events, ASGI, uvicorn) serves S streams over real sockets while a mock
executor returns R iterations per second; a second process reads. The CPU seconds of the event
loop's process are divided by the tokens. The baseline, in the same run, writes the same bytes to
as many sockets at the same rate through a bare uvloop transport, all in a row, as the gateway does.
Writes with 20 µs between them, which find the reader asleep, are measured beside it. Goal: at most
2.5 times the baseline.

    python -m examples.benchmarks.server.streaming_cost
        [--streams 256] [--rate 40] [--seconds 5] [--json FILE] [--profile FILE]

With `--profile` the gateway also runs under cProfile, at a quarter of the rate because that is slow
itself: read the shares, not the times.
"""

import argparse
import asyncio
import cProfile
import io
import json
import multiprocessing
import os
import pstats
import random
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any, cast

import uvicorn
import uvloop

from engine.control.scheduler import IterationScheduler
from engine.control.settings import SchedulerSettings
from engine.iteration import Observer, ObserverGroup
from engine.kv.ledger import KVLedger
from engine.kv_shape import KVShape
from engine.loop import Engine
from engine.policy.fcfs import FirstComeFirstServed
from engine.step import Grammar, Step, StepEntry, StepResult
from gateway.access.bodies import BodyLimits
from gateway.access.callers import Quotas
from gateway.access.grammar_check import GrammarCheck
from gateway.access.keys import Keys
from gateway.groups.group import Group, ServedModel, Serving
from gateway.groups.groups import Groups
from gateway.loras import LoraRegistry
from gateway.observe.backpressure import LoopWatch
from gateway.observe.exposition import Exposition
from gateway.observe.live import LiveView
from gateway.observe.metrics import LoraUsage, Metrics, StepMetrics
from gateway.observe.readings import Readings, ServerReadings
from gateway.observe.request_log import RequestLog
from gateway.observe.timelines import Timelines
from gateway.schema.fields.sampling import Vocabulary
from gateway.serve.connection import Connection
from gateway.serve.places import Places
from gateway.serve.process import tune_collector
from gateway.service import Pace, Service
from gateway.store.store import open_store
from gateway.store.usage import StoreLimits
from gateway.web.app import build_app
from tests.gateway.lora_loader import ScriptedLoader

MODEL = "mock"
MAX_TOKENS = 1_000_000  # no stream ends by itself
SHOWN = 25  # functions of a profile
LETTERS = b" abcdefghijklmnopqrstuvwxyz"
FRAME = (
    b'data: {"id":"chatcmpl-000000000000000000000000","object":"chat.completion.chunk",'
    b'"created":1700000000,"model":"mock","system_fingerprint":"fp","service_tier":"default",'
    b'"choices":[{"index":0,"delta":{"content":" word"},"logprobs":null,"finish_reason":null}]}'
    b"\n\n"
)


class Words:
    """A tokenizer in which every id is a word of five bytes."""

    vocab_size = 27
    special_ids = frozenset[int]()
    special_tokens: Mapping[str, int] = MappingProxyType({})

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [1] * max(1, len(text) // 5)

    def decoder(self) -> "Words":
        return self

    def token_bytes(self, token_id: int) -> bytes:
        return self.feed(token_id)

    def feed(self, token_id: int) -> bytes:
        return b" " + LETTERS[token_id : token_id + 1] * 4


class Metronome:
    """An executor that returns `rate` steps per second with any batch; 0: at once."""

    depth = 1
    is_alive = True

    def __init__(self, rate: float) -> None:
        self._period = 1 / rate if rate else 0.0
        self._next = 0.0

    def submit(self, step: Step) -> "asyncio.Future[StepResult]":
        loop = asyncio.get_running_loop()
        future: asyncio.Future[StepResult] = loop.create_future()
        tokens = tuple(_sample(entry) for entry in step.entries if entry.sample is not None)
        result = StepResult(step.step_id, tokens, self._period)
        now = time.perf_counter()
        self._next = max(self._next + self._period, now)
        loop.call_later(self._next - now, future.set_result, result)
        return future

    def watch(self, on_lost: Callable[[], object]) -> None:
        """Never calls `on_lost`: there is no worker to lose."""

    async def restart(self) -> None:
        raise AssertionError("there is no worker to restart")


def _sample(entry: StepEntry) -> int:
    return (entry.request_id + entry.start) % 26 + 1


@dataclass(frozen=True, slots=True)
class Load:
    """`streams` streams at `rate` iterations per second (0: unlimited), for `seconds`.

    `space` is the CPU seconds that the baseline spins before each write.
    """

    streams: int
    rate: float
    seconds: float
    settle: float  # seconds before the measurement
    space: float = 0.0


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU time of the loop's process in microseconds per token; `busy` is its share of a core."""

    microseconds: float
    tokens_per_second: float
    busy: float


class NoGrammars:
    """A `GrammarChecker` that is not used."""

    async def check(self, grammar: Grammar, seconds: float | None = None) -> str | None:
        return None

    async def close(self) -> None: ...


def build_service(
    load: Load, clock: Callable[[], float], *, has_timelines: bool = True
) -> tuple[Service, Metrics]:
    """A service over the mock executor, with all observers that a server has; optionally without
    those of the web page and of traces."""
    metrics, quotas, request_log = Metrics(), Quotas(), RequestLog(clock)
    live, timelines = LiveView(), Timelines()
    seen: tuple[Observer, ...] = (live, timelines) if has_timelines else ()
    scheduler = IterationScheduler(
        SchedulerSettings(
            max_model_len=1 << 20, max_batch_size=load.streams, max_batch_tokens=8 * load.streams
        ),
        KVLedger(KVShape(max(load.streams * 4096, MAX_TOKENS // 16 + 2), 16)),
        FirstComeFirstServed(),
        ObserverGroup(metrics, StepMetrics(metrics), metrics.requests, request_log, quotas, *seen),
    )
    timelines.attach(scheduler)
    tokenizer, store = Words(), open_store(None, StoreLimits())
    engine, usage = Engine(scheduler, Metronome(load.rate), clock), LoraUsage()
    serving = Serving(
        engine=engine,
        model=ServedModel(MODEL, 1_700_000_000, "fp", Vocabulary(27, frozenset()), tokenizer, None),
        grammars=GrammarCheck(NoGrammars()),
        readings=Readings(metrics, scheduler, usage),
        loras=LoraRegistry(ScriptedLoader(), usage, (MODEL,), engine.fail_lora),
        live=live,
        timelines=timelines,
    )
    groups = Groups([Group.of(serving, clock)])
    server_readings = ServerReadings(metrics, store.database, request_log)
    service = Service(
        groups=groups,
        group=groups.default,
        exposition=Exposition(server_readings, groups.readings, clock),
        watch=LoopWatch(clock, metrics.loop_lag),
        clock=clock,
        unix_now=lambda: 1_700_000_000,
        random=random.Random(1),
        keys=Keys(()),
        limits=BodyLimits(),
        pace=Pace(),
        quotas=quotas,
        store=store,
        request_log=request_log,
    )
    return service, metrics


@asynccontextmanager
async def gateway(load: Load) -> AsyncIterator[tuple[int, Callable[[], int]]]:
    """A listening gateway: its port, and a function that returns its number of output tokens."""
    service, metrics = build_service(load, time.perf_counter)
    async with listening(service) as port:
        yield port, lambda: metrics.num_output_tokens
    print(f"  loop lag p99 at most {_p99(metrics)} s")


@asynccontextmanager
async def listening(service: Service) -> AsyncIterator[int]:
    """Serve this service on a free port."""
    tune_collector()
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    places = Places()

    def connection(**given: Any) -> Connection:
        place = places.enter("127.0.0.1")
        assert place is not None, "there is no bound"
        return Connection(**given, log=service.request_log, place=place)

    server = uvicorn.Server(
        uvicorn.Config(
            build_app(service),
            http=connection,  # type: ignore[arg-type] # it is called only
            ws="none", lifespan="off", log_level="error", access_log=False,
            timeout_graceful_shutdown=1,
        )
    )  # fmt: skip
    async with asyncio.TaskGroup() as group:
        running = group.create_task(service.engine.run())
        watching = group.create_task(service.watch.run())
        serving = group.create_task(server._serve([listener]))
        yield listener.getsockname()[1]
        server.should_exit = True
        await serving
        running.cancel()
        watching.cancel()
    service.store.close()


def _p99(metrics: Metrics) -> str:
    buckets = metrics.loop_lag.buckets()
    return next(bound for bound, count in buckets if count >= 0.99 * buckets[-1][1])


def spin(seconds: float) -> None:
    """Use `seconds` of CPU time of this thread."""
    until = time.thread_time() + seconds
    while seconds and time.thread_time() < until:
        pass


@asynccontextmanager
async def bare(load: Load) -> AsyncIterator[tuple[int, Callable[[], int]]]:
    """The baseline: every connection gets the event at each tick, in HTTP's chunked encoding."""
    transports: list[asyncio.Transport] = []
    num_written = 0
    chunk = b"%x\r\n" % len(FRAME) + FRAME + b"\r\n"

    class Writer(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            transports.append(cast("asyncio.Transport", transport))

    async def tick() -> None:
        nonlocal num_written
        at = time.perf_counter()
        while True:
            for transport in transports:
                spin(load.space)
                transport.write(chunk)
            num_written += len(transports)
            at = max(at + 1 / load.rate, time.perf_counter())
            await asyncio.sleep(at - time.perf_counter())

    loop = asyncio.get_running_loop()
    server = await loop.create_server(Writer, "127.0.0.1", 0, backlog=1024)
    async with server:
        ticking = asyncio.create_task(tick())
        yield server.sockets[0].getsockname()[1], lambda: num_written
        ticking.cancel()
        for transport in transports:
            transport.abort()


def completion_request() -> bytes:
    """A request for a stream that does not end by itself."""
    body = {"model": MODEL, "prompt": "go", "stream": True, "max_tokens": MAX_TOKENS}
    content = json.dumps(body).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
    head += b"content-type: application/json\r\n"
    return head + b"content-length: %d\r\n\r\n" % len(content) + content


def read_streams(port: int, streams: int, stop: Any) -> None:
    """The reading process: opens the streams and discards what it receives."""

    async def main() -> None:
        request = completion_request()

        class Reader(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                cast("asyncio.Transport", transport).write(request)

        loop = asyncio.get_running_loop()
        for _ in range(streams):
            await loop.create_connection(Reader, "127.0.0.1", port)
        await loop.run_in_executor(None, stop.wait)

    uvloop.run(main())


async def measure(
    serve: Callable[[Load], Any], load: Load, profile: cProfile.Profile | None = None
) -> Cost:
    """CPU time per token over `load.seconds`, after all streams have begun."""
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    async with serve(load) as (port, count):
        reader = context.Process(target=read_streams, args=(port, load.streams, stop))
        reader.start()
        while count() < 2 * load.streams:  # noqa: ASYNC110 # a benchmark may poll
            await asyncio.sleep(0.1)
        await asyncio.sleep(load.settle)
        cpu, wall, tokens = time.process_time(), time.perf_counter(), count()
        if profile is not None:
            profile.enable()
        await asyncio.sleep(load.seconds)
        if profile is not None:
            profile.disable()
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        tokens = count() - tokens
        cpu -= tokens * load.space
        stop.set()
        await asyncio.to_thread(reader.join)
    return Cost(1e6 * cpu / max(1, tokens), tokens / wall, cpu / wall)


async def main(arguments: argparse.Namespace) -> None:
    load = Load(arguments.streams, arguments.rate, arguments.seconds, arguments.settle)
    print(f"{load.streams} streams x {load.rate:g} iterations/s, {load.seconds:g} s each")
    results = {
        "bare write": await measure(bare, load),
        "gateway": await measure(gateway, load),
        "bare write, again": await measure(bare, load),
        "gateway, saturated": await measure(gateway, replace(load, rate=0)),
        "bare write, apart": await measure(bare, replace(load, space=20e-6)),
    }
    baseline = (results["bare write"].microseconds + results["bare write, again"].microseconds) / 2
    print(f"{'':20}{'us/token':>10}{'ratio':>8}{'tokens/s':>12}{'CPU':>7}")
    for name, cost in results.items():
        print(
            f"{name:20}{cost.microseconds:10.1f}{cost.microseconds / baseline:8.2f}"
            f"{cost.tokens_per_second:12.0f}{cost.busy:7.0%}"
        )
    print(f"load average {' '.join(f'{load:.1f}' for load in os.getloadavg())}")
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:  # noqa: ASYNC230 # the loop has no other work
            json.dump({name: asdict(cost) for name, cost in results.items()}, file, indent=1)
    if arguments.profile:
        profile = cProfile.Profile()
        await measure(gateway, replace(load, rate=load.rate / 4), profile)
        with open(arguments.profile, "w", encoding="utf-8") as file:  # noqa: ASYNC230 # the loop has no other work
            file.write(summary(profile))


def summary(profile: cProfile.Profile) -> str:
    """The functions with the most time of their own."""
    text = io.StringIO()
    pstats.Stats(profile, stream=text).strip_dirs().sort_stats("tottime").print_stats(SHOWN)
    return text.getvalue()


if __name__ == "__main__":
    flags = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    flags.add_argument("--streams", type=int, default=256)
    flags.add_argument("--rate", type=float, default=40)
    flags.add_argument("--seconds", type=float, default=5)
    flags.add_argument("--settle", type=float, default=2)
    flags.add_argument("--json")
    flags.add_argument("--profile")
    given = flags.parse_args()
    if given.seconds <= 0 or given.streams < 1 or given.rate <= 0:
        flags.error("--streams, --rate and --seconds must be above 0")
    uvloop.run(main(given))
