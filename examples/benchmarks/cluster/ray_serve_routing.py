"""The figures of `examples.benchmarks.cluster.routers` for Podway on Ray Serve, with two replicas.

    python -m examples.benchmarks.cluster.ray_serve_routing [--out FILE]

One replica is killed, or taken away by scaling down, under load.
"""

import argparse
import asyncio
import json
import time
from dataclasses import asdict
from pathlib import Path

import aiohttp
import ray
from ray import serve

from examples.benchmarks.cluster.routers import (
    MESSAGES,
    MODEL,
    SESSIONS,
    Result,
    chats,
    free_port,
    under_load,
)
from examples.benchmarks.peers.servers import wait_for_a_token
from examples.ray_serve.app import build

SETTINGS = {"model": "builtin", "served_model_name": MODEL, "threads": "1", "max_replicas": "2"}


def deploy(num_replicas: int, *, is_awaited: bool = True) -> None:
    application = build({**SETTINGS, "min_replicas": str(num_replicas)})
    if is_awaited:
        serve.run(application, name="podway")
    else:
        serve._run(application, name="podway", _blocking=False)


def replicas() -> list[ray.actor.ActorHandle]:
    names = [one["name"] for one in ray.util.list_named_actors(all_namespaces=True)]
    return [ray.get_actor(one, "serve") for one in names if "#Replica#" in one]


def ongoing() -> int:
    """Requests in all replicas."""
    counts = ray.get([one.get_num_ongoing_requests.remote() for one in replicas()])
    return sum(counts)


async def cancel(session: aiohttp.ClientSession) -> float:
    """Seconds from hanging up on a long stream until no replica has a request."""
    body = {"model": MODEL, "prompt": "Tell me a story.", "max_tokens": 4000, "stream": True}
    response = await session.post("/v1/completions", json=body | {"ignore_eos": True})
    await response.content.readline()
    assert ongoing() == 1, "the stream runs"
    began = time.monotonic()
    response.close()
    while ongoing():  # noqa: ASYNC110 - another process ends it
        await asyncio.sleep(0.005)
    return time.monotonic() - began


async def measure(url: str) -> Result:
    timeout = aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(url, timeout=timeout) as session:
        answered, share = await chats(session)
        seconds = await cancel(session)
        killed = await under_load(session, lambda: ray.kill(replicas()[0]))
        while len(replicas()) < 2:  # noqa: ASYNC110 - another process ends it
            await asyncio.sleep(0.5)
        await asyncio.to_thread(deploy, 2)
        drained = await under_load(session, lambda: deploy(1, is_awaited=False))
    name = f"Ray Serve {ray.__version__}, prefix affinity"
    return Result(name, answered, SESSIONS * MESSAGES, share, seconds, killed, drained)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, default=Path("ray_serve.json"))
    arguments = parser.parse_args()
    port = free_port()
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    deploy(2)
    url = f"http://127.0.0.1:{port}"
    wait_for_a_token(url, MODEL)
    result = asyncio.run(measure(url))
    print(result)
    arguments.out.write_text(json.dumps([asdict(result)], indent=1) + "\n")
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
