"""Replicas of one model behind one queue, in virtual time: where requests are placed, and moves.

Placement, moves, engines and schedulers are those of the server; iterations take what a roofline
model predicts. The requests are sessions of the Mooncake trace, superposed so that each replica
gets the same load; copies share no prefixes. Every figure is a function of the trace, so the
machine and its load change none. In the second part a replica dies while all compute, in the third
groups of requests with a common prompt arrive almost at once. Writes replicas.json and README.md;
a part that is not played again keeps its figures, and so does a number of replicas.

    python -m examples.benchmarks.virtual_time.replicas [--part placement death bursts]
        [--replicas 2 4 8 16 32 64] [--out DIR]
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from engine.control.scheduler import IterationScheduler
from engine.control.settings import SchedulerSettings
from engine.cost.live import quantile
from engine.kv.ledger import KVLedger
from engine.kv_shape import KVShape
from engine.loop import Engine
from engine.policy import build
from engine.replicas.placement import least_growth
from engine.replicas.replica import QueueDelay, Replica
from engine.replicas.replicas import Replicas
from engine.request import Caching, Request, RequestSpec
from engine.research.fleet.router import Loads, PrefixAffinity, SmgCacheAware
from engine.research.fleet.shard import report_of
from engine.research.hardware.catalogue import DEVICES, SHAPES, Deployment
from engine.simulated.executor import KnownCost, SimulatedExecutor
from engine.simulated.trace import SHARED_BLOCK, Arrival, between, read_trace, superposed
from engine.simulated.virtual_loop import run_virtual
from examples.benchmarks.written import write_files
from tests.fuzz.groups.case import MortalExecutor, Tally

if TYPE_CHECKING:
    from engine.cost.model import CostModel
    from engine.replicas.placement import Load, Place
    from engine.research.fleet.router import Router

TRACE = Path(__file__).parents[3] / "tests" / "data" / "mooncake_conversation_sessions.jsonl.gz"
OUT = Path(__file__).parents[1] / "results" / "replicas"
HARDWARE = Deployment(DEVICES["a100-80gb"], SHAPES["llama-3.1-70b"], ranks=4)
BLOCK_SIZE = 128
COPIES = 2.0  # of the trace, for each replica
SECONDS = 400.0  # of the trace
UNBOUNDED = 10**9
DEATH_AT, RESTART_SECONDS = 100.0, 60.0
DEATH_REPLICAS = BURST_REPLICAS = (2, 4, 8)
BURST = 8  # requests, within `BURST_SECONDS`
BURST_SECONDS, BURSTS_PER_SECOND = 0.5, 0.1  # the latter for each replica
COMMON_BLOCKS, OWN_LEN = 12, 200  # of their prompts: blocks of the trace, and tokens
SETTINGS = SchedulerSettings(
    max_model_len=131_072,
    max_batch_size=256,
    max_batch_tokens=8192,
    max_queue_requests=UNBOUNDED,
    max_queue_tokens=UNBOUNDED,
)


@dataclass(frozen=True, slots=True)
class Way:
    """How requests are placed, and whether they move while they wait."""

    name: str
    place: "Callable[[Sequence[Replica]], Place]"
    moves: bool
    has_own_keys: bool = False  # each request has a cache key of its own, so follows no other


@dataclass(frozen=True, slots=True)
class Figures:
    """One run. Times are in seconds of virtual time."""

    replicas: int
    way: str
    requests: int
    seconds: float  # until the last request has ended
    tokens_per_second: float  # prompts and outputs, from the first arrival to the last end
    ttft_p50: float
    ttft_p99: float
    jct_mean: float
    cached_share: float  # of the prompt tokens
    moved: int


class Routed:
    """A router of the fleet simulator before the replicas. It knows their loads at this moment,
    except where it waits for its next poll. `arrival` is the request that is placed next."""

    arrival: Arrival

    def __init__(
        self, make: "Callable[[Loads, CostModel, int], Router]", replicas: Sequence[Replica]
    ) -> None:
        self._replicas = replicas
        self._loads = Loads(len(replicas))
        self._loads.activate(range(len(replicas)))
        self._router = make(self._loads, HARDWARE.cost(), HARDWARE.num_slots // SHARED_BLOCK)

    def __call__(self, loads: "Sequence[Load]") -> int:
        assert len(loads) == len(self._replicas), "all replicas accept requests"
        for number, each in enumerate(self._replicas):
            self._loads.report(report_of(number, each.scheduler))
        return self._router.route(self.arrival)


def round_robin(replicas: Sequence[Replica]) -> "Place":
    turns = count()
    return lambda loads: next(turns) % len(loads)


MOVING = Way("forecast, moves", lambda replicas: least_growth, moves=True)
STAYING = Way("forecast", lambda replicas: least_growth, moves=False)
PREFIX = Way("prefix-aware router", partial(Routed, PrefixAffinity), moves=False)
SMG = Way("smg cache_aware", partial(Routed, SmgCacheAware), moves=False)
ROUND_ROBIN = Way("round robin", round_robin, moves=False)
FOLLOWING = replace(MOVING, name="forecast, moves, one key")
ALONE = replace(MOVING, name="forecast, moves, own keys", has_own_keys=True)


class Dying(MortalExecutor):
    """A worker that can be killed, and takes a minute to load again."""

    def __init__(self) -> None:
        super().__init__(HARDWARE.cost(), Tally(), lambda: True)

    async def restart(self) -> None:
        await asyncio.sleep(RESTART_SECONDS)
        await super().restart()


def a_replica(dying: Dying | None) -> Replica:
    """An engine in virtual time, without requests."""
    model = HARDWARE.cost()
    cost = KnownCost(model)
    delay = QueueDelay(cost, SETTINGS.max_batch_size)
    ledger = KVLedger(KVShape(HARDWARE.num_slots // BLOCK_SIZE, BLOCK_SIZE))
    scheduler = IterationScheduler(SETTINGS, ledger, build("fcfs", cost), delay, cost)
    executor = dying or SimulatedExecutor(model, next_token=None)
    return Replica(Engine(scheduler, executor, asyncio.get_running_loop().time), delay)


async def run_request(
    replicas: Replicas, place: "Place", arrival: Arrival, index: int, key: str
) -> Request:
    """The request of an arrival, when it has ended."""
    await asyncio.sleep(arrival.at)
    spec: RequestSpec = replace(arrival.spec(index), caching=Caching(key=key))
    if isinstance(place, Routed):
        place.arrival = arrival
    with replicas.stream(spec) as stream:
        while (await stream.next()).finish is None:
            pass
    assert stream.request.produced == arrival.output_len, "a request has all of its tokens"
    return stream.request


async def play(
    num_replicas: int, way: Way, arrivals: Sequence[Arrival], *, has_death: bool = False
) -> Figures:
    """The figures of one run, in which the first replica may die."""
    loop = asyncio.get_running_loop()
    dying = Dying() if has_death else None
    members = [a_replica(None if index else dying) for index in range(num_replicas)]
    place = way.place(members)
    replicas = Replicas(members, loop.time, place)
    if dying is not None:
        loop.call_at(DEATH_AT, dying.kill)
    if not way.moves:
        for engine in replicas.engines:
            engine.on_planned = lambda: None
    running = asyncio.create_task(replicas.run())
    work = [
        run_request(replicas, place, arrival, index, str(index) if way.has_own_keys else "")
        for index, arrival in enumerate(arrivals)
    ]
    requests = await asyncio.gather(*work)
    running.cancel()
    return figures_of(num_replicas, way, requests, replicas.moves.num_moved)


def figures_of(num_replicas: int, way: Way, requests: Sequence[Request], moved: int) -> Figures:
    ttfts = sorted(time_of(each.times.ttft) for each in requests)
    jcts = [time_of(each.times.ended_at) - each.times.arrived_at for each in requests]
    prompts = sum(each.prompt_len for each in requests)
    outputs = sum(each.produced for each in requests)
    seconds = max(time_of(each.times.ended_at) for each in requests)
    began = min(each.times.arrived_at for each in requests)
    return Figures(
        replicas=num_replicas,
        way=way.name,
        requests=len(requests),
        seconds=round(seconds, 3),
        tokens_per_second=round((prompts + outputs) / (seconds - began), 1),
        ttft_p50=round(quantile(ttfts, 0.5), 3),
        ttft_p99=round(quantile(ttfts, 0.99), 3),
        jct_mean=round(sum(jcts) / len(jcts), 3),
        cached_share=round(sum(each.num_cached for each in requests) / prompts, 4),
        moved=moved,
    )


def time_of(seconds: float | None) -> float:
    assert seconds is not None, "the request has ended"
    return seconds


def load_of(num_replicas: int, seconds: float) -> list[Arrival]:
    """The trace's sessions, superposed so that each replica gets its share."""
    arrivals = between(read_trace(TRACE), 0.0, seconds)
    return superposed(arrivals, round(COPIES * num_replicas), Random(0))


def bursts_of(num_replicas: int, seconds: float) -> list[Arrival]:
    """Groups of requests, each with a common prompt and some tokens of its own."""
    random, began = Random(0), 0.0
    arrivals: list[Arrival] = []
    while (began := began + random.expovariate(BURSTS_PER_SECOND * num_replicas)) < seconds:
        blocks = (len(arrivals),) * COMMON_BLOCKS
        length = COMMON_BLOCKS * SHARED_BLOCK + OWN_LEN
        arrivals += [
            Arrival(
                began + random.uniform(0, BURST_SECONDS), length, random.randint(50, 400), blocks
            )
            for _ in range(BURST)
        ]
    return arrivals


Rows = Sequence[Mapping[str, Any]]


def table(rows: Rows) -> list[str]:
    """The lines of a table of the results."""
    return [
        "| replicas | placement | tokens/s | TTFT p50, s | TTFT p99, s | mean JCT, s "
        "| prompt tokens cached | moved |",
        "|---|---|---|---|---|---|---|---|",
        *[
            f"| {row['replicas']} | {row['way']} | {row['tokens_per_second']:,.0f} "
            f"| {row['ttft_p50']:.2f} | {row['ttft_p99']:.1f} | {row['jct_mean']:.1f} "
            f"| {row['cached_share']:.1%} | {row['moved']} |"
            for row in rows
        ],
    ]


def page(parts: Mapping[str, Rows]) -> str:
    """README.md of the results."""
    lines = [
        "# Replicas of one model behind one queue",
        "",
        "`python -m examples.benchmarks.virtual_time.replicas`: Mooncake conversations on "
        "Llama-3.1-70B, four A100-80GB per",
        f"replica, in virtual time; {COPIES:g} copies per replica of the first {SECONDS:g} s of "
        "the sessions in `tests/data`, which",
        "share no prefixes with each other. Placement, moves and schedulers are those of "
        "`--replicas` ([JSON](replicas.json)).",
        "The longest prompts have 120,000 tokens and take most of the TTFT at the 99th percentile;",
        "with few replicas it depends on where those few land, and moves may cost mean JCT, too.",
        "The routers are those of the [fleets](../fleet/README.md), before the same engines: the "
        "*prefix-aware* one knows all loads at",
        "every moment, *smg* has those of its last poll, up to 10 s ago. Two replicas beside two "
        "servers behind smg, for real: [servers](servers.md).",
        "",
        *table(parts["placement"]),
        "",
        f"With the death of one replica after {DEATH_AT:g} s, whose workers take "
        f"{RESTART_SECONDS:g} s to load again; every request ends with all of its tokens:",
        "",
        *table(parts["death"]),
        "",
        f"Groups of {BURST} requests within {BURST_SECONDS:g} s, whose prompts have "
        f"{COMMON_BLOCKS * SHARED_BLOCK:,} tokens in common and {OWN_LEN} of their own;",
        f"{BURSTS_PER_SECOND:g} groups per second and replica. With one `prompt_cache_key` (or "
        "none) they follow the first of",
        "them, with a key for each they find only what is computed already:",
        "",
        *table(parts["bursts"]),
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    """Play the ways with each number of replicas."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", nargs="+", default=["placement", "death", "bursts"])
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 4, 8, 16, 32, 64])
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    ways = {"placement": (MOVING, STAYING, PREFIX, SMG, ROUND_ROBIN), "death": (MOVING, STAYING)}
    ways["bursts"] = (FOLLOWING, ALONE)
    numbers = {
        "placement": args.replicas, "death": DEATH_REPLICAS, "bursts": BURST_REPLICAS
    }  # fmt: skip
    file: Path = args.out / "replicas.json"
    parts: dict[str, Rows] = json.loads(file.read_text()) if file.exists() else {}
    for part in args.part:
        rows = [row for row in parts.get(part, ()) if row["replicas"] not in numbers[part]]
        for num_replicas in numbers[part]:
            make = bursts_of if part == "bursts" else load_of
            arrivals = make(num_replicas, SECONDS)
            for way in ways[part]:
                run = play(num_replicas, way, arrivals, has_death=part == "death")
                rows.append(asdict(run_virtual(run)))
                sys.stdout.write(f"{rows[-1]}\n")
        parts[part] = sorted(rows, key=lambda row: row["replicas"])
    write_files(args.out, {"replicas.json": parts, "README.md": page(parts)})


if __name__ == "__main__":
    main()
