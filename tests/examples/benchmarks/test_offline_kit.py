import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.examples.running import ROOT

KIT = ROOT / "examples" / "benchmarks" / "gpu" / "offline_kit"
MIB = 1 << 20
# Stands in for Python: the check builds a kernel, and the slimmed wheel gets what is in a folder.
PYTHON = """#!/bin/bash
case "$*" in
-c*) echo 9 ;;
*examples.benchmarks.gpu*) mkdir -p "$OUT/kernels/fa2" && cp kernel "$OUT/kernels/fa2/fa2.so" ;;
*slim_flashinfer.py*) rm -rf carried && cp -r "${@: -1}" carried ;;
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
    (tmp_path / "kernels" / "window").mkdir(parents=True)
    (tmp_path / "kernels" / "window" / "window.so").write_bytes(b"compiled elsewhere")
    run("prepare.sh", tmp_path, KERNELS=str(tmp_path / "kernels"))
    assert [each.name for each in (tmp_path / "carried").iterdir()] == ["window"]
    run("prepare.sh", tmp_path)
    assert not [*(tmp_path / "carried").iterdir()]


IMPORTED = {"flashinfer/prefill.py", "flashinfer/data/csrc/batch_prefill.cu"}
COMPILED = {
    "flashinfer/data/csrc/gemm_sm100.cu",
    "flashinfer/data/cutlass/include/cute/tensor.hpp",
    "flashinfer/data/cccl/cub/cub/cub.cuh",
}
UNUSED = {
    "flashinfer/data/csrc/xqa/mha.cu",
    "flashinfer/data/cutlass/examples/gemm.cu",
    "flashinfer/data/cccl/cub/test/catch2.cu",
}


@pytest.mark.parametrize("kernels", [(), ("fa2",)])
def test_the_slim_wheel_has_kernels_or_what_compiles_them(
    kernels: tuple[str, ...], tmp_path: Path
) -> None:
    record, folder = "flashinfer-1.dist-info/RECORD", tmp_path / "kernels"
    with zipfile.ZipFile(tmp_path / "flashinfer-1.whl", "w") as wheel:
        for name in (*IMPORTED, *COMPILED, *UNUSED, record):
            wheel.writestr(name, name)
    for name in kernels:
        (folder / name).mkdir(parents=True)
        (folder / name / f"{name}.so").touch()
    words = [tmp_path / "flashinfer-1.whl", tmp_path / "out", folder]
    subprocess.run([sys.executable, KIT / "slim_flashinfer.py", *words], check=True)
    with zipfile.ZipFile(tmp_path / "out" / "flashinfer-1.whl") as wheel:
        found, rows = {*wheel.namelist()}, wheel.read(record).decode().splitlines()
    installed = {f"flashinfer/data/aot/{name}/{name}.so" for name in kernels}
    assert found == IMPORTED | (installed or COMPILED) | {record}
    assert {row.split(",")[0] for row in rows} == found
