"""The attacking process, at the lowest priority: `python -m …attacker NAME URL MODEL SECONDS`."""

import asyncio
import json
import os
import sys
import time

import aiohttp

from examples.benchmarks.attacks.catalog import CASES, trusting
from examples.benchmarks.attacks.sending import Attacker

GRACE_SECONDS = 1.0  # for requests in flight at the end


async def attack(name: str, url: str, model: str, seconds: float) -> dict[str, int]:
    """Run the attack; its outcomes."""
    connector = aiohttp.TCPConnector(limit=0, ssl=trusting())
    timeout = aiohttp.ClientTimeout(total=None)
    case = CASES[name.removesuffix("/control")]
    run = case.control if name.endswith("/control") else case.attack
    assert run is not None
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        attacker = Attacker(session, url, model, time.perf_counter() + seconds)
        try:
            async with asyncio.timeout(seconds + GRACE_SECONDS):
                await run(attacker)
        except TimeoutError:
            attacker.outcomes["cancelled at the end"] += 1
    return dict(attacker.outcomes)


def main() -> None:
    os.nice(19)
    name, url, model, seconds = sys.argv[1:]
    print(json.dumps(asyncio.run(attack(name, url, model, float(seconds)))))


if __name__ == "__main__":
    main()
