"""The object files of compiled kernels, from which a worker runs them without Numba and LLVM.

A directory holds the kernels for one CPU, one version of the compiler and its settings; a kernel's
file has the digest of this package's sources in its name. `engine.worker.process.kernel_compiler`
writes them. The directory lies where Numba keeps its own files: in `NUMBA_CACHE_DIR`, else beside
the sources, else in the user's cache directory.
"""

import hashlib
import json
import os
import platform
import sys
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path

from engine.worker.cpu.machine_code import BadObject, MachineCode

CPUINFO = Path("/proc/cpuinfo")
CPU_FIELDS = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags")
COMPILERS = "numba", "llvmlite"
DIGEST_BYTES = 32  # SHA-256, behind the object file


class KernelFiles:
    """The files in a directory, which exists."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def __repr__(self) -> str:
        return f"<KernelFiles in {self.directory}>"

    @classmethod
    def open(cls) -> "KernelFiles | None":
        """None where object files cannot be loaded or no directory can be written to."""
        if sys.platform != "linux" or platform.machine() != "x86_64" or not CPUINFO.exists():
            return None
        name = f"kernels-{_machine_digest()}"
        for parent in _parents():
            directory = parent / name
            try:
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            except OSError:
                continue
            if os.access(directory, os.R_OK | os.W_OK | os.X_OK):
                return cls(directory)
        return None

    def features(self) -> frozenset[str] | None:
        """The CPU's features as the compiler wrote them; None if it has not."""
        try:
            return frozenset(json.loads((self.directory / "features.json").read_bytes()))
        except (OSError, ValueError):
            return None

    def write_features(self, features: frozenset[str]) -> None:
        self._write("features.json", json.dumps(sorted(features)).encode())

    def load(self, name: str) -> MachineCode | None:
        """A kernel by its stamped name; None if it was not compiled or its file is damaged."""
        try:
            content = (self.directory / f"{name}.o").read_bytes()
            data, digest = content[:-DIGEST_BYTES], content[-DIGEST_BYTES:]
            return MachineCode(data) if hashlib.sha256(data).digest() == digest else None
        except (OSError, BadObject):
            return None

    def write(self, name: str, data: bytes) -> None:
        """Write a kernel. Raises `BadObject` if it could not be loaded."""
        MachineCode(data)
        self._write(f"{name}.o", data + hashlib.sha256(data).digest())

    def _write(self, name: str, data: bytes) -> None:
        new = self.directory / f"{name}.{os.getpid()}.new"
        new.write_bytes(data)
        new.replace(self.directory / name)


def _parents() -> list[Path]:
    """The directories that may hold the files, best first."""
    if configured := os.environ.get("NUMBA_CACHE_DIR"):
        return [Path(configured)]
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return [Path(__file__).parent / "__pycache__", caches / "podway"]


@cache
def _machine_digest() -> str:
    """A digest of the CPU, the versions of Python and of the compiler, and its settings."""
    hashed = hashlib.sha256(sys.version.encode())
    for line in CPUINFO.read_text().partition("\n\n")[0].splitlines():
        if line.partition(":")[0].strip() in CPU_FIELDS:
            hashed.update(line.encode())
    for name in sorted(os.environ):
        if name.startswith("NUMBA_") and name != "NUMBA_CACHE_DIR":
            hashed.update(f"{name}={os.environ[name]}".encode())
    for package in COMPILERS:
        spec = PathFinder.find_spec(package)
        if spec is not None and spec.origin is not None:
            hashed.update(Path(spec.origin).with_name("_version.py").read_bytes())
    return hashed.hexdigest()[:16]
