"""Images beside other servers: the time to the first token behind one image of 1024 × 1024 pixels,
a later turn on it, and the ITL of 8 streams, undisturbed and while images arrive.

    python -m examples.benchmarks.peers.images LLAMA_SERVER GGUF [--servers FILE] [--itl-goal 100ms]
        [--rounds 3] [--rate 1] [--seconds 10] [--models NAME ...] [--about TEXT] [--json FILE]

LLAMA_SERVER is llama.cpp's program, and GGUF a folder for the models: q8_0 decoders and encoders of
random weights, the same two files for Podway and llama-server. A TOML file describes further
servers (`results/images/servers.toml`); the group of each is its model. One server after the other
runs, alternating. Writes FILE and its page beside it.
"""

import argparse
import json
import os
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from math import isnan, nan
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import uvloop

from adapters.models.named_shapes import VISION_SHAPES
from examples.benchmarks.attacks.__main__ import LOAD_BEFORE, SERVER_FLAGS, machine
from examples.benchmarks.attacks.report import table_head
from examples.benchmarks.cluster.routers import free_port
from examples.benchmarks.peers.random_mmproj import write
from examples.benchmarks.peers.servers import Server, Up, read_servers, running
from examples.benchmarks.server.image_load import SIDE, STREAMS, Chats, beside, picture

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
        seconds = {
            "first_seconds": round(first.seconds, 3),
            "later_seconds": round(later.seconds, 3),
        }
        counts = {
            "prompt_tokens": first.prompt,
            "later_computed_tokens": later.prompt - later.cached,
        }
        return (
            seconds
            | (counts if first.prompt else {})
            | await beside(up.url, chats, images, options.rate)
        )


def servers(model: str, options: argparse.Namespace) -> Iterator[Server]:
    """The servers of a model; each uses all cores."""
    text, encoder = write(model, "q8_0", options.folder)
    threads, goal = str(os.cpu_count()), options.itl_goal
    for name, flags in (("Podway", []), (f"Podway, goal {goal}", ["--itl-goal", goal])):
        port = str(free_port())
        podway = [sys.executable, "-m", "gateway", "serve", str(text), "--mmproj", str(encoder)]
        podway += ["--served-model-name", "m", "--port", port, *SERVER_FLAGS, *flags]
        yield Server(name, model, tuple(podway), int(port), "m", {})
    port, llama = str(free_port()), str(options.llama)
    other = [llama, "-m", str(text), "--mmproj", str(encoder), "--alias", "m", "--port", port]
    other += ["-t", threads, "-tb", threads, "-np", str(SLOTS), "-c", str(CONTEXT), "--kv-unified"]
    yield Server("llama-server", model, tuple(other), int(port), "m", {})
    if options.servers:
        others = read_servers(tomllib.loads(options.servers.read_text()))
        yield from (each for each in others if each.group == model)


def middle(rounds: Rounds, name: str) -> float:
    """The median; `name` may be that of a quantile, behind a dot."""
    return median(values(rounds, name))


def values(rounds: Rounds, name: str) -> list[float]:
    """Those of the rounds; without any chunk there is no quantile, and not each server counts."""
    side, _, inner = name.partition(".")
    return [float(each[side].get(inner, nan) if inner else each.get(side, nan)) for each in rounds]


def cell(found: Mapping[str, Rounds], server: str, name: str, digits: int = 2) -> str:
    """A median with the range of the rounds, in bold if it is the least of the servers."""
    each, own = values(found[server], name), middle(found[server], name)
    is_least = own == min(middle(rounds, name) for rounds in found.values())
    text = f"**{own:.{digits}f}**" if is_least else f"{own:.{digits}f}"
    return f"{text} ({min(each):.{digits}f} to {max(each):.{digits}f})"


def tokens(rounds: Rounds, name: str) -> str:
    """A number of tokens, if the server says it."""
    own = middle(rounds, name)
    return "not told" if isnan(own) else f"{own:.0f}"


def row(model: str, server: str, found: Mapping[str, Rounds]) -> str:
    """A row of the Markdown table."""
    rounds = found[server]
    cells = [
        model,
        server,
        tokens(rounds, "prompt_tokens"),
        cell(found, server, "first_seconds"),
        cell(found, server, "later_seconds"),
        tokens(rounds, "later_computed_tokens"),
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
    name = found.get("json", "peers.json")
    table = [row(model, server, each) for model, each in models.items() for server in each]
    return f"""# Images beside other servers

`python -m examples.benchmarks.peers.images`: images of {SIDE} × {SIDE} pixels, random weights; for
Podway and llama-server q8_0 decoders and encoders from the same files, {found["machine"]};
{found["rounds"]} rounds, alternating; medians and in brackets ranges ([JSON]({name})); bold:
the least of the servers. Processes that wanted to run in the minute before: {found["load_before"]}.
Images arrive at {found["rate"]:g} per second for {found["seconds"]:g} s beside {STREAMS} streams.

{table_head(COLUMNS)}
{chr(10).join(table)}

A reply has one token, so its time is that to the first token. For a later turn llama-server encodes
an image again if its tokens are among those that are computed for it; Podway keeps encodings, and
encodes nothing. Images that take longer than 1/rate wait for each other, and
their clients leave at the end of a round. A delay of a stream that lasts until then counts as long
as it was. Without a goal for the ITL Podway's default `--prefill-slowdown` holds.
llama-server computes nothing else while it encodes. {found.get("about", "")}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure images beside other servers.")
    parser.add_argument("llama", type=Path, metavar="LLAMA_SERVER")
    parser.add_argument("folder", type=Path, metavar="GGUF")
    parser.add_argument("--models", nargs="+", choices=list(VISION_SHAPES), default=VISION_SHAPES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rate", type=float, default=1.0, help="images per second")
    parser.add_argument("--seconds", type=float, default=10.0, help="while images arrive")
    parser.add_argument("--servers", type=Path, help="a TOML file of further servers")
    parser.add_argument("--itl-goal", default="100ms", help="that of a further row of Podway")
    parser.add_argument("--about", default="", help="of the further servers, for the page")
    parser.add_argument("--json", type=Path, default=Path("peers.json"))
    options = parser.parse_args()
    found: Figures = {
        name: getattr(options, name) for name in ("rounds", "rate", "seconds", "about")
    }
    found |= {
        "json": options.json.name,
        "machine": machine(),
        "load_before": LOAD_BEFORE,
        "models": {},
    }
    numbers = count()
    for _ in range(options.rounds):
        for model in options.models:
            for server in servers(model, options):
                rounds = found["models"].setdefault(model, {}).setdefault(server.name, [])
                with running(server) as up:
                    rounds.append(uvloop.run(measure(up, numbers, options)))
                print(model, server.name, rounds[-1], flush=True)
    options.json.write_text(json.dumps(found, indent=1) + "\n")
    options.json.with_suffix(".md").write_text(page(found))
    print(page(found))


if __name__ == "__main__":
    main()
