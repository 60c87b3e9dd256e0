"""Compiles kernels in another process, which ends when they are compiled."""

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterable

from engine.errors import StartupError
from engine.worker.cpu.kernel_files import KernelFiles
from engine.worker.cpu.machine_code import MachineCode

logger = logging.getLogger(__name__)

MODULE = "engine.worker.process.kernel_compiler"
READY = "ready"  # what the process writes when the features are known
RECORD_BYTES = 256  # a name, padded; a pipe keeps pieces of this size whole


class CompilerProcess:
    """Kernels from object files; those that are missing are compiled first.

    The process needs half a second to start and memory for Numba and LLVM, so it runs only while
    something has to be compiled. A thread reads what it writes.
    """

    def __init__(self, files: KernelFiles) -> None:
        self.files = files
        self._changed = threading.Condition()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ready = False
        self._is_loading = True  # until `finish`: more kernels follow soon
        self._waiting: set[str] = set()  # names whose kernels are being compiled

    def start(self) -> None:
        """Start the process, unless it runs."""
        with self._changed:
            self._start()

    def is_usable(self) -> bool:
        """Whether the features of the CPU are known; waits for the process that finds them."""
        with self._changed:
            self._changed.wait_for(lambda: self._process is None or self._is_ready)
        if self.files.features() is None:
            logger.warning("kernels are compiled in the worker: their compiler could not start")
            return False
        return True

    def request(self, names: Iterable[str]) -> None:
        """Begin to compile those of these kernels that are missing, in this order."""
        with self._changed:
            for name in names:
                if name not in self._waiting and self.files.load(name) is None:
                    self._changed.wait_for(lambda: not self._is_closing)
                    self._start()
                    self._waiting.add(name)
                    self._send(name)
            if not self._is_loading:
                self._close()

    def compile(self, name: str) -> MachineCode:
        """A kernel by its stamped name, "module:function".

        Raises `StartupError` if it cannot be compiled.
        """
        self.request([name])
        with self._changed:
            self._changed.wait_for(lambda: name not in self._waiting)
        code = self.files.load(name)
        if code is None:
            raise StartupError(f"the kernel {name} could not be compiled; see the log above")
        return code

    def finish(self) -> None:
        """End the process when it has compiled what was requested; it starts again for more."""
        with self._changed:
            self._is_loading = False
            self._close()

    @property
    def _is_closing(self) -> bool:
        return self._process is not None and self._process.stdin is None

    def _start(self) -> None:
        if self._process is None:
            self._is_ready = False
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", MODULE, str(self.files.directory)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            reader = threading.Thread(
                target=self._read, args=(self._process,), name="podway-compiler", daemon=True
            )
            reader.start()

    def _send(self, name: str) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            os.write(self._process.stdin.fileno(), name.encode().ljust(RECORD_BYTES))
        except OSError:
            """It has ended, which the thread finds."""

    def _close(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            self._process.stdin = None

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            with self._changed:
                self._is_ready = True
                self._waiting.discard(line.decode().strip())
                self._changed.notify_all()
        process.stdout.close()
        process.wait()
        with self._changed:
            self._close()
            self._process = None
            self._waiting.clear()
            self._changed.notify_all()
