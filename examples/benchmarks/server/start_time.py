"""How long servers take from their start to the first token, and how much memory they use.

    python -m examples.benchmarks.server.start_time SERVERS.toml [--rounds 3]
        [--only NAME ...] [--out DIR]

SERVERS.toml names the servers as in `examples.benchmarks.peers`; each also has the files that it
reads. A cold start is one whose files are not in the page cache. The very first start of Podway,
which compiles kernels and packs the weights, has to be done before. Writes figures.json and
README.md with the table beside SERVERS.toml.
"""

import argparse
import json
import os
import sys
import time
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from examples.benchmarks.peers.servers import Server, Up, answer, read_servers, running

Figures = dict[str, Any]
PROMPT, OUTPUT = 128, 64  # tokens of the request after which memory is measured again
COLUMNS = {
    "warm_seconds": "first token, warm s",
    "cold_seconds": "first token, cold s",
    "restart_seconds": "token after kill -9, s",
    "pss_mib_at_rest": "PSS at rest MiB",
    "pss_mib_after": "PSS after a request MiB",
}


def main() -> None:
    options = parse()
    tables = tomllib.loads(options.servers.read_text())
    chosen = {one.name: one for one in read_servers(tables) if is_chosen(one.name, options.only)}
    files = {
        one["name"]: [os.path.expandvars(name) for name in one["files"]] for one in tables["server"]
    }
    out: Path = options.out or options.servers.parent
    rounds: list[Figures] = []
    for number in range(options.rounds):
        for name, server in chosen.items():
            print(f"round {number + 1}: {name}", file=sys.stderr, flush=True)
            found = measure(server, [Path(each) for each in files[name]])
            rounds.append({"round": number, "server": name, "load": os.getloadavg()[0], **found})
            print(rounds[-1], file=sys.stderr, flush=True)
            write(out, rounds)
    print((out / "README.md").read_text())


def write(out: Path, rounds: list[Figures]) -> None:
    """What has been measured up to now."""
    out.mkdir(parents=True, exist_ok=True)
    figures = {"cpu": cpu_name(), "cores": os.cpu_count(), "rounds": rounds}
    (out / "figures.json").write_text(json.dumps(figures, indent=1) + "\n")
    (out / "README.md").write_text(page(rounds))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("servers", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--out", type=Path, metavar="DIR")
    return parser.parse_args()


def is_chosen(name: str, only: list[str]) -> bool:
    return not only or name in only


def measure(server: Server, files: Iterable[Path]) -> Figures:
    """A cold start, then a warm one with a request and, if there is a worker, its death."""
    drop_from_page_cache(files)
    with running(server) as up:
        found: Figures = {"cold_seconds": up.first_token_seconds}
    with running(server) as up:
        found |= {"warm_seconds": up.first_token_seconds, "pss_mib_at_rest": up.pss_mib()}
        answer(up.url, up.model, [300 + token for token in range(PROMPT)], OUTPUT)
        found["pss_mib_after"] = up.pss_mib()
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


def page(rounds: list[Figures]) -> str:
    """The medians of all rounds as a table."""
    by_server: dict[str, list[Mapping[str, Any]]] = {}
    for one in rounds:
        by_server.setdefault(one["server"], []).append(one)
    lines = [
        "# From the start to the first token",
        "",
        "Written by `python -m examples.benchmarks.server.start_time`: medians of at most "
        f"{max(one['round'] for one in rounds) + 1} rounds. Cold: without the files in the page "
        f"cache. {cpu_name()}, {os.cpu_count()} cores; the load before each start is in "
        "[figures.json](figures.json).",
        "",
        "| server | " + " | ".join(COLUMNS.values()) + " |",
        "|---|" + "---|" * len(COLUMNS),
    ]
    for name, found in by_server.items():
        cells = [cell([one[key] for one in found if key in one]) for key in COLUMNS]
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
