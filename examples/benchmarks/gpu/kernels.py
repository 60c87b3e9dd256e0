"""Builds all FlashInfer modules that the tests and benchmarks need, side by side.

    python -m examples.benchmarks.gpu.kernels [--capability 9.0] [--copy-to DIR] [--json FILE]

With `--capability` they are built for GPUs of this compute capability, none of which need be
present. A machine without a CUDA toolkit can make one of wheels: after `pip install --no-deps
--target D nvidia-cuda-nvcc nvidia-cuda-crt nvidia-cuda-runtime nvidia-cuda-cccl nvidia-nvvm`, in
the version of torch's CUDA, CUDA_HOME is D/nvidia/cu13. A module takes one to two minutes of two
cores.

Those that Llama needs, which the first figures are of, come before the others: ninja finishes
modules that it builds together at about the same time. Each module is reported when it is built.
Modules in FlashInfer's cache are not built again, so a build that was cut short goes on where it
ended.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

from adapters.attention.flashinfer.modules import (
    Build,
    Module,
    build_side_by_side,
    fa2,
    is_built,
    mla,
)

NUM_FIRST = 1  # Llama's


def specs(capability: tuple[int, int] = (9, 0)) -> list[Module]:
    """FlashInfer's build specifications of attention on such a GPU; the first `NUM_FIRST` are
    Llama's, on any."""
    import torch

    half, fp8 = torch.bfloat16, torch.float8_e4m3fn

    def plain(dtype: torch.dtype, kv: torch.dtype, dim: int, *, window: bool = False) -> Module:
        return fa2(dtype, kv, dim, window=window, soft_cap=False)

    found = [plain(half, half, 128), plain(half, half, 128, window=True), plain(half, fp8, 128)]
    found += [plain(half, half, 64, window=each) for each in (False, True)]
    found += [plain(torch.float16, torch.float16, 128), plain(half, half, 512)]
    found += [mla(half, capability), mla(torch.float16, capability)]
    variants = product((False, True), repeat=2)
    return found + [fa2(half, half, 256, window=each, soft_cap=cap) for each, cap in variants]


def prepare(capability: tuple[int, int], folder: Path) -> None:
    """The environment to build for GPUs of this compute capability, which need not be present:
    modules are linked with an empty driver library in `folder`."""
    from engine.worker.cuda.build_environment import DRIVER, prepare_environment
    from engine.worker.cuda.requirements import cuda_home, kernel_cache
    from engine.worker.cuda.wheel_toolkit import assembled

    home, library = cuda_home(), folder / DRIVER
    if (home / "lib").is_dir() and not (home / "lib64").exists():
        os.environ["CUDA_HOME"] = str(assembled(home, kernel_cache()))
    compiler = os.environ.get("CC", "cc")
    command = [compiler, "-shared", f"-Wl,-soname,{DRIVER}.1", "-o", str(library)]
    subprocess.run([*command, "-x", "c", os.devnull], check=True)
    os.environ["FLASHINFER_EXTRA_LDFLAGS"] = f"-L{folder}"
    prepare_environment(capability)


def llama_first(modules: Sequence[Module]) -> None:
    """FlashInfer's own build of the modules that Llama needs, then of the others."""
    names = [each.name for each in specs()[:NUM_FIRST]]
    for is_first in (True, False):
        some = [each for each in modules if (each.name in names) == is_first]
        if some:
            build_side_by_side(some)


def build_all(
    modules: Sequence[Module], build: Callable[[Sequence[Module]], object], path: Path | None
) -> None:
    """Build all modules, print what becomes of each, and keep the figures in a file."""

    def report(line: str) -> None:
        print(line, flush=True)
        write()

    def write() -> None:
        if path is not None:
            figures = {"cached": made.cached, "built": made.seconds, "failed": made.failed}
            left = {"modules": len(modules), "left": [each.name for each in made.missing]}
            path.write_text(json.dumps(figures | left) + "\n")

    made = Build(modules, report)
    write()
    print(f"building {len(made.missing)} of {len(modules)} modules", flush=True)
    made.run(build)


def build(capability: tuple[int, int], copy_to: Path | None, path: Path | None) -> int:
    """Build, and copy the built libraries; the exit code is 1 if a module failed."""
    began, modules = time.perf_counter(), specs(capability)
    build_all(modules, llama_first, path)
    built = [each for each in modules if is_built(each)]
    seconds = time.perf_counter() - began
    print(f"{len(built)} of {len(modules)} modules in {seconds:.0f} s", flush=True)
    for each in built:
        if copy_to and not each.is_aot:
            folder = copy_to / each.name
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copy(each.jit_library_path, folder / f"{each.name}.so")
    return int(len(built) < len(modules))


def main() -> int:
    """Build for the GPU given or present; the exit code is 1 if a module or nvcc is missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--capability", help="of GPUs that need not be present, such as 9.0")
    parser.add_argument("--copy-to", type=Path, help="a folder for DIR/NAME/NAME.so")
    parser.add_argument("--json", type=Path, help="a file for the modules and their seconds")
    arguments = parser.parse_args()
    import torch

    from engine.worker.cuda.build_environment import prepare_environment
    from engine.worker.cuda.requirements import missing_kernels

    if lacking := missing_kernels():
        print(f"FlashInfer's modules cannot be built here: {lacking}", file=sys.stderr)
        return 1
    if not arguments.capability:
        capability = torch.cuda.get_device_capability()
        prepare_environment(capability)
        return build(capability, arguments.copy_to, arguments.json)
    major, minor = map(int, arguments.capability.split("."))
    with tempfile.TemporaryDirectory() as folder:
        prepare((major, minor), Path(folder))
        return build((major, minor), arguments.copy_to, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
