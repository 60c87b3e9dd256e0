import os
import subprocess
from pathlib import Path

from tests.examples.running import ROOT

KIT = ROOT / "examples" / "benchmarks" / "gpu" / "offline_kit"
MIB = 1 << 20
# Stands in for Python: the check builds a kernel, and the slimmed wheel gets what is in a folder.
PYTHON = """#!/bin/bash
case "$*" in
-c*) echo 9 ;;
*examples.benchmarks.gpu*) mkdir -p "$OUT/kernels/fa2" && cp kernel "$OUT/kernels/fa2/fa2.so" ;;
*slim_flashinfer.py*) cp -r "${@: -1}" carried ;;
esac
"""


def run(script: str, folder: Path, **environment: str) -> None:
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    subprocess.run(
        ["bash", KIT / script], cwd=folder, env={**environment, "PATH": path}, check=True
    )


def test_built_kernels_come_back_in_parts_and_are_carried_along(tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in (("python3", PYTHON), ("nvidia-smi", "#!/bin/sh\n")):
        (programs / name).write_text(text)
        (programs / name).chmod(0o700)
    kernel = os.urandom(17 * MIB)
    (tmp_path / "kernel").write_bytes(kernel)
    out = tmp_path / "out"
    run("run.sh", tmp_path, OUT=str(out))
    assert sorted(each.name for each in out.iterdir()) == ["kernels.tgz.00", "kernels.tgz.01"]
    assert max(each.stat().st_size for each in out.iterdir()) == 15 * MIB
    run("prepare.sh", tmp_path, KERNELS=str(out))
    assert (tmp_path / "carried" / "fa2" / "fa2.so").read_bytes() == kernel
