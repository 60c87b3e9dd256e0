"""Seconds from `podway serve WRONG` to its one line, for checkpoints and adapters that are refused.

Each case is a copy of the built-in model in which one thing is wrong; the server runs as a user
would start it. A refusal counts if it is one line on stderr that has what the case names.

    python -m examples.benchmarks.server.refusals [--repeat 3] [--json FILE]
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gguf import GGUFWriter
from safetensors.numpy import save_file

BUILTIN = Path(str(files("adapters").joinpath("builtin")))
MODULE = "base_model.model.model.layers.0.self_attn.q_proj"
HIDDEN = 192  # of the built-in model
ADAPTER = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}


class Refusal(NamedTuple):
    """A wrong command: `make` writes its files and returns its arguments, its error has `says`."""

    name: str
    make: Callable[[Path], list[str]]
    says: str


def _copied(folder: Path) -> Path:
    directory = folder / "model"
    shutil.copytree(BUILTIN, directory)
    return directory


def _config(name: str, says: str, **changes: Any) -> Refusal:
    """A refusal of a config.json with other fields."""

    def make(folder: Path) -> list[str]:
        path = _copied(folder) / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
        return [str(path.parent)]

    return Refusal(name, make, says)


def _file(name: str, says: str, file: str, content: bytes | None) -> Refusal:
    """A refusal of a directory in which a file has another content, or is missing."""

    def make(folder: Path) -> list[str]:
        path = _copied(folder) / file
        if content is None:
            path.unlink()
        else:
            path.write_bytes(content)
        return [str(path.parent)]

    return Refusal(name, make, says)


def _flags(name: str, says: str, *flags: str) -> Refusal:
    return Refusal(name, lambda folder: ["builtin", *flags], says)


def _adapter(
    name: str, says: str, shape: tuple[int, int] = (4, HIDDEN), module: str = MODULE, **changes: Any
) -> Refusal:
    """A refusal of a LoRA adapter for the built-in model."""

    def make(folder: Path) -> list[str]:
        tensors = {
            f"{module}.lora_A.weight": np.zeros(shape, np.float32),
            f"{module}.lora_B.weight": np.zeros((HIDDEN, shape[0]), np.float32),
        }
        save_file(tensors, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(json.dumps(ADAPTER | changes))
        return ["builtin", "--lora", f"other={folder}"]

    return Refusal(name, make, says)


def _gguf(name: str, says: str, architecture: str = "llama", pre: str | None = "qwen2") -> Refusal:
    """A refusal of a GGUF file; without `pre` it has no vocabulary."""

    def make(folder: Path) -> list[str]:
        path = folder / "model.gguf"
        writer = GGUFWriter(path, architecture)
        writer.add_embedding_length(32)
        writer.add_head_count(4)
        writer.add_block_count(1)
        if pre is not None:
            writer.add_tokenizer_model("gpt2")
            writer.add_tokenizer_pre(pre)
            writer.add_token_list(["a", "b"])
        writer.add_tensor("token_embd.weight", np.zeros((2, 32), np.float32))
        for write in ("header", "kv_data", "tensors"):
            getattr(writer, f"write_{write}_to_file")()
        writer.close()
        return [str(path)]

    return Refusal(name, make, says)


def _of_bare_directory(folder: Path) -> list[str]:
    (folder / "adapter_config.json").write_text(json.dumps(ADAPTER))
    return [str(folder)]


def _of_pickle(folder: Path) -> list[str]:
    directory = _copied(folder)
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    return [str(directory)]


def _of_junk_gguf(folder: Path) -> list[str]:
    (folder / "model.gguf").write_text("no GGUF file")
    return [str(folder / "model.gguf")]


def _of_missing_shard(folder: Path) -> list[str]:
    directory = _copied(folder)
    index = {"weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return [str(directory)]


def _quantized(method: str, **fields: Any) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": method, **fields}}


WEIGHTS = (BUILTIN / "model.safetensors").read_bytes()
REFUSALS = (
    _config("mamba", "'MambaForCausalLM' is not supported", architectures=["MambaForCausalLM"]),
    _config("t5", "'T5ForConditionalGeneration'", architectures=["T5ForConditionalGeneration"]),
    _config("no architecture", "architectures is None", architectures=None),
    _config("two architectures", "expected one name", architectures=["A", "B"]),
    _config("whisper", "WhisperForC", architectures=["WhisperForConditionalGeneration"]),
    _config("bitsandbytes", "quant_method='bitsandbytes'", **_quantized("bitsandbytes")),
    _config("gptq of 3 bits", "bits=3 is not supported", **_quantized("gptq", bits=3)),
    _config("awq for gemv", "version='gemv'", **_quantized("awq", bits=4, version="gemv")),
    _config("quantized by nobody", "quant_method='hqq'", **_quantized("hqq")),
    _config("larger vocabulary", "has shape [2048, 192]", vocab_size=2148),
    _config("wider", "has shape [2048, 192]", hidden_size=256),
    _config("more layers", "no tensor of layer model.layers.4", num_hidden_layers=5),
    _config("fewer layers", "tensors of layer model.layers.3", num_hidden_layers=3),
    _file("no config", "has no config.json", "config.json", None),
    _file("config in YAML", "is not JSON", "config.json", b"hidden_size: 3"),
    _file("config is a list", "is not a JSON object", "config.json", b"[]"),
    _file("no tokenizer", "has no tokenizer.json", "tokenizer.json", None),
    _file("tokenizer is HTML", "tokenizer.json cannot be read", "tokenizer.json", b"<html>"),
    _file("tokenizer without model", "is not a tokenizer.json", "tokenizer.json", b"{}"),
    _file("no weights", "has no *.safetensors file", "model.safetensors", None),
    _file("empty weights", "no complete safetensors header", "model.safetensors", b""),
    _file("truncated weights", "it is truncated", "model.safetensors", WEIGHTS[:200_000]),
    _file("damaged header", "damaged", "model.safetensors", b"\2\0\0\0\0\0\0\0[]" + WEIGHTS),
    Refusal("pickled weights", _of_pickle, "only pytorch_model.bin"),
    Refusal("missing shard", _of_missing_shard, "model-00002-of-00002.safetensors: No such file"),
    Refusal("adapter as model", _of_bare_directory, "it is a LoRA adapter"),
    Refusal("junk GGUF", _of_junk_gguf, "does not begin with GGUF"),
    _gguf("GGUF of RWKV", "general.architecture 'rwkv7'", architecture="rwkv7"),
    _gguf("GGUF with an unknown vocabulary", "tokenizer.ggml.pre 'viking'", pre="viking"),
    _gguf("GGUF without vocabulary", "tokenizer.ggml.tokens is missing", pre=None),
    _adapter("rank 128", "has rank 128; --max-lora-rank allows 64", (128, HIDDEN), r=128),
    _adapter("DoRA", "use_dora=True: DoRA cannot be served", use_dora=True),
    _adapter("adapter of a wider model", "has shape [4, 256]", (4, 256)),
    _adapter("adapter of the head", "no such linear", module="base_model.model.lm_head"),
    _adapter("other targets", "is not a target module", target_modules=["k_proj"]),
    _flags("no adapter", "cannot read", "--lora", "other=/no/such/folder"),
    _flags("fp8 on a CPU", "--weights 'fp8' is not supported on cpu", "--weights", "fp8"),
    _flags("longer context", "beyond the checkpoint's 32768", "--max-model-len", "65536"),
)


class Seconds(NamedTuple):
    """How long a command took, and the CPU time of its process and of the worker that it ended."""

    wall: float
    cpu: float


def measured(refusal: Refusal) -> Seconds:
    """The seconds until the command has ended with its one line."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "gateway", "serve", *refusal.make(Path(folder))]
        began_at, cpu = time.perf_counter(), _cpu_seconds()
        ran = subprocess.run([*command, "--port", "0"], capture_output=True, text=True)
        took = Seconds(time.perf_counter() - began_at, _cpu_seconds() - cpu)
    lines = ran.stderr.splitlines()
    if ran.returncode != 1 or len(lines) != 1 or refusal.says not in lines[0] or ran.stdout:
        sys.exit(f"{refusal.name}: expected one line with {refusal.says!r}, not {ran.stderr!r}")
    return took


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Run all refusals and print the median seconds of each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    seconds = {
        refusal.name: sorted(measured(refusal) for _ in range(arguments.repeat))[
            arguments.repeat // 2
        ]
        for refusal in REFUSALS
    }
    for name, took in seconds.items():
        sys.stdout.write(f"{took.wall:6.2f} s, {took.cpu:.2f} s of CPU time  {name}\n")
    longest = max(each.wall for each in seconds.values())
    sys.stdout.write(f"{longest:6.2f} s  the longest of {len(seconds)}\n")
    if arguments.json is not None:
        rows = {name: each._asdict() for name, each in seconds.items()}
        facts = {"cores": os.cpu_count(), "load": load, "seconds": rows}
        arguments.json.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
