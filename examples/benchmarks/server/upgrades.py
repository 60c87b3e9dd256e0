"""Upgrade a server again and again under streams in constant load.

    python -m examples.benchmarks.server.upgrades --upgrades 200 --streams 64 --sockets 8 --batches
        --note "the machine" --out examples/benchmarks/results/upgrades

Each client streams one completion after the other, over one HTTP client that keeps connections, or
one response after the other over a WebSocket, and connects again when the server closes it between
two responses. With `--batches` one batch after the other is computed beside them.
Every text must be the one that an undisturbed server gave for the same seed. A gap is the time
between two events of one stream, or from a request to its first event; reported are the longest gap
of each stream during the upgrades, and of as many streams without an upgrade before. The run is
added to upgrades.json in the folder, and README.md is written from all runs there.
"""

import argparse
import asyncio
import json
import ssl
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from examples.benchmarks.written import write_files
from tests.certificates import make_certificate
from tests.conftest import Server, read_url, start_server

PROMPTS = 8  # different requests; each has one text
TOKENS = 48
MODELS = ("builtin", "second")  # requests name each in turn; with `--models 2` they are two models
TABLES = """\
[models.builtin]
model = "builtin"
pinned = true
[models.second]
model = "builtin"
"""
BATCH_LINES = 40
ENDS = ("response.completed", "response.incomplete")
REMARKS = """\
- The batch that was lost in the first run had its output file taken from it: it ended while the new
  server read the batches of the former one for the second time, and ran again without lines.
  Batches are read once more before they run since then.
- WebSockets lost a response in each upgrade before these runs: a connection whose next message was
  being read was closed as one at rest.

Not measured: a GPU, containers and systemd.
"""
ABOUT = """\
# Servers that are replaced again and again under load

`python -m examples.benchmarks.server.upgrades`; the built-in model, one thread. Each client has one
stream of 48 tokens after the other, or one response after the other over a WebSocket, or one batch
of 40 lines after the other; every text is compared with that of an undisturbed server. A gap is the
longest time between two events of a stream, or before the first ([JSON](upgrades.json)). Two
servers share the cores during an upgrade: the new one loads while the former one serves, and then
the former one finishes. Of two models, both are loaded before the new server takes over, since the
former one has them; the streams use both.

| upgrades | | complete | lost | different | gap p50 / p99 / most, s | undisturbed |
|---|---|---|---|---|---|---|
"""


@dataclass
class Load:
    """What the clients have seen."""

    complete: int = 0
    lost: list[str] = field(default_factory=list)
    different: int = 0
    longest_gaps: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, object]:
        """Counts, and quantiles of the longest gap of each stream in seconds."""
        gaps = sorted(self.longest_gaps) or [0.0]
        at = {
            f"gap_p{q}": round(gaps[min(len(gaps) - 1, len(gaps) * q // 100)], 3) for q in (50, 99)
        }
        counts = {"complete": self.complete, "lost": len(self.lost), "different": self.different}
        return {**counts, **at, "gap_max": round(gaps[-1], 3), "errors": self.lost[:5]}


def body_of(number: int) -> dict[str, object]:
    """A request whose text is fixed by its seed."""
    return {
        "model": MODELS[number % len(MODELS)], "prompt": f"Story {number}:", "max_tokens": TOKENS,
        "seed": number, "temperature": 0.9, "ignore_eos": True, "stream": True,
    }  # fmt: skip


def response_of(number: int) -> dict[str, object]:
    """A message that asks for a response whose text is fixed by its seed."""
    return {
        "type": "response.create", "model": "builtin", "input": f"Story {number}:", "seed": number,
        "max_output_tokens": TOKENS, "temperature": 0.9, "ignore_eos": True, "store": False,
    }  # fmt: skip


async def stream(session: aiohttp.ClientSession, url: str, number: int, load: Load) -> str | None:
    """One text, and its longest gap; None if the request was lost."""
    text, last, longest, is_done = "", time.perf_counter(), 0.0, False
    try:
        async with session.post(f"{url}/v1/completions", json=body_of(number)) as response:
            response.raise_for_status()
            async for line in response.content:
                if not line.startswith(b"data: "):
                    continue
                now = time.perf_counter()
                longest, last = max(longest, now - last), now
                if line.startswith(b"data: [DONE]"):
                    is_done = True
                    continue
                text += "".join(each["text"] for each in json.loads(line[6:])["choices"])
    except (aiohttp.ClientError, OSError, KeyError) as error:
        load.lost.append(repr(error))
        return None
    if not is_done:
        load.lost.append("the stream ended without [DONE]")
        return None
    load.complete += 1
    load.longest_gaps.append(longest)
    return text


async def answer(socket: aiohttp.ClientWebSocketResponse, number: int, load: Load) -> str | None:
    """The text of one response over a WebSocket; None if the server has closed it before."""
    text, last, longest = "", time.perf_counter(), 0.0
    await socket.send_json(response_of(number))
    async for message in socket:
        event, now = message.json(), time.perf_counter()
        longest, last = max(longest, now - last), now
        if event["type"] == "response.output_text.delta":
            text += event["delta"]
        elif event["type"] in ENDS:
            load.complete += 1
            load.longest_gaps.append(longest)
            return text
        elif event["type"] in ("error", "response.failed"):
            load.lost.append(message.data)
            return None
    if text:
        load.lost.append(f"a WebSocket was closed with {socket.close_code} within a response")
    return None


async def socket_client(
    session: aiohttp.ClientSession, url: str, texts: Sequence[str], at: int, load: Load,
    stop: asyncio.Event,
) -> None:  # fmt: skip
    """One response after the other over a WebSocket until `stop`."""
    number = at % PROMPTS
    while not stop.is_set():
        try:
            async with session.ws_connect(f"{url}/v1/responses") as socket:
                while not stop.is_set() and not socket.closed:
                    text = await answer(socket, number, load)
                    if text is None:
                        break
                    load.different += bool(texts) and text != texts[number]
                    number = (number + 1) % PROMPTS
        except (aiohttp.ClientError, OSError) as error:
            load.lost.append(repr(error))


async def batch(session: aiohttp.ClientSession, url: str) -> list[str]:
    """The texts of a batch of `BATCH_LINES` completions, in their order."""
    lines = [
        {"custom_id": str(number), "method": "POST", "url": "/v1/completions",
         "body": {**body_of(number % PROMPTS), "model": MODELS[0], "stream": False}}
        for number in range(BATCH_LINES)
    ]  # fmt: skip
    form = aiohttp.FormData({"purpose": "batch"})
    form.add_field("file", "\n".join(map(json.dumps, lines)), filename="lines.jsonl")
    async with session.post(f"{url}/v1/files", data=form) as response:
        file_id = (await response.json())["id"]
    order = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
    async with session.post(f"{url}/v1/batches", json=order) as response:
        status = await response.json()
    while status["status"] not in ("completed", "failed", "expired", "cancelled"):
        await asyncio.sleep(0.5)
        async with session.get(f"{url}/v1/batches/{status['id']}") as response:
            status = await response.json()
    async with session.get(f"{url}/v1/files/{status['output_file_id']}/content") as response:
        rows = [json.loads(line) for line in (await response.text()).splitlines()]
    rows.sort(key=lambda row: int(row["custom_id"]))
    return [row["response"]["body"]["choices"][0]["text"] for row in rows]


async def batch_client(
    session: aiohttp.ClientSession, url: str, texts: Sequence[str], load: Load, stop: asyncio.Event
) -> None:
    """One batch after the other until `stop`."""
    expected = [texts[number % PROMPTS] for number in range(BATCH_LINES)]
    while not stop.is_set():
        try:
            found = await batch(session, url)
        except (aiohttp.ClientError, OSError, KeyError) as error:
            load.lost.append(f"batch: {error!r}")
            continue
        load.complete += 1
        load.different += found != expected


async def client(
    session: aiohttp.ClientSession, url: str, texts: Sequence[str], at: int, load: Load,
    stop: asyncio.Event,
) -> None:  # fmt: skip
    """Stream one text after the other until `stop`."""
    number = at % PROMPTS
    while not stop.is_set():
        text = await stream(session, url, number, load)
        load.different += text is not None and text != texts[number]
        number = (number + 1) % PROMPTS


async def upgrade(server: Server) -> bool:
    """Upgrade; again while the server before still finishes. Whether it has succeeded."""
    command = [sys.executable, "-m", "gateway", "upgrade", "--pid", str(server.pid)]
    while True:
        run = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        _, errors = await run.communicate()
        if run.returncode == 0:
            return True
        if b"still finishes" not in errors:
            sys.stderr.write(errors.decode())
            return False
        await asyncio.sleep(0.2)


async def measure(args: argparse.Namespace, server: Server, url: str) -> dict[str, object]:
    """Load without upgrades, and with them."""
    trusted = ssl._create_unverified_context() if args.tls else True
    connector = aiohttp.TCPConnector(limit=0, ssl=trusted)
    async with aiohttp.ClientSession(connector=connector) as session:
        texts = [await stream(session, url, number, Load()) or "" for number in range(PROMPTS)]
        said: list[str] = []
        if args.sockets:
            async with session.ws_connect(f"{url}/v1/responses") as socket:
                said = [await answer(socket, number, Load()) or "" for number in range(PROMPTS)]
        results: dict[str, object] = {}
        num_upgrades, took = 0, []
        for name in ("undisturbed", "upgraded"):
            load, by_socket, batches, stop = Load(), Load(), Load(), asyncio.Event()
            clients = [
                asyncio.create_task(client(session, url, texts, at, load, stop))
                for at in range(args.streams)
            ]
            clients += [
                asyncio.create_task(socket_client(session, url, said, at, by_socket, stop))
                for at in range(args.sockets)
            ]
            if args.batches:
                work = batch_client(session, url, texts, batches, stop)
                clients.append(asyncio.create_task(work))
            if name == "undisturbed":
                await asyncio.sleep(10)
            deadline = time.perf_counter() + args.seconds
            while name == "upgraded" and num_upgrades < args.upgrades:
                began = time.perf_counter()
                if began > deadline or not await upgrade(server):
                    break
                num_upgrades += 1
                took.append(time.perf_counter() - began)
            stop.set()
            await asyncio.gather(*clients)
            results[name] = load.summary()
            if args.sockets:
                results[f"{name}, WebSockets"] = by_socket.summary()
            if args.batches:
                results[f"{name}, batches"] = batches.summary()
    took.sort()
    seconds = round(took[len(took) // 2], 2) if took else None
    return {"upgrades": num_upgrades, "upgrade_seconds_p50": seconds, **results}


def page(runs: Sequence[Mapping[str, Any]]) -> str:
    """The runs as Markdown."""
    lines = []
    for run in runs:
        what = f"{run['streams']} streams{' with TLS' if run['tls'] else ''}"
        if run.get("replicas", 1) > 1:
            what += f", {run['replicas']} replicas"
        if run.get("models", 1) > 1:
            what += f", {run['models']} models"
        for suffix, name in (("", what), (", WebSockets", "WebSockets"), (", batches", "batches")):
            if (after := run.get(f"upgraded{suffix}")) is not None:
                before = run[f"undisturbed{suffix}"]
                counts = f"{after['complete']:,} | {after['lost']} | {after['different']}"
                lines.append(
                    f"| {run['upgrades']} | {name} | {counts} | {_gaps(after)} | {_gaps(before)} |"
                )
    lines.append("")
    for number, run in enumerate(runs, 1):
        seconds = run["upgrade_seconds_p50"]
        lines.append(f"- Run {number}: {run['note']}; an upgrade takes {seconds} s (median).")
    return ABOUT + "\n".join(lines) + "\n" + REMARKS


def _gaps(summary: Mapping[str, Any]) -> str:
    if not summary["gap_max"]:
        return ""
    return f"{summary['gap_p50']} / {summary['gap_p99']} / {summary['gap_max']}"


def flags_of(args: argparse.Namespace, directory: Path) -> list[str]:
    """The flags of the server, whose files are in the directory."""
    flags = ["--cost-model", "none", "--threads", "1", "--kv-slots", "32768"]
    if args.models > 1:
        (directory / "models.toml").write_text(TABLES)
        flags += ["--config", str(directory / "models.toml")]
    else:
        flags += [f"--served-model-name={name}" for name in MODELS]
    if args.replicas > 1:
        flags += ["--replicas", str(args.replicas)]
    if args.batches:
        flags += ["--store", str(directory / "store.sqlite")]
    if args.tls:
        certificate, key = make_certificate(directory, "upgrades")
        flags += ["--tls-cert", str(certificate), "--tls-key", str(key)]
    return flags


def main() -> None:
    """Run, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--upgrades", type=int, default=200)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no upgrade after that")
    parser.add_argument("--tls", action="store_true")
    parser.add_argument("--sockets", type=int, default=0, help="clients with a WebSocket")
    parser.add_argument("--batches", action="store_true", help="compute batches beside the streams")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--models", type=int, choices=(1, len(MODELS)), default=1)
    parser.add_argument("--note", default="", help="the machine, and what else ran on it")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        with start_server(directory, *flags_of(args, directory)) as server:
            url = read_url(server)
            result = asyncio.run(measure(args, server, url))
            server.terminate()
            result["exit_code"] = server.wait(60)
    result |= {"streams": args.streams, "sockets": args.sockets, "batches": args.batches}
    result |= {"replicas": args.replicas, "models": args.models}
    result |= {"tls": args.tls, "tokens": TOKENS, "note": args.note}
    sys.stdout.write(json.dumps(result, indent=1) + "\n")
    if args.out is not None:
        file = args.out / "upgrades.json"
        runs = [*(json.loads(file.read_text()) if file.exists() else []), result]
        write_files(args.out, {"upgrades.json": runs, "README.md": page(runs)})


if __name__ == "__main__":
    main()
