"""Models of 4 to 30 billion parameters beside other servers: streams alone, 4 and 16 streams, TTFT
of long prompts, PSS.

    python -m examples.benchmarks.peers.larger PEERS [--models NAME ...] [--formats NAME ...]
        [--loads NAME ...] [--programs NAME ...] [--context TOKENS] [--rounds 3] [--add] [--list]
        [--out DIR]

PEERS holds what the other servers need: gguf/MODEL-FORMAT.gguf, the same model in OpenVINO's form
in ov/MODEL-FORMAT and as a checkpoint for vLLM in vllm/MODEL-FORMAT, and the scripts run_llama.sh,
run_openvino.sh and run_vllm.sh as for the other comparisons.
A GGUF file (`examples.benchmarks.peers.random_gguf` writes them) is served by Podway, too; without
one Podway serves the shape with random weights.

All servers of a model and format are up at a time; each load runs on one after the other, because
the memory of a virtual machine is faster at some times than at others. Where memory does not hold
all, as many are up as it holds. `--add` keeps the rounds that DIR has already. `--list` shows what
would be started and what is left out for want of a file or of memory.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import psutil

from examples.benchmarks.peers.larger_page import page
from examples.benchmarks.peers.loads import Load, with_seeds
from examples.benchmarks.peers.servers import Server, running
from examples.benchmarks.written import write_files

IDS = "300..20000"  # of the tokens in prompts
CONTEXT = 16_384 + 512
MAX_STREAMS = 16
SECONDS = 3_600  # for a request: the slowest server takes over ten minutes for 16,384 tokens
KV_BYTES = 3 << 30  # for 16 streams, or one prompt of 16,384 tokens, of the largest model
PODWAY_PORT, LLAMA_PORT, VLLM_PORT, OPENVINO_PORT = 8105, 8103, 8104, 8106
PROGRAMS = ("Podway", "llama-server", "OpenVINO", "vLLM")


class Format(NamedTuple):
    """A format of weights by its names in Podway's flag, GGUF, OpenVINO and vLLM, "" for none."""

    flag: str
    gguf: str
    openvino: str
    vllm: str
    bits: float


Q3_K_S = Format("", "q3_k_s", "", "", 4.6)
IQ4_XS = Format("", "iq4_xs", "", "", 4.4)
Q4_K_M = Format("", "q4_k_m", "", "", 4.9)
Q4_0 = Format("int4", "q4_0", "int4", "w4a16", 4.5)
INT8 = Format("int8", "q8_0", "int8", "w8a8", 8.5)
BFLOAT16 = Format("bfloat16", "bf16", "fp16", "bf16", 16.0)
MXFP4 = Format("", "mxfp4", "", "", 4.3)


@dataclass(frozen=True, slots=True)
class Model:
    """A named shape, its parameters in billions, and the formats it is measured in."""

    name: str
    billions: float
    formats: tuple[Format, ...]


MODELS = (
    Model("Qwen3-4B", 4.02, (Q3_K_S, IQ4_XS, Q4_K_M, Q4_0, INT8, BFLOAT16)),
    Model("Qwen3.5-4B", 4.21, (Q4_K_M, Q4_0, INT8, BFLOAT16)),
    Model("Llama-3.1-8B", 8.03, (Q4_K_M, Q4_0, INT8, BFLOAT16)),
    Model("Qwen3-30B-A3B", 30.5, (Q4_K_M, Q4_0)),
    Model("gpt-oss-20b", 20.9, (MXFP4, Q4_0)),
)


def main() -> None:
    options = parse()
    chosen = [each for each in MODELS if not options.models or each.name in options.models]
    available = psutil.virtual_memory().available
    servers, missing = plan(chosen, options.peers, available, options.context)
    if options.formats:
        servers = [each for each in servers if each.group.split(", ")[1] in options.formats]
    servers = [each for each in servers if each.name.split()[0] in options.programs]
    for line in missing:
        print(f"left out: {line}", file=sys.stderr)
    if options.list:
        for server in servers:
            print(f"{server.group}: {' '.join(server.command)}")
        return
    out: Path = options.out
    runs = json.loads((out / "figures.json").read_text()) if options.add else []
    chosen_loads = [each for each in LOADS if not options.loads or each.name in options.loads]
    first = 1 + max((run["round"] for run in runs), default=-1)
    with TemporaryDirectory() as scratch:
        for number in range(first, first + options.rounds):
            for group in dict.fromkeys(each.group for each in servers):
                print(f"round {number}: {group}", file=sys.stderr, flush=True)
                here = [each for each in servers if each.group == group]
                for each in together(here, psutil.virtual_memory().available):
                    found = measure_in_turn(each, chosen_loads, Path(scratch))
                    runs += [{"round": number} | run for run in found]
                    text = page(runs, LOADS, names_of_all(), missing)
                    write_files(out, {"figures.json": runs, "README.md": text})


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Larger models beside other servers.")
    parser.add_argument("peers", type=Path)
    parser.add_argument("--models", nargs="+", choices=[each.name for each in MODELS], default=[])
    formats = sorted({format.gguf for model in MODELS for format in model.formats})
    parser.add_argument("--formats", nargs="+", choices=formats, default=[])
    parser.add_argument("--loads", nargs="+", choices=[each.name for each in LOADS], default=[])
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=PROGRAMS)
    parser.add_argument("--context", type=int, default=CONTEXT, help="of each server, in tokens")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--add", action="store_true", help="keep the rounds that DIR has")
    parser.add_argument("--list", action="store_true", help="start nothing")
    parser.add_argument("--out", type=Path, default=Path("larger"), metavar="DIR")
    return parser.parse_args()


def _load(name: str, streams: int, requests: int, prompt: int, output: int) -> Load:
    flags = f"-c {streams} -n {requests} --prompt-tokens {prompt} --output-tokens {output}"
    return Load(name, (*flags.split(), "--ids", IDS, "--timeout", str(SECONDS)), is_open=False)


LOADS = with_seeds(
    [
        _load("128 in", 1, 3, 128, 64),
        _load("C=4", 4, 8, 128, 64),
        _load("C=16", 16, 16, 128, 64),
        _load("1,024 in", 1, 1, 1024, 32),
        _load("4,096 in", 1, 1, 4096, 32),
        _load("16,384 in", 1, 1, 16_384, 32),
        _load("32,768 in", 1, 1, 32_768, 32),
    ]
)


def measure_in_turn(
    servers: Sequence[Server], loads: Sequence[Load], scratch: Path
) -> list[dict[str, Any]]:
    """The figures of each server; a load that fails is recorded as its error's last line."""
    with ExitStack() as stack:
        found = []
        for server in servers:
            read_files(server)
            up = stack.enter_context(running(server))
            run: dict[str, Any] = {
                "server": server.name,
                "group": server.group,
                "first_token_seconds": up.first_token_seconds,
                "pss_mib_at_start": up.pss_mib(),
                "loads": {},
            }
            found.append((up, run))
        for number, load in enumerate(loads):
            for up, run in found if number % 2 == 0 else reversed(found):
                run["loads"][load.name] = load.run(up, scratch)
        for up, run in found:
            run["pss_mib_after"] = up.pss_mib()
    return [run for _, run in found]


def read_files(server: Server) -> None:
    """Bring the model's files into the page cache, where the servers after the first one find them
    anyway."""
    for path in map(Path, server.command):
        for file in (path, *path.glob("*.bin"), *path.glob("*.safetensors")):
            if file.is_file():
                with file.open("rb") as opened:
                    while opened.read(1 << 24):
                        """Nothing is done with it."""


def names_of_all() -> list[str]:
    return [f"{model.name}, {format.gguf}" for model in MODELS for format in model.formats]


def needed_bytes(model: Model, format: Format) -> int:
    return int(model.billions * 1e9 * format.bits / 8) + KV_BYTES


def together(servers: list[Server], available_bytes: int) -> list[list[Server]]:
    """The servers of a model and format, as many at a time as memory holds."""
    name, format = servers[0].group.split(", ")
    (needed,) = (
        needed_bytes(model, each)
        for model in MODELS
        for each in model.formats
        if (model.name, each.gguf) == (name, format)
    )
    count = max(1, available_bytes // needed)
    return [servers[first : first + count] for first in range(0, len(servers), count)]


def plan(
    models: list[Model], peers: Path, available_bytes: int, context: int = CONTEXT
) -> tuple[list[Server], list[str]]:
    """The servers that can be started, and what cannot be and why."""
    servers, missing = [], []
    for model in models:
        for format in model.formats:
            name = f"{model.name}, {format.gguf}"
            needed = needed_bytes(model, format)
            if needed > available_bytes:
                missing.append(
                    f"{name}: {needed >> 30} GiB are needed, {available_bytes >> 30} GiB available"
                )
                continue
            found = list(_servers(model, format, peers, context))
            servers += found
            for program in PROGRAMS:
                if not any(each.name.startswith(program) for each in found):
                    missing.append(f"{name}: {program} has no such model")
    return servers, missing


def _servers(model: Model, format: Format, peers: Path, context: int) -> Iterator[Server]:
    group = f"{model.name}, {format.gguf}"

    def server(program: str, port: int, *command: str) -> Server:
        vllm = {"ZEN": "1", "KV": "3"}  # GiB: one prompt of 16,384 tokens
        return Server(f"{program} {group}", group, command, port, "m", vllm)

    gguf = peers / "gguf" / f"{model.name}-{format.gguf}.gguf"
    flags = f"--served-model-name m --port {PODWAY_PORT} --store memory"
    flags += f" --max-batch-size {MAX_STREAMS} --max-model-len {context}"
    if context > CONTEXT:  # by itself Podway takes no more KV than that needs
        flags += f" --kv-memory {KV_BYTES * context // CONTEXT}"
    if gguf.exists():
        yield server("Podway", PODWAY_PORT, "podway", "serve", str(gguf), *flags.split())
        slots = f"-np {MAX_STREAMS} -c {context} --kv-unified"
        script = str(peers / "run_llama.sh")
        yield server("llama-server", LLAMA_PORT, script, str(gguf), str(LLAMA_PORT), *slots.split())
    elif format.flag:
        command = ("podway", "serve", f"random:{model.name}", *flags.split())
        flag = "--dtype" if format is BFLOAT16 else "--weights"
        yield server("Podway", PODWAY_PORT, *command, flag, format.flag)
    openvino = peers / "ov" / f"{model.name}-{format.openvino}"
    if format.openvino and openvino.exists():
        script = str(peers / "run_openvino.sh")
        yield server("OpenVINO", OPENVINO_PORT, script, str(openvino), str(OPENVINO_PORT))
    vllm = peers / "vllm" / f"{model.name}-{format.vllm}"
    if format.vllm and vllm.exists():
        script, lengths = str(peers / "run_vllm.sh"), ("--max-model-len", str(context))
        command = (script, str(vllm), str(VLLM_PORT), "bfloat16", *lengths)
        yield server("vLLM", VLLM_PORT, *command)


if __name__ == "__main__":
    main()
