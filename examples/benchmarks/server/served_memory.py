"""What the memory of a served model is: the PSS of the server and its worker by kind of mapping.

    python -m examples.benchmarks.server.served_memory SERVERS.toml OUT [--only NAME ...]

SERVERS.toml names Podway servers as in `examples.benchmarks.peers`. Each is measured at rest, after
a request, and after requests at the same time, in its second start, which finds compiled kernels
and packed weights. Also measures what imports take, in processes of their own. Writes figures.json
and README.md in OUT; servers that are not measured keep their figures.
"""

import argparse
import json
import subprocess
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from engine.worker.cpu.native_formats import kv_format
from examples.benchmarks.peers.servers import Server, Up, answer, read_servers, running
from examples.benchmarks.server.start_time import cpu_name
from examples.benchmarks.written import write_files

Figures = dict[str, Any]
PROMPT, OUTPUT, STREAMS = 128, 64, 32
REST_SECONDS = 1.0
RESERVED_BYTES = 1 << 29  # of an anonymous mapping: that of the KV cache
MOMENTS = {
    "at_rest": "at rest",
    "after_a_request": "after a request",
    "after_streams": f"after {STREAMS} more at once",
}
KINDS = ("weights", "kv", "checkpoint", "heap", "anon", "libraries")
IMPORTS = {"torch": "torch", "numba": "numba", "server_modules": "gateway.serve.command"}
IMPORT = """
import gc, importlib, psutil, sys
gc.disable()
from engine.worker.process import torch_import
torch_import.skip_meta_registrations(), torch_import.import_unused_later()
torch_import.skip_scipy()
{before}
own = lambda: sum(each.private_dirty for each in psutil.Process().memory_maps())
began = own()
importlib.import_module({name!r})
print(own() - began)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("servers", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME")
    options = parser.parse_args()
    path = options.out / "figures.json"
    figures: Figures = json.loads(path.read_text()) if path.exists() else {"servers": {}}
    figures |= {"unit": "MiB PSS", "cpu": cpu_name(), "private_dirty_of_imports": imports()}
    figures["kv_dtype"] = str(kv_format("auto")).removeprefix("torch.")
    for server in read_servers(tomllib.loads(options.servers.read_text())):
        if not options.only or server.name in options.only:
            figures["servers"][server.name] = measure(server)
        write_files(options.out, {"figures.json": figures, "README.md": page(figures)})


def imports() -> dict[str, float]:
    """The pages that imports write, in MiB."""
    found = {}
    for name, module in IMPORTS.items():
        program = IMPORT.format(before="import torch" if name == "numba" else "", name=module)
        ran = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
        found[name] = round(int(ran.stdout) / (1 << 20), 1)
    return found


def measure(server: Server) -> Figures:
    """The memory of one server at each moment."""
    with running(server):
        pass  # what this start compiles and packs is cached
    with running(server) as up:
        time.sleep(REST_SECONDS)
        found = {"at_rest": memory(up)}
        ask(up, 0)
        found["after_a_request"] = memory(up)
        with ThreadPoolExecutor(STREAMS) as pool:
            list(pool.map(lambda number: ask(up, number), range(1, STREAMS + 1)))
        found["after_streams"] = memory(up)
    print(server.name, {name: one["total"] for name, one in found.items()}, file=sys.stderr)
    return found


def ask(up: Up, number: int) -> None:
    """A request whose prompt has no prefix in common with those of other numbers."""
    first = 300 + number * PROMPT
    answer(up.url, up.model, [*range(first, first + PROMPT)], OUTPUT)


def memory(up: Up) -> Figures:
    """The PSS of the server and of its worker by kind, in MiB."""
    found: Figures = {}
    for process in up.tree():
        name = "worker" if process.name() == "podway-worker" else "server"
        found[name] = {kind: round(size / (1 << 20), 1) for kind, size in kinds(process).items()}
    return found | {"total": round(sum(sum(one.values()) for one in found.values()))}


def kinds(process: psutil.Process) -> Mapping[str, int]:
    """The PSS of a process by kind of mapping, in bytes."""
    sizes: Counter[str] = Counter(dict.fromkeys(KINDS, 0))
    for mapping in process.memory_maps(grouped=False):
        sizes[kind_of(mapping.path, mapping.size)] += mapping.pss
    return sizes


def kind_of(path: str, size: int) -> str:
    """The kind of a mapping of `size` bytes."""
    if path.endswith(".packed"):
        return "weights"
    if path.endswith((".safetensors", ".gguf")):
        return "checkpoint"
    if path == "[anon]":
        return "kv" if size >= RESERVED_BYTES else "anon"
    return "heap" if path == "[heap]" else "libraries"


def page(figures: Figures) -> str:
    """The totals and their parts as tables."""
    servers: Mapping[str, Figures] = figures["servers"]
    lines = [
        "# The memory of served models",
        "",
        "Written by `python -m examples.benchmarks.server.served_memory servers.toml .`: PSS in "
        f"MiB of both processes, {figures['cpu']}, warm start, one run. Each "
        f"request has {PROMPT} tokens of prompt and {OUTPUT} of output; KV is in "
        f"{figures['kv_dtype']}, and that of ended requests stays for prompts that begin alike.",
        "",
        "| server | moment | total | weights | KV | checkpoint | worker, rest | server | "
        "total / (weights + KV) |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, moments in servers.items():
        for moment, title in MOMENTS.items():
            lines.append(f"| {name} | {title} | " + " | ".join(cells(moments[moment])) + " |")
    imported: Mapping[str, float] = figures["private_dirty_of_imports"]
    listed = ", ".join(f"`{IMPORTS[name]}` {size:.0f}" for name, size in imported.items())
    lines += ["", f"Pages that an import writes, in MiB: {listed}."]
    return "\n".join(lines) + "\n"


def cells(one: Figures) -> list[str]:
    """The parts of a total."""
    worker: Mapping[str, float] = one["worker"]
    rest = sum(worker[kind] for kind in ("heap", "anon", "libraries"))
    parts = (
        worker["weights"],
        worker["kv"],
        worker["checkpoint"],
        rest,
        sum(one["server"].values()),
    )
    ratio = one["total"] / (worker["weights"] + worker["kv"])
    return [f"{one['total']:,}", *(f"{part:,.0f}" for part in parts), f"{ratio:.2f}"]


if __name__ == "__main__":
    main()
