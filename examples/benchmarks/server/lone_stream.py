"""What the time of each token of a lone stream consists of, beside a plain read of the weights.

    python -m examples.benchmarks.server.lone_stream CHECKPOINT OUT [--formats int8 bfloat16]
        [--rounds 12] [--tokens 96]

Serves a checkpoint in each weight format. In every round a client streams one answer, and this
process reads as many bytes of memory as the weights have, because the memory of a virtual machine
is faster at some times than at others. The worker's steps, and the gaps between two of them, are
those of the server's `--trace`. Medians over the rounds go to OUT/lone_stream.json, and the table
to OUT/lone_stream.md.
"""

import argparse
import http.client
import json
import os
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit

from engine.worker.cpu.limits import PlainReads
from engine.worker_settings import WEIGHT_BYTES
from examples.benchmarks.layers.fractions import FORMATS
from examples.benchmarks.server.lookahead import LONGEST_GAP, spans
from examples.benchmarks.server.served import serving
from examples.benchmarks.server.start_time import cpu_name
from examples.benchmarks.written import write_files
from gateway.commands.offline_bench.roofline import WeightSizes

PROMPT = list(range(100, 108))


def main() -> None:
    options = parse()
    config = json.loads((options.checkpoint / "config.json").read_text())
    elements = WeightSizes.of(config).read_elements
    threads = os.cpu_count() or 1
    reads = PlainReads(threads)
    rows = []
    for name in options.formats:
        before = os.getloadavg()[0]
        num_bytes = int(elements * WEIGHT_BYTES[name])
        rows.append({"format": name, "load": before, **measure(options, name, reads, num_bytes)})
        figures = {"cpu": cpu_name(), "cores": threads, "rounds": options.rounds, "rows": rows}
        write_files(options.out, {"lone_stream.json": figures, "lone_stream.md": page(figures)})
    print(page(figures))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=96)
    return parser.parse_args()


def measure(
    options: argparse.Namespace, name: str, reads: PlainReads, num_bytes: int
) -> dict[str, float]:
    """Median milliseconds of each part, per token of one format."""
    read, token = list[float](), list[float]()
    with TemporaryDirectory() as scratch:
        trace = Path(scratch) / "trace.json"
        flags = [str(options.checkpoint), "--lookahead", "0", "--trace", str(trace)]
        with serving([*flags, *FORMATS[name]]) as (_, url):
            for _ in range(options.rounds + 1):
                time.sleep(1.1 * LONGEST_GAP)
                read.append(reads.seconds(num_bytes))
                token.append(seconds_per_token(url, options.tokens))
                read.append(reads.seconds(num_bytes))
        streams = [steps[1:] for steps in spans(trace)[-options.rounds :]]  # without the prompt
    steps = [median(end - begin for begin, end in each) for each in streams]
    gaps = [median(b[0] - a[1] for a, b in pairwise(each)) for each in streams]
    parts = {"token": token[1:], "read": read[2:], "step": steps, "gap": gaps}
    milliseconds = {part: round(1e3 * median(seconds), 3) for part, seconds in parts.items()}
    return {**milliseconds, "weight_bytes": num_bytes}


def seconds_per_token(url: str, num_tokens: int) -> float:
    """Of one streamed answer, from its first token to its last."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc)
    connection.request("GET", "/v1/models")
    model = json.loads(connection.getresponse().read())["data"][0]["id"]
    body = {"model": model, "prompt": PROMPT, "max_tokens": num_tokens, "stream": True}
    body |= {"temperature": 0, "ignore_eos": True}
    headers = {"content-type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    times = [
        time.perf_counter() for line in connection.getresponse() if line.startswith(b"data: {")
    ]
    connection.close()
    return (times[-1] - times[0]) / (len(times) - 1)


def page(figures: Mapping[str, Any]) -> str:
    rows: Sequence[Mapping[str, Any]] = figures["rows"]
    loads = [row["load"] for row in rows]
    return "\n".join(
        [
            "# What a token of a lone stream takes",
            "",
            "Written by `python -m examples.benchmarks.server.lone_stream`: "
            f"{figures['cpu']}, {figures['cores']} cores, load average {min(loads):.1f} to "
            f"{max(loads):.1f}; medians of {figures['rounds']} rounds, milliseconds. A step is "
            "that of the worker, a gap the time until the next one begins: the result, the event "
            "loop and the next step's message. A plain read of as many bytes as the weights have "
            "was timed before and after each stream.",
            "",
            "| format | tokens/s | a token | plain read of the weights | step, beyond the read "
            "| gap | read / token |",
            "|---|---|---|---|---|---|---|",
            *(
                f"| {row['format']} | {1e3 / row['token']:.1f} | {row['token']:.2f} "
                f"| {row['read']:.2f} | {row['step'] - row['read']:.2f} | {row['gap']:.2f} "
                f"| {100 * row['read'] / row['token']:.0f} % |"
                for row in rows
            ),
            "",
        ]
    )


if __name__ == "__main__":
    main()
