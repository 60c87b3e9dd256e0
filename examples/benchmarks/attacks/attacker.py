"""The attacking process: `python -m …attacker URL MODEL NICENESS`.

It prints a line when it is ready. Each line of its input is a JSON array of an attack's name and
its seconds; it runs the attack and prints the outcomes as one line of JSON.
"""

import asyncio
import json
import os
import sys
import time

import aiohttp
import uvloop

from examples.benchmarks.attacks.catalog import CASES
from examples.benchmarks.attacks.sending import SOURCE, Attacker, trusting

GRACE_SECONDS = 0.5  # for requests in flight at the end


async def attack(name: str, url: str, model: str, seconds: float) -> dict[str, int]:
    """Run the attack; its outcomes."""
    connector = aiohttp.TCPConnector(limit=0, ssl=trusting(), local_addr=(SOURCE, 0))
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
    url, model, niceness = sys.argv[1:]
    os.nice(int(niceness))
    print("ready", flush=True)
    for line in sys.stdin:
        name, seconds = json.loads(line)
        print(json.dumps(uvloop.run(attack(name, url, model, seconds))), flush=True)


if __name__ == "__main__":
    main()
