"""What `--prefill-slowdown` costs a long prompt, and what it saves the streams beside it.

    python -m examples.benchmarks.server.prefill_slowdown [--rounds 3] [--streams 16]
        [--tokens 6000] [--factors 0 8 4 3 2] [--out DIR]

One server per factor; 0 is no bound. In each round each server after the other computes one prompt
beside streams that decode: the prompt's seconds until its first token, the streams' ITL meanwhile,
and all tokens of both per second.
"""

import argparse
import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import uvloop

from examples.benchmarks.attacks.__main__ import LOAD_BEFORE, SERVER_FLAGS, machine
from examples.benchmarks.attacks.honest import HonestStreams
from examples.benchmarks.attacks.report import quantiles, replace_rows, table_head
from examples.benchmarks.server.served import serving, until_idle

FACTORS = ("0", "8", "4", "3", "2")
SETTLE_SECONDS = 1.0
COLUMNS = ("factor", "seconds of the prompt", "ITL beside it, p50 / p99 ms", "tokens/s of all")


async def measure(url: str, number: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """One prompt beside the streams."""
    prompt = [300 + (7 * at + number) % 1000 for at in range(arguments.tokens)]
    body = {"model": arguments.model, "prompt": prompt, "max_tokens": 1}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        streams = HonestStreams(url, arguments.model)
        tasks = [asyncio.create_task(streams.stream(n)) for n in range(arguments.streams)]
        await asyncio.sleep(SETTLE_SECONDS)
        started = time.perf_counter()
        async with session.post(f"{url}/v1/completions", json=body) as response:
            assert response.status == 200, await response.text()
            await response.read()
        ended = time.perf_counter()
        gaps = streams.between(started, ended)
        streams.is_over = True
        await asyncio.gather(*tasks)
        await until_idle(session, url)
    assert not streams.failures, streams.failures
    seconds = ended - started
    rate = (arguments.tokens + len(gaps)) / seconds
    return {"seconds": round(seconds, 3), "rate": round(rate, 1), **quantiles(gaps)}


def row(factor: str, rounds: Sequence[Mapping[str, Any]], unbounded: float) -> str:
    """A row of the Markdown table: medians of the rounds, and the prompt's time relative to that
    without a bound, in the same round."""
    middle = {name: median(each[name] for each in rounds) for name in rounds[0]}
    cells = [
        factor,
        f"{middle['seconds']:.2f} ({unbounded:.2f} x)",
        f"{middle['p50']:.1f} / {middle['p99']:.1f}",
        f"{middle['rate']:.0f}",
    ]
    return "| " + " | ".join(cells) + " |"


def rows(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """The table's rows."""
    without = next(iter(found.values()))
    relative = {
        factor: median(
            one["seconds"] / other["seconds"] for one, other in zip(rounds, without, strict=True)
        )
        for factor, rounds in found.items()
    }
    return [row(factor, rounds, relative[factor]) for factor, rounds in found.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure prompts beside streams.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=6000, help="of the prompt")
    parser.add_argument(
        "--factors", nargs="+", default=FACTORS, help="the first is compared with the others"
    )
    parser.add_argument("--out", type=Path, help="directory of prefill_slowdown.json and a README")
    parser.set_defaults(model="builtin")
    arguments = parser.parse_args()
    found: dict[str, list[dict[str, Any]]] = {factor: [] for factor in arguments.factors}
    with ExitStack() as stack:
        urls = {}
        for factor in arguments.factors:
            flags = ["builtin", *SERVER_FLAGS, "--prefill-slowdown", factor]
            _, urls[factor] = stack.enter_context(serving(flags))
        for number in range(arguments.rounds):
            for factor in arguments.factors:
                found[factor].append(uvloop.run(measure(urls[factor], number, arguments)))
    print(table_head(COLUMNS))
    print("\n".join(rows(found)))
    if arguments.out is not None:
        text = {"machine": machine(), "load_before": LOAD_BEFORE, "factors": found}
        (arguments.out / "prefill_slowdown.json").write_text(json.dumps(text, indent=1) + "\n")
        page = arguments.out / "README.md"
        if page.exists():
            page.write_text(replace_rows(page.read_text(), COLUMNS, rows(found)))


if __name__ == "__main__":
    main()
