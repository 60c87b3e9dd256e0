"""Compile all kernels before a first start: `python -m engine.worker.cpu`.

To object files, which workers load. With `--in-process`, or where there are none, to Numba's cache,
which processes with Numba load, as those of tests are.
"""

import sys
from collections.abc import Callable
from importlib import import_module
from typing import cast

from engine.worker.cpu import no_compiler

Progress = Callable[[str, int, int], None]


def show_progress(what: str, done: int, total: int) -> None:
    """A counter on one line; only its end if stdout is not a terminal."""
    if sys.stdout.isatty() or done == total:
        end = "\n" if done == total else ""
        sys.stdout.write(f"\rCompiling {what} for this CPU: {done} of {total}{end}")
        sys.stdout.flush()


if __name__ == "__main__":
    if "--in-process" not in sys.argv:
        no_compiler.settle(no_compiler.begin())
    # Only now: importing kernels imports Numba, or what stands in for it
    every = import_module("engine.worker.cpu.all_kernels").compile_every_kernel
    cast("Callable[[Progress], None]", every)(show_progress)
