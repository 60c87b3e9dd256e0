"""Whole servers without and with speculation: tokens/s and CPU time per token, by turns.

    python -m examples.benchmarks.speculation.servers [--texts again hostile …]
                                    [--clients 1 8 32 64] [--rounds 10] [--out FILE]

For each text, `podway serve` runs without speculation, with each method, and once more without
(`off`, which shows the noise), each with a worker of one thread and with lookahead. In each round
they serve the same requests one after another, in random order: a closed loop of HTTP streams,
which are read by this process. They must send the same text. A ratio is that of a server to the one
without speculation in the same round: of its tokens per second of elapsed time, and of its tokens
per CPU second of the server and its worker. Medians over the rounds are reported, with their 95 %
confidence intervals. One round is served before the first measured one. Texts:

    edit      random weights, temperature 1; each request's `prediction` is the text that it
              answers, with one word in twenty replaced, removed or inserted. (A `logit_bias`
              allows only words of one token, so that the text has the output's tokens.)
    edit_builtin  the same with the built-in model, and without a bias
    again     random weights, temperature 1; each request was answered before with the same seed
    hostile   random weights, temperature 1: every token is a surprise
    loops     the built-in model, greedy and without its chat template, soon repeats itself
    stories   the built-in model, temperature 1, with a `prediction` of unrelated words

Random weights are of 110 M parameters.
"""

import argparse
import asyncio
import gc
import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from statistics import median
from typing import Any
from urllib.parse import urlsplit

import uvloop

from adapters.models.random_checkpoint import random_checkpoint
from adapters.tokenizers import load_token_table
from examples.benchmarks.server.disk_tier import Server
from examples.benchmarks.speculation.engines import save
from examples.benchmarks.speculation.pairs import median_interval
from examples.benchmarks.speculation.texts import EDIT_EVERY, NAMES, OFF

Body = dict[str, Any]
TEXTS = {
    "edit": ("prediction", OFF),
    "edit_builtin": ("prediction", OFF),
    "again": ("suffix", OFF),
    "hostile": ("ngram", "suffix", OFF),
    "loops": ("ngram", OFF),
    "stories": ("ngram", "suffix", "prediction", OFF),
}
OF_RANDOM = ("edit", "again", "hostile")
EDITED = ("edit", "edit_builtin")
OUTPUT_LEN, PROMPT_LEN = 64, 16
MIN_REQUESTS = 4  # per turn, which then takes some tenths of a second or more
FLAGS = ("--threads", "1", "--lookahead", "1", "--no-prefix-cache", "--max-model-len", "512")
QUIET = ("--log-level", "warning")
NUM_WORDS = 200  # that the edited texts of random weights consist of
WORDS = ("river", "cloud", "seven", "paper", "green", "ladder", "monkey", "orange", "window")


@dataclass(frozen=True)
class Turn:
    """What one server did in one round; seconds are elapsed ones and of the CPU."""

    texts: list[str]
    num_tokens: int
    seconds: float
    cpu_seconds: float
    num_drafts: float
    num_accepted: float


class Collected(asyncio.Protocol):
    """Collects a response until the server closes the connection."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.ended = asyncio.Event()

    def data_received(self, data: bytes) -> None:
        self.parts.append(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended.set()


async def post(url: str, body: Body) -> bytes:
    """The whole response to a request on a connection of its own."""
    split, payload = urlsplit(url), json.dumps(body).encode()
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    head = f"POST {path} HTTP/1.1\r\nhost: {split.netloc}\r\nconnection: close\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(payload)}\r\n\r\n"
    loop = asyncio.get_running_loop()
    host, _, port = split.netloc.partition(":")
    transport, collected = await loop.create_connection(Collected, host, int(port))
    transport.write(head.encode() + payload)
    await collected.ended.wait()
    return b"".join(collected.parts)


def text_of(response: bytes) -> tuple[str, int]:
    """The text of a streamed response and the number of its tokens."""
    head, _, rest = response.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200 "):
        raise SystemExit(f"the server rejects the request: {response[:300]!r}")
    body = b""
    while rest:  # a chunk: its length, a line break, the bytes, a line break
        length, _, rest = rest.partition(b"\r\n")
        body, rest = body + rest[: int(length, 16)], rest[int(length, 16) + 2 :]
    text, num_tokens = "", 0
    for line in body.splitlines():
        if line.startswith(b"data: {"):
            chunk = json.loads(line[6:])
            for choice in chunk["choices"]:
                text += choice.get("text") or choice.get("delta", {}).get("content") or ""
            num_tokens = (chunk.get("usage") or {}).get("completion_tokens", num_tokens)
    return text, num_tokens


def cpu_seconds(server: Server) -> float:
    """CPU seconds so far of the threads of the server and its workers."""
    pids = [each.pid for each in (server.process, *server.process.children(recursive=True))]
    files = [file for pid in pids for file in Path(f"/proc/{pid}/task").glob("*/schedstat")]
    return 1e-9 * sum(int(file.read_text().split()[0]) for file in files)


async def drafts(url: str) -> tuple[float, float]:
    """Drafts of the server so far, and how many of them were accepted."""
    split = urlsplit(url)
    reader, writer = await asyncio.open_connection(split.hostname, split.port)
    writer.write(
        f"GET /metrics HTTP/1.1\r\nhost: {split.netloc}\r\nconnection: close\r\n\r\n".encode()
    )
    lines = (await reader.read()).decode().splitlines()
    writer.close()
    found = {
        line.split("{")[0]: float(line.rsplit(" ", 1)[1])
        for line in lines
        if "_tokens_total{" in line
    }
    prefix = "vllm:spec_decode_num"
    return found.get(f"{prefix}_draft_tokens_total", 0.0), found.get(
        f"{prefix}_accepted_tokens_total", 0.0
    )


async def turn(server: Server, bodies: Sequence[Body], clients: int) -> Turn:
    """Serve the requests, `clients` at once."""
    responses, left = [b""] * len(bodies), iter(enumerate(bodies))
    num_drafts, num_accepted = await drafts(server.url)

    async def client() -> None:
        for number, body in left:
            responses[number] = await post(server.url, body)

    began, used = time.perf_counter(), cpu_seconds(server)
    await asyncio.gather(*(client() for _ in range(clients)))
    seconds, used = time.perf_counter() - began, cpu_seconds(server) - used
    found = [text_of(response) for response in responses]
    after = await drafts(server.url)
    return Turn(
        [text for text, _ in found],
        sum(count for _, count in found),
        seconds,
        used,
        after[0] - num_drafts,
        after[1] - num_accepted,
    )


def bodies_of(text: str, count: int, number: int) -> list[Body]:
    """`count` requests of round `number` of a text, without predictions."""
    first = 0 if text == "again" else count * number
    random, found = Random(first + 1), []
    for seed in range(first, first + count):
        body: Body = {"model": "m", "max_tokens": OUTPUT_LEN, "ignore_eos": True, "stream": True}
        body |= {"temperature": 0.0 if text == "loops" else 1.0, "seed": seed}
        body["stream_options"] = {"include_usage": True}
        name = NAMES[seed % len(NAMES)]
        if text in ("again", "hostile"):
            body["prompt"] = random.choices(range(300, 30_000), k=PROMPT_LEN)
        elif text == "loops":
            body["prompt"] = f"{name} said {seed}"
        else:
            content = f"Write a story about {name}, who is {seed}."
            body["messages"] = [{"role": "user", "content": content}]
        if text == "edit":
            body["logit_bias"] = dict.fromkeys(map(str, words_of_one_token()), 100)
        found.append(body)
    return found


@cache
def words_of_one_token() -> list[int]:
    """Tokens of random weights that are a space and a word. A text of such words has no others."""
    table = load_token_table(random_checkpoint("M110"))
    words = [
        number
        for number, token in enumerate(table.tokens)
        if token[:1] == b" " and token[1:].isalpha() and table.encode(token.decode()) == [number]
    ]
    return words[:NUM_WORDS]


def edited(text: str, random: Random) -> str:
    """The text with about one word in `EDIT_EVERY` replaced, removed or inserted."""
    found: list[str] = []
    for word in text.split(" "):
        kind = random.randrange(3 * EDIT_EVERY)
        if kind != 0:
            found.append(word if kind != 1 else random.choice(WORDS))
        if kind == 2:
            found.append(random.choice(WORDS))
    return " ".join(found)


def predicted(bodies: Sequence[Body], texts: Sequence[str] | None) -> list[Body]:
    """The requests with predictions: their edited `texts`, or words unrelated to them."""
    random, found = Random(1), []
    for number, body in enumerate(bodies):
        content = " ".join(random.choices(WORDS, k=OUTPUT_LEN))
        if texts is not None:
            content = edited(texts[number], random)
        found.append(body | {"prediction": {"type": "content", "content": content}})
    return found


async def compare(
    servers: Mapping[str, Server], text: str, clients: int, rounds: int
) -> list[Body]:
    """The figures of each method on one text."""
    turns: list[dict[str, Turn]] = []
    count, random = max(MIN_REQUESTS, 2 * clients), Random(rounds)
    for number in range(rounds + 1):
        bodies, texts = bodies_of(text, count, number), None
        if text in EDITED:
            texts = (await turn(servers["plain"], bodies, clients)).texts
        with_prediction = predicted(bodies, texts) if text in (*EDITED, "stories") else bodies
        order = list(servers)
        random.shuffle(order)
        taken = {}
        for name in order:
            gc.collect()
            asked = with_prediction if name == "prediction" else bodies
            taken[name] = await turn(servers[name], asked, clients)
        turns.append(taken)
    return [
        {"text": text, "method": name, "clients": clients}
        | figures([taken["plain"] for taken in turns], [taken[name] for taken in turns])
        for name in TEXTS[text]
    ]


def figures(off: Sequence[Turn], on: Sequence[Turn]) -> Body:
    """The figures of one method; the first round is not measured."""
    pairs = list(zip(off, on, strict=True))
    rates = [other.seconds / mine.seconds for other, mine in pairs[1:]]
    cpu_rates = [other.cpu_seconds / mine.cpu_seconds for other, mine in pairs[1:]]
    return {
        "off": round(median([each.num_tokens / each.seconds for each in off[1:]]), 1),
        "ratio": round(median(rates), 4),
        "interval": [round(value, 4) for value in median_interval(rates)],
        "off_cpu": round(median([each.num_tokens / each.cpu_seconds for each in off[1:]]), 1),
        "cpu_ratio": round(median(cpu_rates), 4),
        "cpu_interval": [round(value, 4) for value in median_interval(cpu_rates)],
        "drafts": round(sum([each.num_drafts for each in on[1:]])),
        "accepted": round(sum([each.num_accepted for each in on[1:]])),
        "output_tokens": sum([each.num_tokens for each in on[1:]]),
        "same_text": all(mine.texts == other.texts for other, mine in pairs),
    }


def table(rows: Sequence[Body]) -> str:
    """The rows as Markdown."""
    lines = [
        "| text | method | streams | tokens/s, off | on / off | 95 % interval | "
        "per CPU second: off | on / off | 95 % interval | drafts per 100 tokens | accepted |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        low, high = row["interval"]
        cpu_low, cpu_high = row["cpu_interval"]
        drafted = 100 * row["drafts"] / row["output_tokens"]
        share = f"{100 * row['accepted'] / row['drafts']:.0f} %" if row["drafts"] else ""
        lines.append(
            f"| {row['text']} | {row['method']} | {row['clients']} | {row['off']:.0f} | "
            f"{row['ratio']:.3f} | {low:.3f} to {high:.3f} | {row['off_cpu']:.0f} | "
            f"{row['cpu_ratio']:.3f} | {cpu_low:.3f} to {cpu_high:.3f} | {drafted:.1f} | {share} |"
        )
    return "\n".join(lines)


def started(text: str, weights: str) -> dict[str, Server]:
    """A server without speculation, and one for each method."""
    model = ("random:M110", "--weights", weights) if text in OF_RANDOM else ("builtin",)
    found = {"plain": Server(*model, *FLAGS, *QUIET)}
    for name in TEXTS[text]:
        config = json.dumps({"method": name})
        found[name] = Server(
            *model, *FLAGS, *QUIET, *(() if name == OFF else ("--speculative-config", config))
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--texts", nargs="+", default=list(TEXTS), choices=list(TEXTS))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--weights", default="int8", help="of the model of random weights")
    parser.add_argument("--out", type=Path, help="JSON file; rows of earlier runs are kept")
    arguments = parser.parse_args()
    for text in arguments.texts:
        with ExitStack() as stack:
            servers = started(text, arguments.weights)
            for server in servers.values():
                stack.callback(server.end)
            for clients in arguments.clients:
                found = uvloop.run(compare(servers, text, clients, arguments.rounds))
                print(table(found), f"load {os.getloadavg()[0]:.1f}", sep="\n", flush=True)
                for row in found:
                    row |= {"rounds": arguments.rounds, "load": round(os.getloadavg()[0], 1)}
                    row |= {"weights": arguments.weights if text in OF_RANDOM else "auto"}
                    row |= {"threads": 1, "clock": "wall and cpu"}
                if arguments.out is not None:
                    save(found, arguments.out)


if __name__ == "__main__":
    main()
