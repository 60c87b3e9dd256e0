"""Prefill and decode apart, against equal replicas with chunked prefill, in virtual time.

Engines, schedulers, placement and moves are those of the server; iterations and the copies of KV
take what a roofline predicts. Apart, P replicas compute prompts and their first tokens; D others
load a prompt's blocks by their names, as from a tier below, and go on. A prompt is computed once
one of the D has space for all of its tokens. Both are offered the same requests at several rates; a
rate is sustained if 90 % of them meet the goals. Every figure is a function of the trace. Writes
phases.json and README.md; what is not played again is kept.

    python -m examples.benchmarks.virtual_time.phases --trace NAME=FILE:RATE,RATE,...
        [--replicas 2 4 8] [--seconds 60] [--ways "chunks of 512" "6 prefill"] [--poisson] [--cpu]
        [--out DIR]
"""

import argparse
import asyncio
import json
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import inf
from pathlib import Path
from random import Random
from typing import Any

from engine.control.scheduler import IterationScheduler
from engine.cost.model import CostModel
from engine.kv.ledger import KVLedger
from engine.kv.prefix import extend_hashes
from engine.kv_shape import KVShape
from engine.loop import Engine
from engine.policy import build
from engine.replicas.replica import QueueDelay, Replica
from engine.replicas.replicas import Replicas
from engine.request import Caching, Request, RequestSpec, Times
from engine.research.hardware.catalogue import DEVICES, SHAPES, Deployment
from engine.simulated.executor import KnownCost, SimulatedExecutor
from engine.simulated.trace import Arrival, at_rate, read_trace
from engine.simulated.virtual_loop import run_virtual
from engine.step import PageKind, RequestId
from examples.benchmarks.virtual_time.phases_page import (
    CPU,
    CPU_GOALS,
    GOALS,
    POISSON,
    SHARE,
    page,
    sustained,
)
from examples.benchmarks.virtual_time.replicas import BLOCK_SIZE, SETTINGS

OUT = Path(__file__).parents[1] / "results" / "phases"
CPU_COST = OUT / "cpu_cost.json"
CPU_COPY = 4.5e9  # bytes/s into shared memory and out of it, one thread of the CPU of `CPU_COST`
CPU_SLOT_BYTES = 12 * 2 * 4 * 64 * 2  # KV of a token of M110 in float16
CPU_SLOTS = 65_536  # of each replica
CHUNK = 2048  # prompt tokens in an iteration
SMALL_CHUNK = 512
TTFT_BASE, TTFT_FACTOR = 1.0, 2.0  # seconds, and the factor of a prompt's time alone
USABLE = 0.95  # of the KV slots of a replica that decodes, for requests on their way and there


@dataclass(frozen=True, slots=True)
class Hardware:
    """What one replica has: the cost of its iterations, KV slots, and the seconds in which the KV
    of a token moves to another replica. `goals` are for the gaps between tokens, in seconds."""

    model: CostModel
    num_slots: int
    slot_seconds: float
    goals: tuple[float, ...]

    @classmethod
    def h100(cls) -> "Hardware":
        """Llama-3.1-70B on four H100, by a roofline; KV goes through host memory."""
        whole = Deployment(DEVICES["h100"], SHAPES["llama-3.1-70b"], ranks=4)
        return cls(whole.cost(), whole.num_slots, whole.slot_seconds, GOALS)

    @classmethod
    def cpu(cls) -> "Hardware":
        """Random weights of M110 on one core, with the cost that a server of one thread measured;
        KV is copied through shared memory."""
        model = CostModel.parse(json.loads(CPU_COST.read_text())["cost"])
        return cls(model, CPU_SLOTS, CPU_SLOT_BYTES / CPU_COPY, CPU_GOALS)


H100 = Hardware.h100()


@dataclass(frozen=True, slots=True)
class Way:
    """`prefills` of the replicas compute prompts only, the others the tokens behind them. With 0
    all compute both, with chunks of at most `chunk` tokens and this ITL goal."""

    prefills: int = 0
    chunk: int = CHUNK
    itl_goal: float = inf

    @property
    def is_apart(self) -> bool:
        return self.prefills > 0

    def name(self, count: int) -> str:
        if self.is_apart:
            return f"{self.prefills} prefill, {count - self.prefills} decode"
        goal = "" if self.itl_goal == inf else f", ITL goal {self.itl_goal * 1e3:.0f} ms"
        return f"chunks of {self.chunk}{goal}"


@dataclass(slots=True)
class Outcome:
    """The times of a request's tokens, in seconds of virtual time."""

    arrival: Arrival
    times: list[float] = field(default_factory=list)

    def meets(self, cost: CostModel, goal: float, *, in_all_gaps: bool) -> bool:
        """Whether the first token is in time, and all gaps, or their mean, are within the goal."""
        alone = cost.compute(self.arrival.prompt_len, 0)
        if self.times[0] - self.arrival.at > TTFT_BASE + TTFT_FACTOR * alone:
            return False
        gaps = [later - time for time, later in pairwise(self.times)]
        if not gaps:
            return True
        return (max(gaps) if in_all_gaps else sum(gaps) / len(gaps)) <= goal


class Space:
    """Promises the slots of the replicas that decode, in the order of arrival."""

    def __init__(self, count: int, num_slots: int) -> None:
        self._free = [int(USABLE * num_slots)] * count
        self._waiting: deque[tuple[int, asyncio.Future[int]]] = deque()

    async def promise(self, num_slots: int) -> int:
        """The replica that has so many slots for a request, when there is one."""
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.append((num_slots, future))
        self._grant()
        return await future

    def give_back(self, number: int, num_slots: int) -> None:
        self._free[number] += num_slots
        self._grant()

    def _grant(self) -> None:
        while self._waiting:
            number = max(range(len(self._free)), key=self._free.__getitem__)
            if self._free[number] < self._waiting[0][0]:
                return
            num_slots, future = self._waiting.popleft()
            self._free[number] -= num_slots
            future.set_result(number)


def a_replica(way: Way, hardware: Hardware) -> Replica:
    """An engine in virtual time, without requests, that may load blocks by name."""
    cost = KnownCost(hardware.model)
    settings = replace(SETTINGS, max_batch_tokens=way.chunk, itl_goal=way.itl_goal)
    delay = QueueDelay(cost, settings.max_batch_size)
    num_blocks = hardware.num_slots // BLOCK_SIZE
    names = num_blocks if way.is_apart else 0
    shape = KVShape(num_blocks, BLOCK_SIZE, num_store_names=names)
    scheduler = IterationScheduler(settings, KVLedger(shape), build("fcfs", cost), delay, cost)
    seconds = BLOCK_SIZE * hardware.slot_seconds
    executor = SimulatedExecutor(hardware.model, next_token=None, block_seconds=seconds)
    return Replica(Engine(scheduler, executor, asyncio.get_running_loop().time), delay)


class Play:
    """One run of some arrivals."""

    def __init__(self, count: int, way: Way, hardware: Hardware) -> None:
        self._clock = asyncio.get_running_loop().time
        self._slot_seconds = hardware.slot_seconds
        members = [a_replica(way, hardware) for _ in range(count)]
        first = way.prefills or count
        self._replicas = Replicas(members[:first], self._clock)
        self._decoders = [each.engine for each in members[first:]]
        for each in members:
            each.scheduler.kv._has_lower = False  # nothing is saved by itself
        self._space = Space(count - first, hardware.num_slots)

    async def run(self, arrivals: Sequence[Arrival]) -> list[Outcome]:
        running = [asyncio.create_task(self._replicas.run())]
        running += [asyncio.create_task(engine.run()) for engine in self._decoders]
        serve = self._apart if self._decoders else self._together
        work = [serve(arrival, index) for index, arrival in enumerate(arrivals)]
        outcomes = await asyncio.gather(*work)
        for task in running:
            task.cancel()
        return outcomes

    async def _together(self, arrival: Arrival, index: int) -> Outcome:
        await asyncio.sleep(arrival.at)
        outcome = Outcome(arrival)
        await self._read(self._replicas, arrival.spec(index), outcome)
        return outcome

    async def _apart(self, arrival: Arrival, index: int) -> Outcome:
        await asyncio.sleep(arrival.at)
        outcome, spec = Outcome(arrival), arrival.spec(index)
        num_slots = arrival.prompt_len + arrival.output_len + BLOCK_SIZE
        number = await self._space.promise(num_slots)
        await self._read(self._replicas, replace(spec, max_tokens=1), outcome)
        if arrival.output_len > 1:
            # The copies of earlier chunks leave while the later ones are computed.
            last = min(arrival.prompt_len, CHUNK)
            await asyncio.sleep(last * self._slot_seconds)
            await self._read(self._decoders[number], self._moved(spec, number), outcome)
        self._space.give_back(number, num_slots)
        return outcome

    def _moved(self, spec: RequestSpec, number: int) -> RequestSpec:
        """The request behind its first token, whose full blocks the decoding replica may load."""
        probe = Request(RequestId(-1), spec, Times(0.0))
        extend_hashes(probe, BLOCK_SIZE, len(spec.prompt) // BLOCK_SIZE)
        names = [(PageKind.BLOCK, name) for name in probe.block_hashes]
        self._decoders[number].scheduler.kv.search.learn(names, set(probe.block_hashes))
        return replace(
            spec,
            prompt=(*spec.prompt, 0),
            max_tokens=spec.max_tokens - 1,
            caching=Caching(None, tuple(probe.block_hashes)),
        )

    async def _read(self, engine: Engine | Replicas, spec: RequestSpec, outcome: Outcome) -> None:
        with engine.stream(spec) as stream:
            finish = None
            while finish is None:
                chunk = await stream.next()
                outcome.times += [self._clock()] * len(chunk.tokens)
                finish = chunk.finish


async def play(
    count: int, way: Way, arrivals: Sequence[Arrival], hardware: Hardware = H100
) -> list[Outcome]:
    """The outcomes of one run."""
    return await Play(count, way, hardware).run(arrivals)


def ways_of(count: int, goals: Sequence[float] = GOALS) -> list[Way]:
    """Equal replicas with different bounds of an iteration, and splits of at most seven kinds: a
    quarter of the replicas for prompts to all but a sixteenth."""
    equal = [Way(), Way(chunk=SMALL_CHUNK), *[Way(itl_goal=goal) for goal in goals]]
    most = count - max(1, count // 16)
    splits = {*range(max(1, count // 4), most, max(1, count // 8)), most}
    return equal + [Way(prefills) for prefills in sorted(splits)]


def offered(trace: Sequence[Arrival], rate: float, *, is_poisson: bool) -> list[Arrival]:
    """The requests at `rate` requests/s in the trace's pattern, or with exponential gaps, which are
    the same at each rate but for their scale."""
    if not is_poisson:
        return at_rate(trace, rate)
    random, at = Random(0), 0.0
    return [replace(one, at=(at := at + random.expovariate(rate))) for one in trace]


def rows_of(
    name: str, trace: Sequence[Arrival], rates: Sequence[float], count: int, seconds: float,
    hardware: Hardware, ways: Sequence[str] = (),
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """The shares of requests that meet the goals, for each way and rate per replica; with `ways`
    only for those whose names begin with one of them. Rates above
    one at which too few meet each goal are not played."""
    for way in ways_of(count, hardware.goals):
        if ways and not way.name(count).startswith(tuple(ways)):
            continue
        for rate in rates:
            wanted = round(rate * count * seconds)
            poisson = POISSON in name
            arrivals = offered(trace[:wanted], rate * count, is_poisson=poisson)
            outcomes = run_virtual(play(count, way, arrivals, hardware))
            shares = {
                f"{kind} {goal * 1e3:.0f}": round(
                    sum(
                        one.meets(hardware.model, goal, in_all_gaps=kind == "all")
                        for one in outcomes
                    )
                    / len(outcomes),
                    4,
                )
                for kind in ("mean", "all")
                for goal in hardware.goals
            }
            row = {"trace": name, "replicas": count, "way": way.name(count), "rate": rate}
            yield row | {"is_apart": way.is_apart, "requests": len(outcomes), **shares}
            if max(shares.values()) < SHARE:
                break


def main() -> None:
    """Play a trace on each number of replicas."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", nargs="+", default=[])
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument(
        "--poisson", action="store_true", help="requests without the trace's bursts"
    )
    parser.add_argument("--ways", nargs="+", default=[], help="beginnings of their names")
    parser.add_argument("--cpu", action="store_true", help="replicas of one core, not of H100")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    file: Path = args.out / "phases.json"
    rows: list[dict[str, Any]] = json.loads(file.read_text()) if file.exists() else []
    hardware = Hardware.cpu() if args.cpu else H100
    for count in args.replicas:
        for text in args.trace:
            name, _, rest = text.partition("=")
            name += (POISSON if args.poisson else "") + (CPU if args.cpu else "")
            path, _, rates = rest.rpartition(":")
            trace = read_trace(Path(path))
            new = []
            rated = [*map(float, rates.split(","))]
            for row in rows_of(name, trace, rated, count, args.seconds, hardware, args.ways):
                new.append(row)
                sys.stdout.write(f"{row}\n")
                sys.stdout.flush()
            again = {row["way"] for row in new}
            kept = [
                r
                for r in rows
                if (r["trace"], r["replicas"]) != (name, count) or r["way"] not in again
            ]
            rows = kept + new
            file.write_text(json.dumps(rows, indent=0) + "\n")
    (args.out / "README.md").write_text(page(rows))
    sys.stdout.write(f"{len(sustained(rows))} rows\n")


if __name__ == "__main__":
    main()
