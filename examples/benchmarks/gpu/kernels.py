"""Builds all FlashInfer modules that the tests and benchmarks need, side by side.

    python -m examples.benchmarks.gpu.kernels [--copy-to DIR]

Cold builds one after the other take longer than a stage of the check; together they take about two
minutes on 16 cores. Modules in FlashInfer's cache are not built again.
"""

import argparse
import importlib
import shutil
import sys
import time
from pathlib import Path
from typing import Any

GATES = ("silu", "gelu", "gelu_tanh")
PAGE = 16  # tokens of a block
PACKED = ((128, 4), (128, 7), (64, 7))  # head size and query heads per KV head: Llama, two Qwen


def specs() -> list[Any]:
    """FlashInfer's build specifications: RoPE, norm, gates, and attention in each dtype, by FA2 and
    XQA."""
    import torch

    half, fp8 = torch.bfloat16, torch.float8_e4m3fn
    attention = importlib.import_module("flashinfer.jit.attention.modules")
    jit = {name: importlib.import_module(f"flashinfer.jit.{name}") for name in ("rope", "norm")}
    gate = importlib.import_module("flashinfer.jit.activation").gen_act_and_mul_module

    def fa2(q: torch.dtype, kv: torch.dtype, dim: int, window: bool = False) -> Any:
        make = attention._gen_batch_prefill_primary_module
        return make("fa2", q, kv, q, torch.int32, dim, dim, 0, window, False, False)

    found = [jit["rope"].gen_rope_module()]
    if not importlib.import_module("engine.worker.cuda.build_environment").missing_norm_headers():
        found.append(jit["norm"].gen_norm_module())
    found += [fa2(half, half, dim, window) for dim in (128, 64) for window in (False, True)]
    found += [fa2(torch.float16, torch.float16, 128), fa2(half, fp8, 128)]
    xqa = importlib.import_module("flashinfer.jit.xqa").gen_xqa_module
    found += [xqa(half, half, PAGE, dim, group, False, half) for dim, group in PACKED]
    return found + [gate(name) for name in GATES]


def main() -> int:
    """Build, and copy the built libraries if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--copy-to", type=Path, help="a folder for DIR/NAME/NAME.so")
    arguments = parser.parse_args()
    import torch

    from engine.worker.cuda.build_environment import prepare_environment

    prepare_environment(torch.cuda.get_device_capability())
    build = importlib.import_module("flashinfer.jit.core").build_jit_specs
    began = time.perf_counter()
    modules = specs()
    print(f"building {len(modules)} modules", flush=True)
    build(modules)
    print(f"{len(modules)} modules in {time.perf_counter() - began:.0f} s", flush=True)
    for each in modules if arguments.copy_to else ():
        if not each.is_aot:
            folder = arguments.copy_to / each.name
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copy(each.jit_library_path, folder / f"{each.name}.so")
    return 0


if __name__ == "__main__":
    sys.exit(main())
