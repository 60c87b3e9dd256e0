"""The process that compiles kernels to object files in the directory that is its argument.

It writes the CPU's features and a line, then reads records, each the name of a kernel. Processes
forked from it, one for each core, take one record after the other from the same pipe, and write a
line when its kernel is in a file.
"""

import gc
import importlib
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path

from engine.worker.cpu import build, features
from engine.worker.cpu.compiler_process import READY, RECORD_BYTES
from engine.worker.cpu.kernel_files import KernelFiles
from engine.worker.cpu.placeholders import TORCH, stand_in
from engine.worker.process.torch_import import skip_scipy

logger = logging.getLogger(__name__)

MAX_PROCESSES = 8


def main() -> None:
    gc.disable()  # cycles take 10 MiB for each kernel, and searching for them a tenth of the time
    skip_scipy()
    stand_in(*TORCH)
    files = KernelFiles(Path(sys.argv[1]))
    files.write_features(features.FEATURES)
    import_kernels()
    if not say(READY):
        return
    others = []
    for _ in range(min(MAX_PROCESSES, len(os.sched_getaffinity(0))) - 1):
        child = os.fork()
        if child == 0:
            compile_kernels(files)
            os._exit(0)
        others.append(child)
    compile_kernels(files)
    for child in others:
        os.waitpid(child, 0)


def import_kernels() -> None:
    """Import what most models run, before other processes are forked."""
    importlib.import_module("engine.worker.cpu.kernels.joined")
    importlib.import_module("engine.worker.cpu.attention.paged_kernels")


def say(line: str) -> bool:
    """Write a line at once, as one piece. Returns whether anybody reads it: the process that
    started this one may have ended."""
    try:
        os.write(1, f"{line}\n".encode())
    except BrokenPipeError:
        return False
    return True


def compile_kernels(files: KernelFiles) -> None:
    """Compile what the records name until the pipe is closed."""
    while record := os.read(0, RECORD_BYTES):
        name = record.decode().strip()
        try:
            files.write(name, build.object_of(function_of(name)))
        except Exception:
            logger.exception("%s could not be compiled", name)
        if not say(name):
            return


def function_of(name: str) -> Callable[..., None]:
    """The function that a kernel is made of. Those for groups of weights are made by a function."""
    module, _, stamped = name.partition(":")
    plain = build.unstamped(stamped)
    found: Callable[..., None] | None = getattr(importlib.import_module(module), plain, None)
    if found is None:
        linears = importlib.import_module("engine.worker.cpu.linears")
        found = linears.grouped_kernels()[plain]
    return found


if __name__ == "__main__":
    main()
