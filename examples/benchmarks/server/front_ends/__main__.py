"""The HTTP front ends of Podway, vLLM and SGLang over an engine that computes nothing.

    python -m examples.benchmarks.server.front_ends CHECKPOINT [--streams 64 256 1024] [--rate 40]
        [--seconds 4] [--rounds 1] [--port PORT] [--vllm PYTHON] [--vllm-rs FILE] [--sglang PYTHON]
        [--only NAME ...] [--json FILE]

Each server loads CHECKPOINT, which should be tiny, and streams chats to one client. Its engine,
in a process of its own, returns the same token for each running request, `rate` times per second.
PYTHON is that of an environment with the other server; FILE is the program of vLLM's front end in
Rust. The processes of a server but its engine are its front end: their CPU time is divided by the
tokens that the client counts. An engine without a pace would not be the same for all: Podway's
waits for its event loop, the others fill a queue.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from statistics import fmean

import psutil
from tokenizers import Tokenizer

from examples.benchmarks.server.front_ends import client
from examples.benchmarks.server.front_ends.pace import PID_FILE, RATE, TOKEN

HERE = "examples.benchmarks.server.front_ends"
START_SECONDS = 180
STOP_SECONDS = 20
REST_SECONDS = 1  # for the server, after a client has left
NO_NETWORK = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


@dataclass(frozen=True, slots=True)
class Server:
    """A server to measure: `command` without its port."""

    name: str
    command: list[str]
    env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Row:
    """A measurement; CPU time in microseconds per token that the client received, times in
    seconds."""

    server: str
    streams: int
    tokens_per_second: float
    front_end_microseconds: float
    engine_microseconds: float
    gap_p50: float
    gap_p99: float
    tokens_per_event: float
    client_busy: float  # share of a core


def servers(options: argparse.Namespace) -> list[Server]:
    """Those that are asked for, with room for all streams in one iteration."""
    most = str(max(options.streams))
    own = ["--served-model-name", client.MODEL, "--max-model-len", "4096", "--kv-memory", "2GiB"]
    own += ["--max-batch-size", most, "--max-batch-tokens", "65536", "--max-queue-requests", most]
    found = [
        Server(
            "Podway",
            [sys.executable, "-m", f"{HERE}.podway_worker", options.checkpoint, *own],
        )
    ]
    if options.vllm:
        command = [options.vllm, "-m", "vllm.entrypoints.cli.main", "serve", options.checkpoint]
        command += ["--served-model-name", client.MODEL, "--max-model-len", "4096"]
        command += ["--max-num-seqs", most, "--max-num-batched-tokens", "65536", "--enforce-eager"]
        command += ["--distributed-executor-backend", f"{HERE}.vllm_executor.PacedExecutor"]
        command += ["--dtype", "float32", "--disable-uvicorn-access-log"]
        env = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        found += [
            Server("vLLM", command, env),
            Server("vLLM, 2 API servers", [*command, "--api-server-count", "2"], env),
        ]
        if options.vllm_rs:
            env = env | {"VLLM_USE_RUST_FRONTEND": "1", "VLLM_RUST_FRONTEND_PATH": options.vllm_rs}
            found.append(Server("vLLM, Rust front end", command, env))
    if options.sglang:
        command = [options.sglang, "-m", f"{HERE}.sglang_scheduler"]
        command += ["--model-path", options.checkpoint, "--served-model-name", client.MODEL]
        found.append(Server("SGLang", [*command, "--device", "cpu", "--log-level", "warning"]))
    return [each for each in found if not options.only or each.name in options.only]


def token(checkpoint: str) -> str:
    """The id of the client's word."""
    tokenizer = Tokenizer.from_file(str(Path(checkpoint, "tokenizer.json")))
    (found,) = tokenizer.encode(client.WORD.decode(), add_special_tokens=False).ids
    return str(found)


@contextmanager
def running(server: Server, options: argparse.Namespace) -> Iterator[tuple[int, int]]:
    """The server's process ids: that which was started, and its engine."""
    with tempfile.TemporaryDirectory() as directory:
        pid_file, log = Path(directory, "pid"), Path(directory, "log")
        pace = {RATE: str(options.rate), PID_FILE: str(pid_file), TOKEN: token(options.checkpoint)}
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*server.command, "--host", "127.0.0.1", "--port", str(options.port)],
                env={**os.environ, **NO_NETWORK, **server.env, **pace, "PYTHONPATH": os.getcwd()},
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=0,  # Ctrl-C is for this process alone
            )
        tree = [psutil.Process(process.pid)]
        try:
            wait_until_ready(process, options.port, log)
            tree += tree[0].children(recursive=True)
            yield process.pid, int(pid_file.read_text())
        finally:
            process.send_signal(signal.SIGTERM)
            left = psutil.wait_procs(tree, STOP_SECONDS)[1]
            for each in left:
                with suppress(psutil.NoSuchProcess):
                    each.kill()
            process.wait()


def wait_until_ready(process: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
    """Ask for two tokens until they come."""
    body = json.loads(client.BODY) | {"stream": False, "max_tokens": 2}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    for _ in range(START_SECONDS):
        with suppress(OSError), urllib.request.urlopen(request, timeout=60) as answer:
            content = json.load(answer)["choices"][0]["message"]["content"]
            assert content == 2 * client.WORD.decode(), content
            return
        if process.poll() is not None:
            break
        time.sleep(1)
    raise SystemExit(f"the server does not answer:\n{log.read_text()[-3000:]}")


def cpu_seconds(pid: int) -> float:
    """CPU time of all threads of a process."""
    total = 0
    with suppress(FileNotFoundError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):
                total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


def of_server(pid: int, engine: int) -> tuple[float, float]:
    """CPU seconds of the front end's processes, and of the engine's."""
    tree = [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    return sum(cpu_seconds(each) for each in tree if each != engine), cpu_seconds(engine)


def measure(server: str, pids: tuple[int, int], streams: int, options: argparse.Namespace) -> Row:
    """One client, from its first stream to its last."""
    command = [sys.executable, "-m", f"{HERE}.client", str(options.port), str(streams)]
    command.append(str(options.seconds))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        try:
            assert run.stdout.readline() == "begin\n", "the client failed"
            before, began = of_server(*pids), time.perf_counter()
            assert run.stdout.readline() == "end\n", "the client failed"
            after, wall = of_server(*pids), time.perf_counter() - began
            found = json.loads(run.stdout.readline())
        finally:
            run.kill()
    tokens = found["tokens_per_second"] * wall
    front_end, engine = (
        1e6 * (end - begin) / tokens for begin, end in zip(before, after, strict=True)
    )
    return Row(
        server=server,
        streams=streams,
        front_end_microseconds=front_end,
        engine_microseconds=engine,
        **found,
    )


def means(rows: list[Row]) -> list[Row]:
    """One row for each server and number of streams: the means over the rounds."""
    found: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        found.setdefault((row.server, row.streams), []).append(row)
    numbers = [each.name for each in fields(Row)[2:]]
    return [
        Row(*key, *(fmean(getattr(row, name) for row in same) for name in numbers))
        for key, same in found.items()
    ]


def table(rows: list[Row]) -> str:
    """The rows as Markdown."""
    lines = [
        "| | streams | tokens/s | front end, µs of CPU per token | engine | gap p50, ms | p99 |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [row.server, str(row.streams), f"{row.tokens_per_second:,.0f}"]
        cells += [f"{row.front_end_microseconds:.1f}", f"{row.engine_microseconds:.1f}"]
        cells += [f"{1000 * row.gap_p50:.0f}", f"{1000 * row.gap_p99:.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(options: argparse.Namespace) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    if not options.port:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            options.port = listener.getsockname()[1]
    rows: list[Row] = []
    for server in options.rounds * servers(options):
        with running(server, options) as pids:
            for streams in options.streams:
                rows.append(measure(server.name, pids, streams, options))
                print(table(rows[-1:]).splitlines()[-1], flush=True)
                time.sleep(REST_SECONDS)
        if options.json:  # after each server: a later one may not start
            found = {name: getattr(options, name) for name in ("rate", "seconds", "rounds")}
            found |= {"load_average": os.getloadavg(), "rows": list(map(asdict, rows))}
            Path(options.json).write_text(json.dumps(found, indent=1), encoding="utf-8")
    print(table(means(rows)))


if __name__ == "__main__":
    flags = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    flags.add_argument("checkpoint")
    flags.add_argument("--streams", type=int, nargs="+", default=[64, 256, 1024])
    flags.add_argument("--rate", type=float, default=40)
    flags.add_argument("--seconds", type=float, default=4)
    flags.add_argument("--rounds", type=int, default=1)
    flags.add_argument("--port", type=int, default=0, help="default: a free one")
    flags.add_argument("--vllm", metavar="PYTHON")
    flags.add_argument("--vllm-rs", metavar="FILE")
    flags.add_argument("--sglang", metavar="PYTHON")
    flags.add_argument("--only", nargs="+", metavar="NAME")
    flags.add_argument("--json", metavar="FILE")
    main(flags.parse_args())
