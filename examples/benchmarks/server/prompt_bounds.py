"""What bounds on prompts cost many streams, and what they save streams beside a long prompt.

    python -m examples.benchmarks.server.prompt_bounds OUT [--model random:Qwen2.5-0.5B]
        [--weights int8] [--rounds 3]

Servers that differ only in the bound are up together: a factor (`--prefill-slowdown`) relative to
the decodes, or an absolute gap (`--itl-goal`). In each round one after the other serves 32 streams
of 128 tokens in and 64 out, a new one for each that ends, and then one long prompt beside streams
that decode. Writes prompt_bounds.json and prompt_bounds.md to OUT.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp
import uvloop

from examples.benchmarks.attacks.__main__ import LOAD_BEFORE, machine
from examples.benchmarks.attacks.honest import HonestStreams
from examples.benchmarks.attacks.report import quantiles, table_head
from examples.benchmarks.server.served import serving, until_idle
from examples.benchmarks.written import write_files

BOUNDS = (
    "--prefill-slowdown 2",
    "--prefill-slowdown 3",
    "--prefill-slowdown 4",
    "--itl-goal 50ms",
    "--itl-goal 100ms",
    "--prefill-slowdown 0",
)
SETTLE_SECONDS = 1.0
NOTES = """\
The many streams are one client's, the 16 streams and the long prompt are clients of their own. A
client that is alone has twice the factor of `--prefill-slowdown`, up to 0.1 s between two tokens.
The row *before* is of an earlier run, without that, whose factor grew half a second later.
"""
COLUMNS = (
    "bound",
    "many streams: tokens/s",
    "TTFT p50 s",
    "ITL p50 / p99 ms",
    "the prompt, s",
    "ITL beside it, p50 / p99 ms",
)


def closed_loop(
    url: str, number: int, arguments: argparse.Namespace, scratch: Path
) -> dict[str, float]:
    """Figures of `podway bench` with a closed loop, in each round with other prompts."""
    out = scratch / "bench.json"
    command = [sys.executable, "-m", "gateway", "bench", url, "--model", "m", "--json", str(out)]
    command += ["-c", str(arguments.streams), "-n", str(arguments.requests)]
    command += ["--prompt-tokens", "128", "--output-tokens", "64", "--ids", arguments.ids]
    command += ["--seed", str(number)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    seen = json.loads(out.read_text())
    ttft, itl = seen["quantiles"]["ttft"], seen["quantiles"]["itl"]
    rate = seen["output_tokens_per_second"]
    return {"rate": rate, "ttft": ttft[50], "itl_p50": itl[50], "itl_p99": itl[99]}


async def beside_streams(url: str, number: int, arguments: argparse.Namespace) -> dict[str, float]:
    """One prompt beside half as many streams that decode: its seconds, their ITL meanwhile, and all
    tokens of both per second."""
    prompt = [300 + (7 * at + number) % 1000 for at in range(arguments.tokens)]
    body = {"model": "m", "prompt": prompt, "max_tokens": 1}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        streams = HonestStreams(url, "m")
        tasks = [asyncio.create_task(streams.stream(n)) for n in range(arguments.streams // 2)]
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


def row(bound: str, rounds: Sequence[Mapping[str, Mapping[str, float]]]) -> str:
    """A row of the table, medians of the rounds."""

    def middle(part: str, name: str) -> float:
        return median(each[part][name] for each in rounds)

    cells = [
        f"`{bound}`",
        f"{middle('streams', 'rate'):.0f}",
        f"{middle('streams', 'ttft'):.2f}",
        f"{1e3 * middle('streams', 'itl_p50'):.0f} / {1e3 * middle('streams', 'itl_p99'):.0f}",
        f"{middle('prompt', 'seconds'):.1f}",
        f"{middle('prompt', 'p50'):.0f} / {middle('prompt', 'p99'):.0f}",
    ]
    return "| " + " | ".join(cells) + " |"


def page(found: Mapping[str, Any]) -> str:
    lines = [
        "# Bounds on prompts",
        "",
        f"Written by `python -m examples.benchmarks.server.prompt_bounds`: {found['model']}, "
        f"{found['weights']}, {found['machine']}; medians of {found['rounds']} rounds. Many "
        f"streams are {found['streams']}; the prompt has {found['tokens']:,} tokens and is beside "
        "half as many.",
        "",
        table_head(COLUMNS),
        *(row(bound, rounds) for bound, rounds in found["bounds"].items()),
        "",
        NOTES,
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="random:Qwen2.5-0.5B")
    parser.add_argument("--weights", default="int8")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--tokens", type=int, default=6000, help="of the long prompt")
    parser.add_argument("--ids", default="300..20000", help="of the tokens in prompts")
    parser.add_argument("--bounds", nargs="+", default=BOUNDS)
    arguments = parser.parse_args()
    bounds: dict[str, list[dict[str, Any]]] = {bound: [] for bound in arguments.bounds}
    flags = [arguments.model, "--weights", arguments.weights, "--served-model-name", "m"]
    flags += ["--store", "memory", "--kv-memory", "1GiB", "--max-batch-size", "64"]
    with TemporaryDirectory() as folder, ExitStack() as stack:
        urls = {
            bound: stack.enter_context(serving([*flags, *bound.split()]))[1] for bound in bounds
        }
        for number in range(arguments.rounds):
            for bound, rounds in bounds.items():
                alone = closed_loop(urls[bound], number, arguments, Path(folder))
                prompt = uvloop.run(beside_streams(urls[bound], number, arguments))
                rounds.append({"streams": alone, "prompt": prompt})
    found = {
        "machine": machine(),
        "load_before": LOAD_BEFORE,
        "model": arguments.model,
        "weights": arguments.weights,
        "streams": arguments.streams,
        "tokens": arguments.tokens,
        "rounds": arguments.rounds,
        "bounds": bounds,
    }
    write_files(arguments.out, {"prompt_bounds.json": found, "prompt_bounds.md": page(found)})
    print(page(found))


if __name__ == "__main__":
    main()
