"""MLA over cached latent vectors beside MLA over keys and values of each head, as GPUs cache them.

Two workers of one thread in one process, with a few layers of DeepSeek-V2-Lite's sizes and random
weights; their steps alternate. Shortest CPU time of each step, which other processes on the machine
disturb less than elapsed time.

    python -m examples.benchmarks.layers.latent_attention [--rounds 30] [--json FILE]
"""

import argparse
import json
import tempfile
import time
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from adapters.models.mixtures.deepseek import DeepseekV2, DeepseekV3, Glm4MoeLite
from adapters.models.random_checkpoint import random_checkpoint
from engine.step import RequestId, SampleSpec, SamplingParams, Step, StepEntry, StepId
from engine.worker.cpu.device import CpuDevice
from engine.worker.model.kv.kv_tensors import bytes_per_block
from engine.worker.process import build
from engine.worker.process.worker import Worker
from engine.worker.weights.checkpoint import Checkpoint
from engine.worker_settings import Kernels, KVSettings, WorkerSettings

PROMPT, LONGEST = 2048, 16384
STEPS = {  # tokens before the step, and in it
    "a decode behind 512 tokens": (512, 1),
    "a decode behind 4,096 tokens": (4096, 1),
    "a decode behind 16,384 tokens": (LONGEST, 1),
    "a prompt of 2,048 tokens": (0, PROMPT),
    "2,048 tokens of a prompt behind 4,096": (4096, PROMPT),
}
NUM_LAYERS = 4
V2_LITE: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "num_hidden_layers": 27,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 102400,
    "max_position_embeddings": 32768,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "n_group": 1,
    "topk_group": 1,
}
SHAPES = {
    "DeepSeek-V2-Lite": (DeepseekV2, {}),
    "GLM-4.7-Flash": (
        Glm4MoeLite,
        {"num_hidden_layers": 47, "num_attention_heads": 20, "num_key_value_heads": 20}
        | {"qk_nope_head_dim": 192, "v_head_dim": 256},
    ),
    "DeepSeek-V3": (
        DeepseekV3,
        {"num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128},
    ),
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    return parser.parse_args()


def kv_bytes() -> dict[str, dict[str, int]]:
    """Bytes of KV per token in 16 bits."""
    found = {}
    for name, (family, changes) in SHAPES.items():
        shape = family(V2_LITE | changes).shape
        kinds = {"heads": shape.expanded(), "latent": shape}
        found[name] = {
            kind: bytes_per_block(each, each.num_layers, 1, torch.bfloat16)
            for kind, each in kinds.items()
        }
    return found


def load(model: str, *, has_latents: bool) -> Worker:
    settings = WorkerSettings(
        model,
        max_batch_size=1,
        max_batch_tokens=PROMPT,
        kernels=Kernels(weights="int8", threads=1),
        kv=KVSettings(kv_slots=LONGEST + PROMPT),
    )
    device = CpuDevice.open(settings, Checkpoint.open(model).preferred_format)
    if has_latents:
        return Worker.load(settings, lambda *_: None, device)
    with patch.object(build, "cached_shape", lambda shape, *_, **__: shape.expanded()):
        return Worker.load(settings, lambda *_: None, device)


def seconds(worker: Worker, before: int, count: int) -> float:
    """CPU seconds of a step of one request."""
    table = array("i", range(worker.report.num_blocks)).tobytes()
    tokens = tuple(range(5, 5 + count))
    sample = SampleSpec(SamplingParams(temperature=0.0))
    entry = StepEntry(RequestId(0), before, tokens, table, sample)
    began = time.thread_time()
    worker.run(Step(StepId(0), (entry,)))
    return time.thread_time() - began


def figures(rounds: int) -> dict[str, Any]:
    config = V2_LITE | {"num_hidden_layers": NUM_LAYERS, "n_routed_experts": 8}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        model = str(random_checkpoint(folder, Path(folder)))
        workers = {kind: load(model, has_latents=kind == "latent") for kind in ("heads", "latent")}
    for worker in workers.values():
        for start in range(0, LONGEST + 1, PROMPT):
            seconds(worker, start, PROMPT)
    steps: dict[str, dict[str, float]] = {}
    for name, (before, count) in STEPS.items():
        taken: dict[str, list[float]] = {kind: [] for kind in workers}
        for _ in range(rounds if count == 1 else max(3, rounds // 10)):
            for kind, worker in workers.items():
                taken[kind].append(seconds(worker, before, count))
        steps[name] = {kind: round(1e3 * min(found), 1) for kind, found in taken.items()}
    report = workers["latent"].report
    facts = {"kernels": report.kernels, "weights": report.weights, "kv": report.kv_dtype}
    return {**facts, "layers": NUM_LAYERS, "rounds": rounds, "bytes": kv_bytes(), "ms": steps}


def page(found: Mapping[str, Any]) -> str:
    """The page about a run."""
    lines = [
        "# Latent vectors in the KV cache",
        "",
        f"`python -m examples.benchmarks.layers.latent_attention --rounds {found['rounds']}` "
        "([JSON](latent_attention.json)).",
        "",
        "KV per token in 16 bits, in all layers:",
        "",
        "| model | keys and values of each head | latent vectors | ratio |",
        "|---|---|---|---|",
    ]
    for name, each in found["bytes"].items():
        ratio = each["heads"] / each["latent"]
        lines.append(f"| {name} | {each['heads']:,} B | {each['latent']:,} B | {ratio:.1f} |")
    lines += [
        "",
        f"Steps of {found['layers']} layers of DeepSeek-V2-Lite's sizes with 8 experts and random "
        f"weights: {found['weights']}, KV in {found['kv']}, {found['kernels']}, one thread; "
        "shortest CPU time of alternating steps on a shared machine:",
        "",
        "| step | keys and values of each head | latent vectors | ratio |",
        "|---|---|---|---|",
    ]
    for name, each in found["ms"].items():
        ratio = each["latent"] / each["heads"]
        lines.append(
            f"| {name} | {each['heads']:,.1f} ms | {each['latent']:,.1f} ms | {ratio:.2f} |"
        )
    lines += [
        "",
        "Attention to latent vectors takes 3.4 times the products in DeepSeek's sizes, "
        "(576 + 512) / (192 + 128), but reads each token once for all heads. Prompts are computed "
        "in the same form, so that a token has the same bits in both. Steps over keys and values "
        "of each head are not recorded: torch copies between their kernels.",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    options = parse()
    found = figures(options.rounds)
    print(page(found))
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
        options.json.with_suffix(".md").write_text(page(found))


if __name__ == "__main__":
    main()
