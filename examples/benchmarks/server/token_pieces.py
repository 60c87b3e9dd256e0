"""CPU time of the pieces of a streamed token, over connections that write nowhere.

The gateway, its engine and its observers are those of `streaming_cost`. The iterations follow one
another without a pause, or 25 ms apart: then the objects of all streams have left the caches of the
core. Of several rounds the fastest counts.

    python -m examples.benchmarks.server.token_pieces [--streams 256] [--rounds 8] [--json FILE]
"""

import argparse
import asyncio
import json
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import uvicorn
import uvloop
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.server import ServerState

import engine.stream
from engine.states import State
from examples.benchmarks.server.streaming_cost import Load, build_service, completion_request
from gateway.serve.connection import Connection
from gateway.serve.places import Places
from gateway.serve.process import tune_collector
from gateway.service import Service
from gateway.web.app import build_app

ITERATIONS = 32  # of a round: each stream fills two blocks
PAUSES = {"without a pause": 0.0, "25 ms between iterations": 40.0}  # iterations per second
P = ParamSpec("P")
T = TypeVar("T")


class Nowhere(asyncio.Transport):
    """A transport that drops what is written."""

    def write(self, data: Any) -> None: ...

    def is_closing(self) -> bool:
        return False

    def close(self) -> None: ...

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class Pieces:
    """The CPU seconds in each piece of the event loop's work."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def timed(self, piece: str, function: Callable[P, T]) -> Callable[P, T]:
        """The function, of which the time is counted as `piece`."""

        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            began = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[piece] += time.thread_time() - began

        return call


def waking(app: ASGIApp) -> ASGIApp:
    """The app without a way to write without waking a task."""

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        del scope["podway.chunks"]
        await app(scope, receive, send)

    return run


def open_streams(app: ASGIApp, service: Service, streams: int) -> list[Connection]:
    """As many connections whose clients have sent a request for a stream."""
    config = uvicorn.Config(app, log_level="error", access_log=False)
    config.load()
    places, state = Places(), ServerState()
    connections = []
    for _ in range(streams):
        place = places.enter("127.0.0.1")
        assert place is not None, "there is no bound"
        connection = Connection(config, state, {}, log=service.request_log, place=place)
        connection.connection_made(Nowhere())
        connection.data_received(completion_request())
        connections.append(connection)
    return connections


async def measure(
    streams: int, rate: float, rounds: int, *, wakes: bool = False
) -> dict[str, float]:
    """Microseconds per token of each piece, in the fastest round; with `wakes` a task is woken for
    each token."""
    service, metrics = build_service(Load(streams, rate, 0, 0), time.perf_counter)
    pieces, scheduler = Pieces(), service.engine.scheduler
    scheduler.plan = pieces.timed("plan", scheduler.plan)  # type: ignore[method-assign]
    scheduler.commit = pieces.timed("commit", scheduler.commit)  # type: ignore[method-assign]
    offer_all = engine.stream.offer_all
    engine.stream.offer_all = pieces.timed("text, event, chunk", offer_all)
    app = build_app(service)
    connections = open_streams(waking(app) if wakes else app, service, streams)
    running = asyncio.create_task(service.engine.run())
    while scheduler.pool.count(State.RUNNING) < streams:  # noqa: ASYNC110 # a benchmark may poll
        await asyncio.sleep(0.01)
    found: list[dict[str, float]] = []
    for _ in range(rounds):
        pieces.seconds.clear()
        began, before = time.thread_time(), metrics.num_output_tokens
        while metrics.num_output_tokens < before + ITERATIONS * streams:  # noqa: ASYNC110 # as above
            await asyncio.sleep(0.02 if rate else 0)
        cpu, tokens = time.thread_time() - began, metrics.num_output_tokens - before
        rest = {"hand over": cpu - sum(pieces.seconds.values()), "all": cpu}
        found.append({k: 1e6 * v / tokens for k, v in (dict(pieces.seconds) | rest).items()})
    running.cancel()
    engine.stream.offer_all = offer_all
    for connection in connections:
        connection.connection_lost(None)
    await asyncio.sleep(0.1)
    return min(found, key=lambda each: each["all"])


async def main(arguments: argparse.Namespace) -> None:
    tune_collector()
    found: dict[str, Any] = {}
    for name, rate in PAUSES.items():
        load = (arguments.streams, rate, arguments.rounds)
        found[name] = await measure(*load)
        found[name]["all, a task woken for every token"] = (await measure(*load, wakes=True))["all"]
        print(name, {piece: round(cost, 2) for piece, cost in found[name].items()})
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:  # noqa: ASYNC230 # the loop has no other work
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    flags = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    flags.add_argument("--streams", type=int, default=256)
    flags.add_argument("--rounds", type=int, default=8)
    flags.add_argument("--json")
    uvloop.run(main(flags.parse_args()))
