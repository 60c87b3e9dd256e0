"""TTFT of a chat's next message on a second server, with and without a store that both share.

    python -m examples.benchmarks.cluster.shared_store [MODEL] [--rounds 5] [--out FILE]

Starts `mooncake_master` and three servers on this machine: two with `--kv-store mooncake://`, and
one without. In each round the first server answers the first message of a new chat, of
`PROMPT_TOKENS` tokens; when its KV is in the store, the next message goes to the second server,
which has not seen the chat, then to the first one, and to the one without a store. A page is
written beside the JSON file.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from examples.benchmarks.cluster.routers import free_port
from examples.benchmarks.server.disk_tier import Reply, Server, ids_of
from examples.benchmarks.server.start_time import cpu_name

PROMPT_TOKENS, NEXT_TOKENS = 2000, 16
SECONDS_TO_START, SECONDS_TO_SAVE = 20.0, 30.0
COMMAND = str(Path(sys.executable).with_name("mooncake_master"))


@contextmanager
def running_master(segment: str, command: str = COMMAND) -> Iterator[str]:
    """The URL of a store on this machine, to which each server adds so much memory."""
    port, metrics_port = free_port(), free_port()
    flags = (f"--rpc_port={port}", f"--metrics_port={metrics_port}", "--rpc_address=127.0.0.1")
    process = subprocess.Popen(
        [command, *flags, "--metrics_host=127.0.0.1"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + SECONDS_TO_START
        while time.monotonic() < deadline:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.05)
        yield f"mooncake://127.0.0.1:{port}?segment={segment}"
    finally:
        process.kill()
        process.wait()


def slots_of(server: Server) -> dict[str, float]:
    """Cached KV slots by tier."""
    start = 'podway_kv_slots{state="cached",tier="'
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    found = (line[len(start) :].split('"} ') for line in lines if line.startswith(start))
    return {tier: float(count) for tier, count in found}


def wait_until_saved(server: Server) -> None:
    """Wait until all cached blocks of the server are in the store."""
    deadline = time.monotonic() + SECONDS_TO_SAVE
    while time.monotonic() < deadline:
        slots = slots_of(server)
        if 0 < slots["device"] <= slots["store"]:
            return
        time.sleep(0.05)
    raise SystemExit(f"the KV was not saved in {SECONDS_TO_SAVE:.0f} s: {slots}")


def one_round(number: int, first: Server, second: Server, without: Server) -> dict[str, Any]:
    prompt = ids_of(f"chat{number}", PROMPT_TOKENS)
    replies = {"first_message": first.complete(prompt, 16)}
    wait_until_saved(first)
    following = prompt + replies["first_message"].token_ids + ids_of("next", NEXT_TOKENS)
    for name, server in (("other", second), ("same", first), ("without", without)):
        replies[name] = server.complete(following, 16)
    answers = {tuple(replies[name].token_ids) for name in ("same", "other", "without")}
    return {**{name: _figures(each) for name, each in replies.items()}, "answers": len(answers)}


def _figures(reply: Reply) -> dict[str, float]:
    return {"ttft": reply.ttft, "prompt": reply.prompt_tokens, "cached": reply.cached_tokens}


TITLES = {
    "first_message": "first message",
    "same": "next message, same server",
    "other": "next message, another server with the store",
    "without": "next message, another server without a store",
}


def page(found: Mapping[str, Any]) -> str:
    """The page of results."""
    before, after = found["load"]
    lines = [
        "# A chat's next message on another server",
        "",
        f"`python -m examples.benchmarks.cluster.shared_store {found['model']}`: a first message "
        f"of {found['prompt_tokens']:,} tokens, then the next one",
        f"of {found['next_tokens']} tokens; Mooncake Store over TCP on this machine, servers of "
        f"one compute thread, medians of {len(found['rounds'])} chats; {found['cpu']}, load",
        f"average {before:.1f} before and {after:.1f} after ([JSON](shared_store.json)).",
        "",
        "| | prompt tokens found cached | time to the first token |",
        "|---|---|---|",
    ]
    for key, title in TITLES.items():
        cached = median(one[key]["cached"] for one in found["rounds"])
        lines.append(f"| {title} | {cached:,.0f} | {1e3 * found['medians'][key]:.0f} ms |")
    times = found["medians"]["without"] / found["medians"]["other"]
    ending = f"With the store the other server's first token comes {times:.1f} times as soon."
    return "\n".join([*lines, "", ending, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("model", nargs="?", default="random:M110")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("shared_store.json"))
    arguments = parser.parse_args()
    before = os.getloadavg()[0]
    with ExitStack() as stack:
        store = stack.enter_context(running_master("1GiB"))

        def start(*flags: str) -> Server:
            server = Server(arguments.model, "--threads", "1", "--cost-model", "none", *flags)
            stack.callback(server.end)
            return server

        servers = (start("--kv-store", store), start("--kv-store", store), start())
        rounds = [one_round(number, *servers) for number in range(arguments.rounds)]
    kinds = [key for key in rounds[0] if key != "answers"]
    found = {
        "model": arguments.model,
        "prompt_tokens": PROMPT_TOKENS,
        "next_tokens": NEXT_TOKENS,
        "cpu": cpu_name(),
        "load": [round(before, 1), round(os.getloadavg()[0], 1)],
        "medians": {key: median(one[key]["ttft"] for one in rounds) for key in kinds},
        "rounds": rounds,
    }
    arguments.out.write_text(json.dumps(found, indent=1) + "\n")
    arguments.out.with_suffix(".md").write_text(page(found))
    print(page(found))


if __name__ == "__main__":
    main()
