"""Builds all FlashInfer modules that the tests and benchmarks need, side by side.

    python -m examples.benchmarks.gpu.kernels [--copy-to DIR] [--json FILE]

Cold builds one after the other take longer than a stage of the check; together they are estimated
at a few minutes on 16 cores. Those that Llama needs, which the first figures are of, come before
the others: ninja finishes modules that it builds together at about the same time. Each module is
reported when it is built. Modules in FlashInfer's cache are not built again, so a build that was
cut short goes on where it ended.
"""

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from adapters.attention.flashinfer.modules import (
    Build,
    Module,
    build_side_by_side,
    fa2,
    is_built,
)

NUM_FIRST = 1  # Llama's


def specs() -> list[Module]:
    """FlashInfer's build specifications of attention; the first `NUM_FIRST` are Llama's."""
    import torch

    half, fp8 = torch.bfloat16, torch.float8_e4m3fn

    def plain(q: torch.dtype, kv: torch.dtype, dim: int, *, window: bool = False) -> Module:
        return fa2(q, kv, dim, window=window, soft_cap=False)

    found = [plain(half, half, 128), plain(half, half, 128, window=True)]
    found += [plain(half, half, 64, window=each) for each in (False, True)]
    found += [plain(torch.float16, torch.float16, 128), plain(half, fp8, 128)]
    return found + [plain(half, half, dim) for dim in (256, 512)]


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


def main() -> int:
    """Build, and copy the built libraries if asked to; the exit code is 1 if a module failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--copy-to", type=Path, help="a folder for DIR/NAME/NAME.so")
    parser.add_argument("--json", type=Path, help="a file for the modules and their seconds")
    arguments = parser.parse_args()
    import torch

    from engine.worker.cuda.build_environment import prepare_environment

    prepare_environment(torch.cuda.get_device_capability())
    began, modules = time.perf_counter(), specs()
    build_all(modules, llama_first, arguments.json)
    built = [each for each in modules if is_built(each)]
    seconds = time.perf_counter() - began
    print(f"{len(built)} of {len(modules)} modules in {seconds:.0f} s", flush=True)
    for each in built if arguments.copy_to else ():
        if not each.is_aot:
            folder = arguments.copy_to / each.name
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copy(each.jit_library_path, folder / f"{each.name}.so")
    return int(len(built) < len(modules))


if __name__ == "__main__":
    sys.exit(main())
