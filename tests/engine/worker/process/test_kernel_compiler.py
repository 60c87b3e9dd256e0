import os
import subprocess
import sys
from pathlib import Path


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
