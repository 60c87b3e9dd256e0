"""Compiles the CUDA sources of FlashInfer's modules for a GPU that need not be present.

    CUDA_HOME=DIR python -m examples.benchmarks.gpu.compile_flashinfer [--modules WORD …]
        [--json FILE]

Needs FlashInfer, nvcc, ninja and a C++ compiler. A CUDA_HOME without a toolkit can be made of
wheels: `pip install --target D nvidia-cuda-nvcc nvidia-cuda-crt nvidia-nvvm nvidia-cuda-runtime
nvidia-cuda-cccl` has one at D/nvidia/cu13. Objects are compiled for sm_90a and not linked, since
linking needs the driver's library. Each module takes CPU minutes.
"""

import argparse
import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from examples.benchmarks.gpu.kernels import specs

CAPABILITY = (9, 0)
OBJECT = re.compile(r"^build (\S+\.o):", re.MULTILINE)


def missing() -> str:
    """What this machine lacks to compile FlashInfer's modules; empty if nothing."""
    if importlib.util.find_spec("flashinfer") is None:
        return "flashinfer is not installed"
    from engine.worker.cuda.requirements import cuda_home, nvcc

    if nvcc() is None:
        return f"there is no nvcc in {cuda_home()} (CUDA_HOME)"
    return ""


def compile_objects(spec: Any) -> float:
    """Compile a module's objects; returns the seconds. Raises `CalledProcessError`."""
    began = time.perf_counter()
    spec.write_ninja()
    targets = objects(spec)
    for each in targets:
        each.unlink(missing_ok=True)
    folder = Path(spec.build_dir)
    folder.mkdir(parents=True, exist_ok=True)
    command = ["ninja", "-C", str(folder), "-f", str(spec.ninja_path), *map(str, targets)]
    jobs = os.environ.get("MAX_JOBS")
    command += ["-j", jobs] if jobs else []
    subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True)
    return time.perf_counter() - began


def objects(spec: Any) -> list[Path]:
    """The object files that a module's build file names; relative ones are in its folder."""
    names = OBJECT.findall(Path(spec.ninja_path).read_text())
    return [Path(spec.build_dir) / name for name in names]


def chosen(words: Sequence[str]) -> list[Any]:
    """The modules whose names contain one of the words; all without words."""
    return [each for each in specs() if not words or any(word in each.name for word in words)]


def main() -> int:
    """Compile; the exit code is 1 if something is missing or a module does not compile."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--modules", nargs="*", default=[], help="words of modules' names")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if lacking := missing():
        print(f"FlashInfer cannot be compiled here: {lacking}", file=sys.stderr)
        return 1
    from engine.worker.cuda.build_environment import prepare_environment

    prepare_environment(CAPABILITY)
    found: dict[str, float] = {}
    failed = 0
    for each in chosen(arguments.modules):
        try:
            found[each.name] = compile_objects(each)
        except subprocess.CalledProcessError as error:
            failed += 1
            print(f"{each.name} does not compile:\n{error.stdout[-2000:]}", flush=True)
            continue
        print(f"{each.name}: {found[each.name]:.0f} s", flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
