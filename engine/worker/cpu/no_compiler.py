"""Kernels from object files, in a process that imports neither Numba nor LLVM.

What has not been compiled is compiled in another process.
"""

import sys

from engine.worker.cpu.compiler_process import CompilerProcess
from engine.worker.cpu.kernel_files import KernelFiles
from engine.worker.cpu.placeholders import COMPILER, stand_in

compiler: CompilerProcess | None = None  # the compiler of a process that has none of its own


def begin() -> CompilerProcess | None:
    """Start the compiler beside other imports if this is the first start on this CPU.

    None where object files cannot be used: this process compiles kernels itself.
    """
    files = None if "numba" in sys.modules else KernelFiles.open()
    if files is None:
        return None
    process = CompilerProcess(files)
    if files.features() is None:
        process.start()
    return process


def settle(process: CompilerProcess | None) -> None:
    """Import kernels without a compiler from now on, if `process` can compile them."""
    global compiler
    if process is not None and process.is_usable():
        compiler = process
        stand_in(*COMPILER)
