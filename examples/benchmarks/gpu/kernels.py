"""Builds all FlashInfer modules that the tests and benchmarks need, side by side.

    python -m examples.benchmarks.gpu.kernels [--copy-to DIR] [--json FILE]

Cold builds one after the other take longer than a stage of the check; together they are estimated
at a few minutes on 16 cores. Each module is reported when it is built. Modules in FlashInfer's
cache are not built again, so a build that was cut short goes on where it ended.
"""

import argparse
import importlib
import json
import shutil
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

LOOK_SECONDS = 0.5
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


class Progress:
    """Reports each module of a build when its library appears, and keeps the times in a file.

    `specs` have `name`, `jit_library_path` and `is_aot`, as FlashInfer's build specifications.
    """

    def __init__(self, specs: Sequence[Any], path: Path | None) -> None:
        self._specs = specs
        self._path = path
        self._began = time.perf_counter()
        self._seconds: dict[str, float] = {}  # by module, since the beginning
        self._failed: dict[str, str] = {}
        self._cached = [each.name for each in specs if is_built(each)]
        self._write()

    @property
    def missing(self) -> list[Any]:
        """Modules that are neither built nor failed."""
        return [
            each for each in self._specs if not is_built(each) and each.name not in self._failed
        ]

    def look(self) -> None:
        """Report the modules that were built since the last look."""
        known = {*self._cached, *self._seconds}
        for each in self._specs:
            if each.name not in known and is_built(each):
                self._seconds[each.name] = time.perf_counter() - self._began
                self._report(f"built {each.name}, {self._seconds[each.name]:.0f} s")

    def fail(self, name: str, error: Exception) -> None:
        """Report a module that cannot be built."""
        lines = [line for line in str(error).splitlines() if "error" in line.lower()]
        self._failed[name] = (lines or [str(error).split("\n")[0]])[0][:300]
        self._report(f"cannot build {name}: {self._failed[name]}")

    def watch(self, is_over: threading.Event) -> None:
        """Look twice a second until the event is set."""
        while not is_over.wait(LOOK_SECONDS):
            self.look()
        self.look()

    def _report(self, line: str) -> None:
        done = len(self._cached) + len(self._seconds) + len(self._failed)
        print(f"{line} ({done} of {len(self._specs)})", flush=True)
        self._write()

    def _write(self) -> None:
        if self._path is not None:
            found = {"cached": self._cached, "built": self._seconds, "failed": self._failed}
            left = {"modules": len(self._specs), "left": [each.name for each in self.missing]}
            self._path.write_text(json.dumps(found | left) + "\n")


def is_built(spec: Any) -> bool:
    """Whether the library of a module exists."""
    return bool(spec.is_aot) or Path(spec.jit_library_path).exists()


def build_all(
    specs: Sequence[Any], build: Callable[[Sequence[Any]], object], progress: Progress
) -> None:
    """Build all modules side by side; if one fails, which ends the build, the others alone."""
    is_over = threading.Event()
    watcher = threading.Thread(target=progress.watch, args=(is_over,), daemon=True)
    watcher.start()
    try:
        build(specs)
    except Exception as error:  # a compiler may raise anything
        print(f"the build ended early: {str(error).splitlines()[0]}", flush=True)
    for each in progress.missing:
        try:
            build([each])
        except Exception as error:  # the next module may still be built
            progress.fail(each.name, error)
    is_over.set()
    watcher.join()


def main() -> int:
    """Build, and copy the built libraries if asked to; the exit code is 1 if a module failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--copy-to", type=Path, help="a folder for DIR/NAME/NAME.so")
    parser.add_argument("--json", type=Path, help="a file for the modules and their seconds")
    arguments = parser.parse_args()
    import torch

    from engine.worker.cuda.build_environment import prepare_environment

    prepare_environment(torch.cuda.get_device_capability())
    build = importlib.import_module("flashinfer.jit.core").build_jit_specs
    began, modules = time.perf_counter(), specs()
    progress = Progress(modules, arguments.json)
    print(f"building {len(progress.missing)} of {len(modules)} modules", flush=True)
    build_all(modules, build, progress)
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
