import logging
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from engine.errors import StartupError
from engine.worker.cpu import build, compiler_process, no_compiler
from engine.worker.cpu.compiler_process import CompilerProcess
from engine.worker.cpu.kernel_files import KernelFiles
from engine.worker.cpu.kernels import elementwise
from engine.worker.cpu.machine_code import BadObject, MachineCode

pytestmark = pytest.mark.skipif(
    KernelFiles.open() is None, reason="object files are loaded on Linux for x86-64 only"
)

SCRIPT = """
import ctypes, hashlib, sys
from engine.worker.cpu import no_compiler
if {from_files}:
    no_compiler.settle(no_compiler.begin())
import torch
from engine.worker.cpu.build import kernel, request
from engine.worker.cpu.kernels import elementwise
from engine.worker.cpu.kernel_call import KernelCall
from engine.worker.cpu.thread_pool import NativeThreadPool

request([elementwise.activation])
x = torch.randn(64, 896, generator=torch.Generator().manual_seed(1))
y = torch.empty_like(x)
operands = elementwise.ActivationOperands(
    function=elementwise.GELU, x=x.data_ptr(), x_stride=896, y=y.data_ptr(), y_stride=896,
    width=896)
pool = NativeThreadPool(2)
with pool.awake():
    KernelCall(pool, elementwise.activation, operands).over_rows(64)
with pool.recording() as graph:
    KernelCall(pool, elementwise.activation, operands).over_rows(64)
pool.replay(graph)
if no_compiler.compiler is not None:
    no_compiler.compiler.finish()
    KernelCall(pool, elementwise.scale, elementwise.ScaleOperands(
        factor=1.0, x=y.data_ptr(), x_stride=896, width=896)).over_rows(64)
has_numba = hasattr(sys.modules["numba"], "__file__")
hits = getattr(kernel(elementwise.activation), "cache_hits", None)
print(hashlib.sha256(y.numpy().tobytes()).hexdigest(), has_numba, hits)
"""


@pytest.mark.process
def test_a_kernel_from_a_cache_or_an_object_file_has_the_bits_of_one_just_compiled(
    tmp_path: Path,
) -> None:
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}

    def run(*, from_files: bool) -> list[str]:
        command = [sys.executable, "-c", SCRIPT.format(from_files=from_files)]
        ran = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout.split()

    of_numba = [run(from_files=False) for _ in range(2)]  # the first leaves a cache
    of_files = [run(from_files=True) for _ in range(2)]
    assert [hits for _, *hits in of_numba] == [["True", "0"], ["True", "1"]]
    assert [hits for _, *hits in of_files] == [["False", "None"]] * 2
    assert len({bits for bits, *_ in (*of_numba, *of_files)}) == 1


@pytest.fixture(scope="module")
def code() -> bytes:
    """The object file of a kernel that this process also runs."""
    build.kernel(elementwise.apply_rope)
    return build.object_of(elementwise.apply_rope)


def test_a_damaged_object_file_counts_as_missing(tmp_path: Path, code: bytes) -> None:
    files = KernelFiles(tmp_path)
    files.write("whole", code)
    assert files.load("whole") is not None
    for length in (0, 3, 40, len(code) // 2, len(code) - 1):
        (tmp_path / "part.o").write_bytes((tmp_path / "whole.o").read_bytes()[:length])
        assert files.load("part") is None
    whole = (tmp_path / "whole.o").read_bytes()
    for at in range(0, len(whole), len(whole) // 50):
        flipped = bytearray(whole)
        flipped[at] ^= 1
        (tmp_path / "part.o").write_bytes(flipped)
        assert files.load("part") is None
    assert files.load("other") is None


def test_threads_that_load_a_kernel_at_once_get_the_same_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another one's code would leave the memory while its address is in use."""

    class Compiler:
        def __init__(self) -> None:
            self.both = threading.Barrier(2)

        def compile(self, name: str) -> object:
            self.both.wait(60)
            return object()

    def function() -> None:
        """It is not compiled."""

    monkeypatch.setattr(no_compiler, "compiler", Compiler())
    with ThreadPoolExecutor(2) as threads:
        one, other = threads.map(build.kernel, (function, function))
    assert one is other is build.kernel(function)


def test_an_object_file_that_cannot_be_loaded_is_not_written(tmp_path: Path, code: bytes) -> None:
    for bad in (b"", code.replace(b"memset\0", b"mamset\0") if b"memset\0" in code else code[:-9]):
        with pytest.raises(BadObject):
            KernelFiles(tmp_path).write("kernel", bad)
    other_machine = bytearray(code)
    other_machine[18] = 183  # AArch64
    with pytest.raises(BadObject, match="x86-64"):
        MachineCode(bytes(other_machine))
    assert list(tmp_path.iterdir()) == []


def test_features_are_known_once_they_are_written(tmp_path: Path) -> None:
    files = KernelFiles(tmp_path)
    assert files.features() is None
    files.write_features(frozenset({"avx2", "fma"}))
    assert files.features() == frozenset({"avx2", "fma"})


def test_the_worker_compiles_where_the_compiler_cannot_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiler_process, "MODULE", "engine.worker.cpu.no_such_module")
    process = CompilerProcess(KernelFiles(tmp_path))
    process.start()
    with caplog.at_level(logging.WARNING):
        assert not process.is_usable()
    assert "could not start" in caplog.text


def test_a_kernel_that_cannot_be_compiled_ends_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler_process, "MODULE", "engine.worker.cpu.no_such_module")
    process = CompilerProcess(KernelFiles(tmp_path))
    with pytest.raises(StartupError, match="could not be compiled"):
        process.compile("engine.worker.cpu.kernels.elementwise:rms_norm_0")
