"""TTFT of a chat's next message before and after a restart, with and without a disk tier.

    python -m examples.benchmarks.server.disk_tier [MODEL] [--out FILE] [--read-ahead]

With `--read-ahead` a page of Markdown is written beside the JSON file.

The chat has a system prompt of `WORDS` words; every server gets a warm-up request first. With
`--read-ahead` the next messages of chats with `CHAT_TOKENS` tokens arrive while another request's
prompt of `--other-tokens` tokens is computed, on servers with and without read-ahead in turns; the
files are not in the page cache.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, NamedTuple

import httpx

from examples.benchmarks.cluster.routers import free_port
from examples.benchmarks.server.start_time import cpu_name

WORDS, ROUNDS = 1200, 3
CHATS, CHAT_TOKENS = 6, 3000  # of a server, with --read-ahead
LEAD_SECONDS = 0.05  # from the other request to the chat's next message


class Reply(NamedTuple):
    """A completion and its TTFT in seconds."""

    ttft: float
    prompt_tokens: int
    cached_tokens: int
    token_ids: list[int]


class Server:
    """`podway serve` with these flags, ready for requests."""

    def __init__(self, model: str, *flags: str) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        common = ("--port", str(port), "--served-model-name", "m", "--store", "memory")
        command = [sys.executable, "-m", "gateway", "serve", model, *common, *flags]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        while True:
            with suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/ready").status_code == 200:
                    break
            time.sleep(0.1)
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
        self.process.send_signal(signal.SIGTERM)
        self.process.wait()


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


def evict_from_page_cache(folder: Path) -> None:
    """Drop the tier's files from the page cache, so that reads go to the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def ids_of(name: str, count: int) -> list[int]:
    """Token ids that every vocabulary has."""
    return Random(name).choices(range(300, 2000), k=count)


def while_busy(server: Server, number: int, other: list[int]) -> Reply:
    """Chat `number`'s next message beside another request's prompt."""
    with ThreadPoolExecutor(1) as threads:
        busy = threads.submit(server.complete, other, 1)
        time.sleep(LEAD_SECONDS)
        found = server.complete(ids_of(f"chat{number}", CHAT_TOKENS) + ids_of("next", 8), 2)
        busy.result()
    return found


def read_ahead(model: str, other_tokens: int, folder: Path) -> dict[str, Any]:
    """The same chats after restarts with and without read-ahead, in turns."""
    tier = ("--disk-kv", str(folder))
    server = Server(model, *tier)
    for number in range(CHATS):
        server.complete(ids_of(f"chat{number}", CHAT_TOKENS), 2)
    server.end()
    stored = sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())
    found: dict[str, list[float]] = {"with": [], "without": []}
    cached: dict[str, list[int]] = {"with": [], "without": []}
    for turn in range(4):
        name = ("with", "without")[turn % 2]
        evict_from_page_cache(folder)
        flag = "--disk-kv-read-ahead" if name == "with" else "--no-disk-kv-read-ahead"
        server = Server(model, *tier, flag)
        for number in range(CHATS):
            reply = while_busy(server, number, ids_of(f"other{turn}x{number}", other_tokens))
            found[name].append(reply.ttft)
            cached[name].append(reply.cached_tokens)
        server.end()
    medians = {name: median(values) for name, values in found.items()}
    return {
        "model": model,
        "chat_tokens": CHAT_TOKENS,
        "other_tokens": other_tokens,
        "chat_mib": stored / CHATS / 2**20,
        "medians": medians,
        "ttft": found,
        "cached": cached,
    }


def read_ahead_page(found: Mapping[str, Any]) -> str:
    """The page of results with read-ahead."""
    rows = [
        f"| {name} read-ahead | {1e3 * min(found['ttft'][name]):.0f} ms | "
        f"{1e3 * found['medians'][name]:.0f} ms | {1e3 * max(found['ttft'][name]):.0f} ms |"
        for name in ("without", "with")
    ]
    cached = [count for counts in found["cached"].values() for count in counts]
    span = " to ".join(f"{count:,}" for count in sorted({min(cached), max(cached)}))
    return "\n".join(
        [
            "# Reading ahead what a waiting request will load",
            "",
            f"`python -m examples.benchmarks.server.disk_tier {found['model']} --read-ahead "
            f"--other-tokens {found['other_tokens']}`:",
            f"time to the first token of a chat's next message, of which {span} "
            f"of {found['chat_tokens']:,} tokens came from the disk tier",
            f"({found['chat_mib']:.0f} MiB per chat, not in the page cache), and which arrived "
            f"while a prompt of {found['other_tokens']:,} tokens was computed.",
            f"{len(found['ttft']['with'])} messages each, on servers in turns; {found['cpu']}, "
            f"load average {found['load']:.1f} ([JSON](read_ahead.json)).",
            "",
            "| | least | median | most |",
            "|---|---|---|---|",
            *rows,
            "",
            f"The medians' ratio is {found['medians']['with'] / found['medians']['without']:.2f}.",
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("model", nargs="?", default="random:Qwen2.5-0.5B")
    parser.add_argument("--out", type=Path, default=Path("disk_tier.json"))
    parser.add_argument("--read-ahead", action="store_true")
    parser.add_argument("--other-tokens", type=int, default=512)
    arguments = parser.parse_args()
    if arguments.read_ahead:
        with tempfile.TemporaryDirectory() as folder:
            ahead = read_ahead(arguments.model, arguments.other_tokens, Path(folder))
        ahead |= {"cpu": cpu_name(), "load": os.getloadavg()[0]}
        arguments.out.write_text(json.dumps(ahead, indent=1) + "\n")
        arguments.out.with_suffix(".md").write_text(read_ahead_page(ahead))
        print(read_ahead_page(ahead))
        return
    with tempfile.TemporaryDirectory() as folder:
        rounds = [one_round(arguments.model, n, Path(folder)) for n in range(ROUNDS)]
    medians = {key: median(one[key] for one in rounds) for key in rounds[0] if key != "cached"}
    load = os.getloadavg()[0]
    found = {"model": arguments.model, "load": load, "medians": medians, "rounds": rounds}
    arguments.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(medians, indent=1))


if __name__ == "__main__":
    main()
