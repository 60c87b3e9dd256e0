"""A simulated fleet beside two real servers behind smg: shares, cached tokens, throughput.

    python -m examples.benchmarks.cluster.fleet_check --smg PATH
        [--policies cache_aware round_robin] [--rates 8 30] [--out DIR]

Chats of several messages arrive at fixed times (sessions by a Poisson process, messages of a
session a second apart) at two servers of the built-in model behind `smg` (from PyPI), under its
cache-aware policy and round robin. The same arrivals run through two simulated replicas behind our
routers. The settings are those of the servers; each replica has the cost model of one server,
fitted to what it recorded in this run: both servers, smg and the clients shared the cores then, so
this contention is part of the cost. smg chooses among equal workers at random, so the simulation is
repeated with 20 seeds. Adds its rows to fleet_check.json, which the page of `virtual_time.fleet`
shows.

smg polls the loads of its workers every 10 s, for the first time when one of them is registered.
Requests are sent after the second poll, when it knows the load of both.
"""

import argparse
import asyncio
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from random import Random
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp

from engine.policy import build
from engine.request import RequestSpec
from engine.research.fleet.simulation import FleetSetup, simulate_fleet
from engine.simulated.replay import RecordedRequest, Recording, read_recording
from engine.simulated.run import Setup
from engine.simulated.trace import GREEDY
from examples.benchmarks.cluster.routers import MODEL, free_port, replica, routed
from examples.benchmarks.peers.servers import Server, running, wait_for_a_token

POLICIES = {"cache_aware": "smg-cache-aware", "round_robin": "round-robin"}  # of smg, and ours
SMG = (
    "{smg} launch --host 127.0.0.1 --port {{port}} --prometheus-port {{metrics_port}} "
    "--health-check-endpoint /ready --policy {policy} {more} --worker-urls {{workers}}"
)
MORE = {  # else smg's round robin leaves out the server with more waiting requests
    "round_robin": "--disable-worker-overload-protection",
}
SESSIONS, MESSAGES, OUTPUT = 100, 4, 24
SEEDS = 20
SETTLE_SECONDS = 10.5  # from the first answer until requests are sent, just after a poll
AFTER_POLL = 0.5  # seconds after a poll at which the first request arrives, in the simulation
SYSTEM_WORDS = 120
GENERATION_PROMPT = 8  # tokens at the end of a prompt that the next message does not repeat
OUT = Path(__file__).parents[1] / "results" / "fleet"


@dataclass(frozen=True, slots=True)
class Sent:
    """A request and its answer. Times in seconds after the first arrival."""

    at: float
    session: int
    message: int
    prompt_len: int
    cached: int
    ended: float


def schedule(rate: float) -> list[tuple[float, int, int]]:
    """Time, session and message of each request; `rate` requests/s while sessions arrive."""
    random, at, found = Random(1), 0.0, []
    for session in range(SESSIONS):
        found += [(at + message, session, message) for message in range(MESSAGES)]
        at += random.expovariate(rate / MESSAGES)
    return sorted(found)


def messages_of(session: int, message: int) -> list[dict[str, str]]:
    words = " ".join(f"w{session}n{i}" for i in range(SYSTEM_WORDS))
    found = [{"role": "system", "content": words}]
    for number in range(message + 1):
        found.append({"role": "user", "content": f"What is {session} + {number}?"})
        if number < message:
            found.append({"role": "assistant", "content": "A number."})
    return found


async def send_all(url: str, rate: float) -> list[Sent]:
    """Send every request at its time."""
    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(url, timeout=timeout) as session:
        await asyncio.sleep(SETTLE_SECONDS)
        began = time.monotonic()

        async def one(at: float, number: int, message: int) -> Sent:
            await asyncio.sleep(began + at - time.monotonic())
            body = {"model": MODEL, "max_tokens": OUTPUT, "min_tokens": OUTPUT}
            body["messages"] = messages_of(number, message)
            async with session.post("/v1/chat/completions", json=body) as response:
                response.raise_for_status()
                usage = (await response.json())["usage"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            ended = time.monotonic() - began
            return Sent(at, number, message, usage["prompt_tokens"], cached, ended)

        return await asyncio.gather(*(one(*each) for each in schedule(rate)))


def recorded(number: int, folder: Path) -> Server:
    """A server that records its arrivals and iterations, and plans no iteration ahead."""
    server = replica(free_port())
    flags = ("--record", str(folder / f"{number}.jsonl"), "--lookahead", "0")
    return replace(server, command=(*server.command, *flags))


def measure(smg: str, policy: str, rate: float) -> tuple[list[Sent], list[Recording]]:
    """The requests on the real servers, and what each server recorded."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        with running(recorded(0, folder)) as one, running(recorded(1, folder)) as other:
            command = SMG.format(smg=smg, policy=policy, more=MORE.get(policy, ""))
            with routed(command, [one.url, other.url]) as url:
                wait_for_a_token(url, MODEL)
                sent = asyncio.run(send_all(url, rate))
        recordings = [read_recording(folder / f"{number}.jsonl") for number in range(2)]
    return sent, recordings


def arrivals_of(sent: Sequence[Sent], size: int) -> list[RecordedRequest]:
    """The same requests for the simulation. Blocks have equal names where the next message of a
    session repeats them."""
    names: dict[tuple[int, ...], int] = {}
    found = []
    for number, one in enumerate(sent):
        repeated = one.prompt_len - GENERATION_PROMPT
        keys = (
            (one.session, block)
            if (block + 1) * size <= repeated
            else (-number, one.message, block)
            for block in range(one.prompt_len // size)
        )
        found.append(
            RecordedRequest(
                at=AFTER_POLL + one.at,
                prompt_len=one.prompt_len,
                output_len=OUTPUT,
                params=RequestSpec((), OUTPUT, GREEDY),
                names=tuple(names.setdefault(key, len(names)) for key in keys),
                block_size=size,
                number=number,
            )
        )
    return found


def simulated(
    router: str, sent: Sequence[Sent], recordings: Sequence[Recording]
) -> dict[str, float]:
    """The figures of replicas with the settings and the costs of the servers: means over seeds."""
    header = recordings[0].header
    costs = tuple(recording.cost() for recording in recordings)
    setup = Setup(
        "fcfs",
        header.scheduler,
        partial(build, "fcfs"),
        costs[0],
        header.kv.num_blocks * header.kv.block_size,
        header.kv.block_size,
    )
    arrivals = arrivals_of(sent, header.kv.block_size)
    fleet = FleetSetup(setup, len(costs), router, epoch=0.02, costs=costs)
    runs = [simulate_fleet(replace(fleet, seed=seed), arrivals) for seed in range(SEEDS)]
    return {
        "share": mean(max(run.requests_by_replica) / len(sent) for run in runs),
        "cached": mean(run.cached_share for run in runs),
        "throughput": mean(run.throughput for run in runs),
        "mean JCT": mean(run.at("jct", "mean") or 0.0 for run in runs),
    }


def compare(smg: str, policy: str, rate: float) -> dict[str, Any]:
    """Measured and simulated figures under one policy of smg."""
    sent, recordings = measure(smg, policy, rate)
    counts = Counter(
        number
        for number, recording in enumerate(recordings)
        for arrival in recording.arrivals
        if arrival.prompt_len > SYSTEM_WORDS  # not those that wait for the servers
    )
    prompts = sum(one.prompt_len for one in sent)
    real = {
        "share": max(counts.values()) / len(sent),
        "cached": sum(one.cached for one in sent) / prompts,
        "throughput": len(sent) / max(one.ended for one in sent),
        "mean JCT": sum(one.ended - one.at for one in sent) / len(sent),
    }
    return {
        "policy": policy,
        "rate": rate,
        "requests": len(sent),
        "load_average": os.getloadavg()[0],
        "measured": real,
        "simulated": simulated(POLICIES[policy], sent, recordings),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smg", required=True, metavar="PATH")
    names = tuple(POLICIES)
    parser.add_argument("--policies", nargs="+", choices=names, default=names, metavar="POLICY")
    parser.add_argument("--rates", type=float, nargs="+", default=[8.0, 30.0], help="requests/s")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "fleet_check.json"
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    for rate, policy in product(args.rates, args.policies):
        rows = [row for row in rows if (row["rate"], row["policy"]) != (rate, policy)]
        rows.append(compare(args.smg, policy, rate))
        sys.stdout.write(json.dumps(rows[-1]) + "\n")
        sys.stdout.flush()
        rows.sort(key=lambda row: (row["rate"], row["policy"]))
        path.write_text(json.dumps({"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
