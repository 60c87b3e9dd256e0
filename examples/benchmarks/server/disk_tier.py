"""TTFT of a chat's next message before and after a restart, with and without a disk tier.

    python -m examples.benchmarks.server.disk_tier [MODEL] [--out FILE]

The chat has a system prompt of `WORDS` words; every server gets a warm-up request first.
"""

import argparse
import json
import os
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, NamedTuple

import httpx

from examples.benchmarks.server.served import serving

WORDS, ROUNDS = 1200, 3


class Reply(NamedTuple):
    """A completion and its TTFT in seconds."""

    ttft: float
    prompt_tokens: int
    cached_tokens: int
    token_ids: list[int]


class Server:
    """`podway serve` with these flags, ready for requests."""

    def __init__(self, model: str, *flags: str) -> None:
        self._running = ExitStack()
        common = (model, "--served-model-name", "m", "--store", "memory")
        self.process, self.url = self._running.enter_context(serving([*common, *flags]))
        self.ask("warm up " * 20)

    def ask(self, *words: str) -> tuple[float, int]:
        """Seconds to the first token, and cached tokens of the prompt."""
        reply = self.complete(" ".join(words), 2)
        return reply.ttft, reply.cached_tokens

    def complete(self, prompt: str | list[int], max_tokens: int) -> Reply:
        """The greedy completion of a prompt."""
        body: dict[str, Any] = {"model": "m", "prompt": prompt, "max_tokens": max_tokens}
        body |= {"stream": True, "temperature": 0, "return_token_ids": True}
        body["stream_options"] = {"include_usage": True}
        began, first = time.perf_counter(), 0.0
        ids: list[int] = []
        usage: dict[str, Any] = {}
        with httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=120) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    first = first or time.perf_counter() - began
                    chunk = json.loads(line[6:])
                    for choice in chunk["choices"]:
                        ids += choice.get("token_ids") or []
                    usage = chunk.get("usage") or usage
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return Reply(first, usage["prompt_tokens"], cached, ids)

    def end(self) -> None:
        self._running.close()


def one_round(model: str, number: int, folder: Path) -> dict[str, Any]:
    words = " ".join(f"word{number}x{index}" for index in range(WORDS))
    tier = ("--disk-kv", str(folder))
    server = Server(model, *tier)
    first, _ = server.ask(words)
    before, cached_before = server.ask(words, "and then")
    server.end()
    server = Server(model, *tier)
    after, cached_after = server.ask(words, "and then")
    server.end()
    server = Server(model)
    without, cached_without = server.ask(words, "and then")
    server.end()
    return {
        "first_message": first,
        "next_message": before,
        "after_restart": after,
        "after_restart_without": without,
        "cached": [cached_before, cached_after, cached_without],
    }


def ids_of(name: str, count: int) -> list[int]:
    """Token ids that every vocabulary has."""
    return Random(name).choices(range(300, 2000), k=count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("model", nargs="?", default="random:Qwen2.5-0.5B")
    parser.add_argument("--out", type=Path, default=Path("disk_tier.json"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rounds = [one_round(arguments.model, n, Path(folder)) for n in range(ROUNDS)]
    medians = {key: median(one[key] for one in rounds) for key in rounds[0] if key != "cached"}
    load = os.getloadavg()[0]
    found = {"model": arguments.model, "load": load, "medians": medians, "rounds": rounds}
    arguments.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(medians, indent=1))


if __name__ == "__main__":
    main()
