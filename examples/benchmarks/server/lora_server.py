"""ITL and throughput of servers under load: LoRA adapters beside the base model and beside merging.

Each kind of load has the same streams, prompts and lengths. `plain` is a server without adapters,
`base` one that has four of which no request uses any, `mixed` the same server with requests of the
base model and the four adapters in turn. `merged` is what merged weights would take: five servers,
each with a fifth of the streams. Kinds alternate; the medians of the rounds are reported, and CPU
seconds of the servers, which other processes on the machine disturb less than elapsed time.

    python -m examples.benchmarks.server.lora_server [--shape M110] [--weights int8] [--out DIR]

With `--out` it writes `server.json`, and `server.md` with the table.
"""

import argparse
import asyncio
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, NamedTuple

import aiohttp

from adapters.models.named_shapes import SHAPES
from examples.benchmarks.layers.lora import NUM_LORAS, make_lora
from examples.benchmarks.peers.servers import cpu_seconds
from examples.benchmarks.server.disk_tier import Server
from examples.benchmarks.server.start_time import cpu_name
from examples.benchmarks.written import write_files

LORAS = [f"lora{number}" for number in range(1, NUM_LORAS + 1)]
FLAGS = ("--threads", "1", "--max-model-len", "512", "--cost-model", "measure", "--no-prefix-cache")


class Target(NamedTuple):
    """Where one stream goes."""

    url: str
    model: str


class Load(NamedTuple):
    """One kind of load: its streams, and the servers that serve it."""

    targets: Sequence[Target]
    servers: Sequence[Server]

    def cpu_seconds(self) -> float:
        return sum(cpu_seconds(server.process) for server in self.servers)


class Figures(NamedTuple):
    """One run of a load."""

    ttft_ms: float  # median over all streams, which begin at the same time
    itl_ms: float  # median over all tokens of all streams
    tokens_per_second: float
    cpu_ms_per_token: float  # of the servers


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="M110", help="of random weights, Llama-like")
    parser.add_argument("--weights", default="int8")
    parser.add_argument("--streams", type=int, default=20)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="folder of server.json and server.md")
    return parser.parse_args()


def sizes_of(shape: str) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of each linear of a Llama-like model, by its name."""
    config: Any = SHAPES[shape]
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    dim = hidden // config["num_attention_heads"]
    kv = dim * config["num_key_value_heads"]
    linears = {
        **{
            f"self_attn.{name}_proj": (size, hidden)
            for name, size in zip("qkv", (hidden, kv, kv), strict=True)
        },
        "self_attn.o_proj": (hidden, hidden),
        **{f"mlp.{name}_proj": (inner, hidden) for name in ("gate", "up")},
        "mlp.down_proj": (hidden, inner),
    }
    layers = range(config["num_hidden_layers"])
    return {f"model.layers.{n}.{name}": size for n in layers for name, size in linears.items()}


async def stream(
    session: aiohttp.ClientSession, target: Target, body: dict[str, Any]
) -> list[float]:
    """The times at which the tokens of one stream arrived."""
    times = []
    url = f"{target.url}/v1/completions"
    async with session.post(url, json={**body, "model": target.model}) as response:
        response.raise_for_status()
        async for line in response.content:
            if line.startswith(b"data: {"):
                times.append(time.perf_counter())
    return times


async def run(load: Load, options: argparse.Namespace, seed: int) -> Figures:
    random = Random(seed)
    began, before = time.perf_counter(), load.cpu_seconds()
    async with aiohttp.ClientSession() as session:
        found = await asyncio.gather(
            *(stream(session, target, body_of(options, random)) for target in load.targets)
        )
    seconds, used = time.perf_counter() - began, load.cpu_seconds() - before
    tokens = sum(map(len, found))
    gaps = [later - earlier for times in found for earlier, later in pairwise(times)]
    ttft = median(times[0] - began for times in found)
    return Figures(1e3 * ttft, 1e3 * median(gaps), tokens / seconds, 1e3 * used / tokens)


def body_of(options: argparse.Namespace, random: Random) -> dict[str, Any]:
    return {
        "prompt": random.choices(range(300, 30_000), k=options.prompt_tokens),
        "max_tokens": options.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }


def loads_of(
    plain: Server, adapted: Server, merged: Sequence[Server], streams: int
) -> dict[str, Load]:
    def spread(targets: Sequence[Target]) -> list[Target]:
        return [targets[number % len(targets)] for number in range(streams)]

    mixed = [Target(adapted.url, name) for name in ("m", *LORAS)]
    return {
        "plain": Load(spread([Target(plain.url, "m")]), [plain]),
        "base": Load(spread(mixed[:1]), [adapted]),
        "mixed": Load(spread(mixed), [adapted]),
        "merged": Load(spread([Target(each.url, "m") for each in merged]), merged),
    }


def measure(
    start: Callable[..., Server], options: argparse.Namespace, folder: Path
) -> dict[str, Any]:
    sizes = sizes_of(options.shape)
    paths = [make_lora(folder / name, sizes, seed) for seed, name in enumerate(LORAS)]
    flags = [
        part
        for name, path in zip(LORAS, paths, strict=True)
        for part in ("--lora", f"{name}={path}")
    ]
    adapted = start(*flags, "--max-loras", str(NUM_LORAS))
    merged = [start() for _ in range(NUM_LORAS + 1)]
    loads = loads_of(merged[0], adapted, merged, options.streams)
    rounds: dict[str, list[Figures]] = {name: [] for name in loads}
    for number in range(options.rounds + 1):
        for name, load in loads.items():
            figures = asyncio.run(run(load, options, number))
            if number:  # the first round warms up
                rounds[name].append(figures)
    return {
        name: {
            field: round(median(getattr(each, field) for each in found), 3)
            for field in Figures._fields
        }
        for name, found in rounds.items()
    }


COLUMNS = {
    "base": "base requests, adapters loaded",
    "mixed": "base and four adapters",
    "merged": "five servers of merged weights",
}


def ratio(figure: float, plain: float) -> str:
    """CPU time is counted in steps of 10 ms: a short run may have none."""
    return f"{figure / plain:.2f} ×" if plain else "—"


def page(found: Mapping[str, Any]) -> str:
    """The page of results; each ratio is that of a kind to the server without adapters."""
    kinds: Mapping[str, Mapping[str, float]] = found["kinds"]
    plain = kinds["plain"]
    before, after = found["load"]
    lines = [
        "# LoRA adapters in a whole server",
        "",
        f"`python -m examples.benchmarks.server.lora_server --shape {found['shape']} --weights "
        f"{found['weights']} --streams {found['streams']}`: "
        f"{found['streams']} streams of {found['prompt_tokens']} prompt and "
        f"{found['output_tokens']} output tokens; random weights, four adapters of rank 16 on",
        f"all linears, servers of one compute thread on {found['cpu']}, load average {before:.1f} "
        f"before and {after:.1f} after. Kinds alternate; medians of {found['rounds']} rounds "
        "([JSON](server.json)).",
        "",
        f"A server without adapters: TTFT {plain['ttft_ms']:.0f} ms, ITL {plain['itl_ms']:.1f} ms, "
        f"{plain['tokens_per_second']:.0f} tokens/s, {plain['cpu_ms_per_token']:.2f} ms of CPU per "
        "token with its prompt's share. The other kinds, beside it:",
        "",
        "| requests | TTFT | ITL | tokens/s | CPU per token |",
        "|---|---|---|---|---|",
    ]
    for kind, title in COLUMNS.items():
        ratios = [ratio(kinds[kind][field], plain[field]) for field in Figures._fields]
        lines.append(f"| {title} | {' | '.join(ratios)} |")
    lines += [
        "",
        "The five servers of merged weights run at the same time on the same cores; their CPU per "
        "token is what merging costs. Mixed requests lose most while prompts are computed beside "
        "decodes: such",
        "iterations have segments of each adapter in both, and their kernels are not replayed from "
        "a recording, as those of decodes are.",
        "Steps alone, without a server: [README.md](README.md).",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    options = parse()
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as ending:

        def start(*flags: str) -> Server:
            model = f"random:{options.shape}"
            server = Server(model, "--weights", options.weights, *FLAGS, *flags)
            ending.callback(server.end)
            return server

        found = measure(start, options, Path(folder))
    given = {key: value for key, value in vars(options).items() if key != "out"}
    load = [round(load_before, 2), round(os.getloadavg()[0], 2)]
    result = {**given, "cpu": cpu_name(), "load": load, "kinds": found}
    print(page(result))
    if options.out is not None:
        write_files(options.out, {"server.json": result, "server.md": page(result)})


if __name__ == "__main__":
    main()
