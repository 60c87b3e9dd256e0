"""Images beside llama-server: the time to the first token behind one image of 1024 × 1024 pixels,
a later turn on it, and the ITL of 8 streams, undisturbed and while images arrive.

    python -m examples.benchmarks.peers.images LLAMA_SERVER GGUF [--rounds 3] [--rate 1]
        [--seconds 10] [--models NAME ...] [--json FILE]

LLAMA_SERVER is llama.cpp's program, and GGUF a folder for the models: q8_0 decoders and encoders of
random weights, the same two files for both servers. One server after the other runs, alternating.
Writes FILE and its page beside it.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from math import nan
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import uvloop

from adapters.models.named_shapes.vision import VISION_SHAPES
from examples.benchmarks.attacks.__main__ import LOAD_BEFORE, SERVER_FLAGS, machine
from examples.benchmarks.attacks.report import table_head
from examples.benchmarks.cluster.routers import free_port
from examples.benchmarks.peers.random_mmproj import write
from examples.benchmarks.peers.servers import Server, Up, running
from examples.benchmarks.server.images import SIDE, STREAMS, Chats, beside, picture

SLOTS, CONTEXT = 32, 65_536  # llama-server's: all streams and images at a time
COLUMNS = (
    "model",
    "server",
    "tokens of a prompt with one image",
    "one image alone, s to the first token",
    "a later turn on it, s",
    "prompt tokens computed for it",
    "ITL of 8 streams, p50 / p99 ms",
    "beside images",
    "longest, ms",
    "images answered of those sent",
)
Figures = dict[str, Any]
Rounds = Sequence[Mapping[str, Any]]


async def measure(up: Up, numbers: "count[int]", options: argparse.Namespace) -> Figures:
    """One round, with images that the server has not seen."""
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=timeout
    ) as session:
        chats, image = Chats(session, up.url, up.model), picture(next(numbers))
        first, later = await chats.ask(image), await chats.ask(image, turns=2)
        images = [picture(next(numbers)) for _ in range(int(options.seconds * options.rate))]
        return {
            "prompt_tokens": first.prompt,
            "first_seconds": round(first.seconds, 3),
            "later_seconds": round(later.seconds, 3),
            "later_computed_tokens": later.prompt - later.cached,
        } | await beside(up.url, chats, images, options.rate)


def servers(model: str, llama: Path, folder: Path) -> Iterator[Server]:
    """Both servers of a model; each uses all cores."""
    text, encoder = write(model, "q8_0", folder)
    port, threads = str(free_port()), str(os.cpu_count())
    podway = [sys.executable, "-m", "gateway", "serve", str(text), "--mmproj", str(encoder)]
    podway += ["--served-model-name", "m", "--port", port, *SERVER_FLAGS]
    yield Server("Podway", model, tuple(podway), int(port), "m", {})
    port = str(free_port())
    other = [str(llama), "-m", str(text), "--mmproj", str(encoder), "--alias", "m", "--port", port]
    other += ["-t", threads, "-tb", threads, "-np", str(SLOTS), "-c", str(CONTEXT), "--kv-unified"]
    yield Server("llama-server", model, tuple(other), int(port), "m", {})


def middle(rounds: Rounds, name: str) -> float:
    """The median; `name` may be that of a quantile, behind a dot."""
    return median(values(rounds, name))


def values(rounds: Rounds, name: str) -> list[float]:
    """Those of the rounds; without any chunk there is no quantile."""
    side, _, inner = name.partition(".")
    return [float(each[side].get(inner, nan) if inner else each[side]) for each in rounds]


def cell(found: Mapping[str, Rounds], server: str, name: str, digits: int = 2) -> str:
    """A median with the range of the rounds, in bold if it is the least of the servers."""
    each, own = values(found[server], name), middle(found[server], name)
    is_least = own == min(middle(rounds, name) for rounds in found.values())
    text = f"**{own:.{digits}f}**" if is_least else f"{own:.{digits}f}"
    return f"{text} ({min(each):.{digits}f} to {max(each):.{digits}f})"


def row(model: str, server: str, found: Mapping[str, Rounds]) -> str:
    """A row of the Markdown table."""
    rounds = found[server]
    cells = [
        model,
        server,
        f"{middle(rounds, 'prompt_tokens'):.0f}",
        cell(found, server, "first_seconds"),
        cell(found, server, "later_seconds"),
        f"{middle(rounds, 'later_computed_tokens'):.0f}",
        *(
            f"{middle(rounds, f'{side}.p50'):.1f} / {cell(found, server, f'{side}.p99', 1)}"
            for side in ("undisturbed", "beside")
        ),
        cell(found, server, "longest_ms", 0),
        f"{sum(values(rounds, 'answered')):.0f} of {sum(values(rounds, 'sent')):.0f}",
    ]
    return f"| {' | '.join(cells)} |"


def page(found: Mapping[str, Any]) -> str:
    """The page of the results."""
    models = found["models"]
    table = [row(model, server, each) for model, each in models.items() for server in each]
    return f"""# Images beside llama-server

`python -m examples.benchmarks.peers.images`: images of {SIDE} × {SIDE} pixels, random weights, q8_0
decoders and encoders from the same files, {found["machine"]};
{found["rounds"]} rounds, alternating; medians and in brackets ranges ([JSON](peers.json)); bold:
the least of the servers. Processes that wanted to run in the minute before: {found["load_before"]}.
Images arrive at {found["rate"]:g} per second for {found["seconds"]:g} s beside {STREAMS} streams.

{table_head(COLUMNS)}
{chr(10).join(table)}

A reply has one token, so its time is that to the first token. For a later turn llama-server encodes
an image again if its tokens are among those that are computed for it; Podway keeps encodings, and
encodes nothing ([figures](README.md)). Images that take longer than 1/rate wait for each other, and
their clients leave at the end of a round. A delay of a stream that lasts until then counts as long
as it was. Podway has no goal for the ITL here, so its default `--prefill-slowdown` holds.
llama-server computes nothing else while it encodes.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure images beside llama-server.")
    parser.add_argument("llama", type=Path, metavar="LLAMA_SERVER")
    parser.add_argument("folder", type=Path, metavar="GGUF")
    parser.add_argument("--models", nargs="+", choices=list(VISION_SHAPES), default=VISION_SHAPES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rate", type=float, default=1.0, help="images per second")
    parser.add_argument("--seconds", type=float, default=10.0, help="while images arrive")
    parser.add_argument("--json", type=Path, default=Path("peers.json"))
    options = parser.parse_args()
    found: Figures = {name: getattr(options, name) for name in ("rounds", "rate", "seconds")}
    found |= {"machine": machine(), "load_before": LOAD_BEFORE, "models": {}}
    numbers = count()
    for _ in range(options.rounds):
        for model in options.models:
            for server in servers(model, options.llama, options.folder):
                rounds = found["models"].setdefault(model, {}).setdefault(server.name, [])
                with running(server) as up:
                    rounds.append(uvloop.run(measure(up, numbers, options)))
                print(model, server.name, rounds[-1], flush=True)
    options.json.write_text(json.dumps(found, indent=1) + "\n")
    options.json.with_suffix(".md").write_text(page(found))
    print(page(found))


if __name__ == "__main__":
    main()
