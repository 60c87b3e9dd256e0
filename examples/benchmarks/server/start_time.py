"""How long servers take from their start to the first token, and how much memory they use.

    python -m examples.benchmarks.server.start_time SERVERS.toml [--rounds 3]
        [--only NAME ...] [--out DIR]

SERVERS.toml names the servers as in `examples.benchmarks.peers`; each also has the files that it
reads and, if it is a Podway server, a `cache`, a directory inside `$CACHE`. This is a new directory
for each run, so the first start of these servers compiles kernels, packs the weights and measures
the cost of iterations; later starts find all of it. A cold start is one whose files are not in the
page cache. Writes figures.json and README.md with the table beside SERVERS.toml.
"""

import argparse
import os
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from examples.benchmarks.peers.servers import Server, Up, answer, read_servers, running
from examples.benchmarks.written import write_files

Figures = dict[str, Any]
PROMPT, OUTPUT = 128, 64  # tokens of the request after which memory is measured again
WEIGHT_FILES = (".packed", ".gguf")
FLUSH_SECONDS = 120.0  # until a first start's packed weights are on the disk
COLUMNS: tuple[tuple[str, Callable[[Figures], float | None]], ...] = (
    ("very first start s", lambda one: one.get("first_seconds")),
    ("first token, warm s", lambda one: one.get("warm_seconds")),
    ("CPU s of a warm start", lambda one: one.get("cpu_seconds")),
    ("first token, cold s", lambda one: one.get("cold_seconds")),
    ("token after kill -9, s", lambda one: one.get("restart_seconds")),
    ("PSS at rest MiB", lambda one: one.get("pss_mib_at_rest")),
    ("PSS after a request MiB", lambda one: one.get("pss_mib_after")),
    ("weights + KV in use MiB", lambda one: needed_mib(one)),
    ("PSS / (weights + KV)", lambda one: ratio(one)),
)


def main() -> None:
    options = parse()
    with tempfile.TemporaryDirectory(prefix="podway-start-", dir=options.scratch) as cache:
        os.environ["CACHE"] = cache
        tables = tomllib.loads(options.servers.read_text())
        chosen = [
            (one, server)
            for one, server in zip(tables["server"], read_servers(tables), strict=True)
            if not options.only or server.name in options.only
        ]
        out: Path = options.out or options.servers.parent
        rounds = [
            {"round": 0, "server": server.name, "first_seconds": first_start(server, Path(cache))}
            for one, server in chosen
            if one.get("cache")
        ]
        for number in range(options.rounds):
            for one, server in chosen:
                found = {"round": number, "server": server.name, "load": os.getloadavg()[0]}
                files = [Path(os.path.expandvars(name)) for name in one["files"]]
                found |= measure(server, files)
                found["kv_mib"] = (PROMPT + OUTPUT) * one["kv_bytes_per_token"] / (1 << 20)
                rounds.append(found)
                print(found, file=sys.stderr, flush=True)
                write(out, rounds)
    print((out / "README.md").read_text())


def write(out: Path, rounds: list[Figures]) -> None:
    """What has been measured up to now."""
    figures = {"cpu": cpu_name(), "cores": os.cpu_count(), "rounds": rounds}
    write_files(out, {"figures.json": figures, "README.md": page(figures)})


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("servers", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--out", type=Path, metavar="DIR")
    parser.add_argument(
        "--scratch", type=Path, metavar="DIR", help="where $CACHE is made, on a disk (not tmpfs)"
    )
    return parser.parse_args()


def first_start(server: Server, cache: Path) -> float:
    """The seconds to the first token with an empty cache; what it caches is on the disk then."""
    with running(server) as up:
        until = time.monotonic() + FLUSH_SECONDS
        while any(cache.rglob("*.new")) and time.monotonic() < until:
            time.sleep(0.1)
        print(f"{server.name}: {up.first_token_seconds:.2f} s first", file=sys.stderr, flush=True)
        return up.first_token_seconds


def measure(server: Server, files: Iterable[Path]) -> Figures:
    """A cold start, then a warm one with a request and, if there is a worker, its death."""
    drop_from_page_cache(files)
    with running(server) as up:
        found: Figures = {"cold_seconds": up.first_token_seconds}
    with running(server) as up:
        found |= {"warm_seconds": up.first_token_seconds, "cpu_seconds": up.cpu_seconds()}
        found["pss_mib_at_rest"] = up.pss_mib()
        answer(up.url, up.model, [300 + token for token in range(PROMPT)], OUTPUT)
        found |= {"pss_mib_after": up.pss_mib(), "weights_mib": weight_bytes(up) / (1 << 20)}
        if (worker := worker_of(up)) is not None:
            found["restart_seconds"] = seconds_after_kill(up, worker)
    return found


def worker_of(up: Up) -> psutil.Process | None:
    """Podway's worker process, which it starts again when it dies."""
    found = [process for process in up.tree() if process.name() == "podway-worker"]
    return found[0] if found else None


def seconds_after_kill(up: Up, worker: psutil.Process) -> float:
    """From SIGKILL to the worker until the next token."""
    worker.kill()
    killed_at = time.monotonic()
    while True:
        try:
            answer(up.url, up.model, "hi", 1)
            return time.monotonic() - killed_at
        except OSError:  # rejected while the worker starts
            time.sleep(0.01)


def weight_bytes(up: Up) -> int:
    """The sizes of the weight files that the server's processes have mapped, each once."""
    paths = {
        mapping.path
        for process in up.tree()
        for mapping in process.memory_maps()
        if mapping.path.endswith(WEIGHT_FILES)
    }
    return sum(os.path.getsize(path) for path in paths)


def drop_from_page_cache(files: Iterable[Path]) -> None:
    """Drop these files, and those in these directories, unless another process maps them."""
    for path in files:
        for each in [path] if path.is_file() else path.rglob("*"):
            if each.is_file():
                descriptor = os.open(each, os.O_RDONLY)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(descriptor)


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))


def needed_mib(one: Figures) -> float | None:
    """The weights and the KV of the request's tokens; None if no weight file is mapped."""
    return one["weights_mib"] + one["kv_mib"] if one.get("weights_mib") else None


def ratio(one: Figures) -> float | None:
    needed = needed_mib(one)
    return None if needed is None else one["pss_mib_after"] / needed


def page(figures: Figures) -> str:
    """The medians of all rounds as a table."""
    rounds: list[Figures] = figures["rounds"]
    by_server: dict[str, list[Figures]] = {}
    for one in sorted(rounds, key=lambda one: one["round"]):
        by_server.setdefault(one["server"], []).append(one)
    loads = [one["load"] for one in rounds if "load" in one]
    num_rounds = max(one["round"] for one in rounds) + 1
    lines = [
        "# From the start to the first token",
        "",
        "Written by `python -m examples.benchmarks.server.start_time servers.toml`: medians of "
        f"{num_rounds} rounds, {figures['cpu']}, {figures['cores']} cores, "
        f"load {min(loads, default=0):.1f} to {max(loads, default=0):.1f}. The very first start, "
        "measured once, compiles kernels and packs the weights. "
        "Cold: the files that a start reads, also those of Python packages, are not in the page "
        f"cache. The request has {PROMPT} tokens of prompt and {OUTPUT} of output; weights are the "
        "weight files that processes map.",
        "",
        "| server | " + " | ".join(title for title, _ in COLUMNS) + " |",
        "|---|" + "---|" * len(COLUMNS),
    ]
    for name, found in by_server.items():
        columns = [[value(one) for one in found] for _, value in COLUMNS]
        cells = [cell([each for each in column if each is not None]) for column in columns]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def cell(values: list[float]) -> str:
    """The median with three digits; empty if nothing was measured."""
    if not values:
        return ""
    middle = median(values)
    return f"{middle:,.0f}" if middle >= 100 else f"{middle:.2f}"


if __name__ == "__main__":
    main()
