import os
import subprocess
import sys
from pathlib import Path

from engine.worker.cpu.compiler_process import RECORD_BYTES
from engine.worker.cpu.kernels.linears import linear


def test_a_compiler_whose_reader_has_ended_ends_without_a_word(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "engine.worker.process.kernel_compiler", str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=writing, stderr=subprocess.PIPE
    ) as process:
        os.close(writing)
        _, errors = process.communicate()
    assert (process.returncode, errors) == (0, b"")


def test_a_kernel_of_other_sources_than_the_compiler_has_is_not_made(tmp_path: Path) -> None:
    """So it would be if another copy of the engine is installed than the one that is served."""
    name = f"{linear.__name__}:linear_float32_{'0' * 12}"
    command = [sys.executable, "-m", "engine.worker.process.kernel_compiler", str(tmp_path)]
    found = subprocess.run(
        command, input=name.encode().ljust(RECORD_BYTES), capture_output=True, check=True
    )
    assert b"the compiler imports another copy of the engine" in found.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["features.json"]
